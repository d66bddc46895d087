import hashlib
import json
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from panjue.finetune.examples import Examples, trained_on
from panjue.prompts.example import Example
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.files import dump
from panjue.prompts.plumbing.records import AnswersRecord, RunRecord
from panjue.prompts.reader import Reader, is_held_out, text_hash
from panjue.prompts.shorten import shorten
from panjue.prompts.task import load_task
from panjue.serve.answers import Answers, with_cases
from tests.records import ANSWERED, TRAINED

from .conftest import a_config

TASK = load_task("judgment")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a training file, and a file to mix in that has half of its cases again."""
    from panjue.prompts.tasks.judgment.demo import write_demo

    folder = tmp_path_factory.mktemp("cases")
    write_demo(folder, {"train": 60, "test": 40, "base": 1})
    lines = (folder / "train.jsonl").read_text("utf-8").splitlines()
    others = (folder / "test.jsonl").read_text("utf-8").splitlines()
    mixed = [{**json.loads(line), "id": i} for i, line in enumerate([*others, *lines[:30]])]
    (folder / "mix.jsonl").write_text("\n".join(map(dump, mixed)), "utf-8")
    return folder / "train.jsonl", folder / "mix.jsonl"


def chosen_of(train: Path, **settings: Any) -> Examples:
    """Return the examples of files as a training chooses them."""
    run = train.parent / "run"
    return Examples(a_config(run=run, train=train, **settings), Reader(TASK))


@pytest.mark.parametrize("ratio", [0.0, 0.25, 99.0])
def test_the_rest_of_the_held_out_tenth_is_trained_on_with_a_ratio_mixed_in(
    files: tuple[Path, Path], ratio: float
) -> None:
    train, mix = files
    chosen = chosen_of(train, mix=mix, mix_ratio=ratio)
    cases = list(Reader(TASK).read(train))
    mixable = [e for e in Reader(TASK).read(mix) if not is_held_out(e)]
    for _ in range(2):  # they are read once, and used several times
        assert list(chosen.held_out) == [e for e in cases if is_held_out(e)]
        assert list(chosen.train) == [e for e in cases if not is_held_out(e)]
        assert list(chosen.mixable) == mixable
    assert chosen.mixed_size == min(round(len(chosen.train) * ratio), len(mixable))
    assert len(list(chosen)) == len(chosen.train) + chosen.mixed_size


@pytest.mark.parametrize("limit", [1, 3, 1000])
def test_with_a_limit_there_are_the_first_ones_of_each(
    files: tuple[Path, Path], limit: int, tmp_path: Path
) -> None:
    train, mix = files
    whole = chosen_of(train, mix=mix)
    few = chosen_of(train, mix=mix, limit=limit)
    assert list(few.held_out) == list(whole.held_out)[:limit]
    assert list(few.train) == list(whole.train)[:limit]
    assert list(few.mixable) == list(whole.mixable)[:limit]
    with_dev = chosen_of(train, dev=mix, limit=limit)
    assert list(with_dev.held_out) == list(Reader(TASK).read(mix))[:limit]
    held_out = Reader(TASK, held_out=True, limit=limit).read(train)
    assert list(held_out) == list(few.held_out), "those that generate asks"
    data = {"train": str(train), "limit": limit, "split_by": "normal text"}
    training = RunRecord.model_validate({**TRAINED, **data})
    assert list(trained_on(training, TASK)) == list(few.train), "those that score compares"


def test_what_is_behind_the_limit_is_not_read(tmp_path: Path, files: tuple[Path, Path]) -> None:
    lines = files[0].read_text("utf-8").splitlines()[:20]
    (tmp_path / "cut.jsonl").write_text("\n".join([*lines, "{"]), "utf-8")
    assert len(list(Reader(TASK, limit=20).read(tmp_path / "cut.jsonl"))) == 20
    assert len(chosen_of(tmp_path / "cut.jsonl", dev=files[1], limit=2).train) == 2


def test_a_tenth_is_held_out_and_always_the_same() -> None:
    held_out = [n for n in range(1000) if is_held_out(Example(n, f"案件{n}"))]
    assert (len(held_out), held_out[:4]) == (98, [2, 5, 7, 17])


FACTS = "2019年11月13日，甲、乙在ABC商场（二楼）盗窃手机1部；价值：3000元。"
SPACE = st.sampled_from(["", " ", "\n", "\u3000", "\u200b", "\xa0\t"])


@given(st.lists(SPACE, min_size=len(FACTS), max_size=len(FACTS)), st.booleans())
def test_white_space_and_width_move_no_case_to_the_other_side(
    spaces: list[str], is_wide: bool
) -> None:
    text = "".join(f"{space}{character}" for space, character in zip(spaces, FACTS, strict=True))
    if is_wide:
        text = "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text)
    assert text_hash(Example(1, text)) == text_hash(Example(2, FACTS))
    assert text_hash(Example(1, text + "了")) != text_hash(Example(2, FACTS))


def test_twins_that_differ_in_white_space_stand_on_one_side(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    lines = []
    for line in files[0].read_text("utf-8").splitlines():
        row = json.loads(line)
        lines += [row, {**row, "id": f"{row['id']} again", "fact": row["fact"] + "\n"}]
    train = tmp_path / "train.jsonl"
    train.write_text("\n".join(map(dump, lines)), "utf-8")
    dev = tmp_path / "dev.jsonl"
    dev.write_text("\n".join(map(dump, lines[:20:2])), "utf-8")
    for chosen in (chosen_of(train), chosen_of(train, dev=dev)):
        held_out = {"".join(example.text.split()) for example in chosen.held_out}
        trained = {"".join(example.text.split()) for example in chosen.train}
        assert held_out
        assert not held_out & trained


def test_a_training_of_0_4_has_the_held_out_cases_that_it_had(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    """It has no `split_by`; its held-out cases are those of the text as it is."""
    assert RunRecord.model_validate(TRAINED).split_by == "text"
    record = AnswersRecord.model_validate({**ANSWERED, "test": "t", "test_sha256": ""})
    record = record.model_copy(update={"held_out": True})
    answers = Answers(tmp_path, record, None, Labels(), "")
    reader = with_cases(answers, files[0], "").reader

    def was_held_out(example: Example) -> bool:
        return int(hashlib.sha256(example.text.encode()).hexdigest()[:8], 16) % 10 == 0

    cases = list(Reader(TASK).read(files[0]))
    assert list(reader.read(files[0])) == list(filter(was_held_out, cases))


def test_what_is_held_out_is_neither_trained_on_nor_mixed_in(files: tuple[Path, Path]) -> None:
    train, mix = files
    read = {e.text for e in Reader(TASK).read(mix)}
    tenth = chosen_of(train, mix=mix, mix_ratio=99)
    file = chosen_of(train, dev=mix, mix=mix, mix_ratio=99)
    for chosen in (tenth, file):
        held = {e.text for e in chosen.held_out}
        assert held & read, "the file to mix in has some of them"
        assert not held & {e.text for e in chosen}
    assert (tenth.dropped, file.dropped) == (0, 30), "those in both files are counted"
    assert len(file.held_out) == len(list(Reader(TASK).read(mix)))
    assert not file.mixed_size


def test_texts_are_held_on_disk_and_not_in_memory(files: tuple[Path, Path], tmp_path: Path) -> None:
    case = json.loads(files[0].read_text("utf-8").splitlines()[0])
    text = case["fact"] + "长" * 50_000
    rows = [dump({**case, "id": i, "fact": f"{text}{i}"}) for i in range(80)]
    (tmp_path / "long.jsonl").write_text("\n".join(rows), "utf-8")
    tracemalloc.start()
    chosen = chosen_of(tmp_path / "long.jsonl")
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(chosen.train) + len(chosen.held_out) == 80
    assert kept < 10 * 100_000, "a tenth of them"


def test_no_outcome_decides_what_is_asked_held_out_shortened_or_mixed_in(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    train, mix = files
    cases = [json.loads(line) for line in mix.read_text("utf-8").splitlines()]
    for case in cases:
        for outcome in case["outcomes"]:
            outcome |= {"charges": ["诈骗罪"], "articles": ["266"]}
            outcome["penalty"]["imprisonment"] += 60
    (tmp_path / "other.jsonl").write_text("\n".join(map(dump, cases)), "utf-8")
    others = Reader(TASK).read(tmp_path / "other.jsonl")
    for example, judged in zip(Reader(TASK).read(mix), others, strict=True):
        assert judged.answer != example.answer
        for other in (judged, replace(example, answer=None)):
            assert TASK.ask.prompt(other) == TASK.ask.prompt(example)
            assert is_held_out(other) == is_held_out(example)
            shorter = [shorten(e, 60, lambda e: len(e.text)).example for e in (example, other)]
            assert shorter[0].text == shorter[1].text
    chosen = [chosen_of(train, mix=path, mix_ratio=0.3) for path in (mix, tmp_path / "other.jsonl")]
    assert [e.id for e in chosen[0]] == [e.id for e in chosen[1]]


def test_names_of_all_files_that_their_facts_do_not_have_are_counted(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    train, mix = files
    assert chosen_of(train, mix=mix).names.missing == 0
    rows = [json.loads(line) for line in mix.read_text("utf-8").splitlines()]
    rows[3]["fact"] = "经审理查明，有人行窃。"
    changed = tmp_path / "mix.jsonl"
    changed.write_text("\n".join(map(dump, rows)), "utf-8")
    names = chosen_of(train, mix=changed).names
    assert names.missing == len(rows[3]["defendants"])
    assert names.first == f"id {rows[3]['id']}, {rows[3]['defendants'][0]}"
