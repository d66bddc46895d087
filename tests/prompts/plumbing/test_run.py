"""A run folder knows itself: its records, its result, and the answers that a path means."""

import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from panjue.finetune.trained import open_trained
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import sha256, write_json
from panjue.prompts.plumbing.records import (
    CASES,
    CHOICE,
    DATA,
    NAMES,
    REPLIES,
    RESULT,
    ROWS,
    WEIGHTS,
    AnswersRecord,
    Choice,
    ConfidenceWeights,
    RunRecord,
    if_any,
    model_less_classifier,
)
from panjue.prompts.plumbing.run import HELD_OUT, find_answers, weights_that_answered
from panjue.serve.answers import read_answers

TRAINED: dict[str, Any] = {
    **{"task": "judgment", "base": "b", "base_sha256": "1", "train": "t", "train_sha256": "2"},
    **{"prompt_sha256": "3", "max_tokens": 64, "method": "lora", "dtype": "auto", "seed": 0},
    **{"patience": 3, "trainer": {"max_steps": 1}, "lora": {"r": 8}},
    **{"quantization": {}, "versions": {"torch": "2"}},
}
ANSWERED: dict[str, Any] = {
    **{"task": "judgment", "test": "t", "test_sha256": "1", "prompt_sha256": "3", "samples": 0},
    **{"adapter": "merge", "constrained": True, "max_tokens": 64, "seed": 0, "engine": {}},
    **{"sampling": {}, "trained": "gone/adapter"},
}


def trained_run(folder: Path, name: str = "adapter") -> Path:
    (folder / name).mkdir(parents=True)
    RunRecord.model_validate(TRAINED).write(folder / name)
    (folder / name / "labels.json").write_text("{}", "utf-8")
    return folder


@pytest.mark.parametrize("name", ["adapter", "model", "."])
def test_a_record_comes_back_as_it_was_written(tmp_path: Path, name: str) -> None:
    run = trained_run(tmp_path / "run", name)
    trained = open_trained(run)
    assert trained.folder == tmp_path / "run" / name
    assert trained.record == RunRecord.model_validate(TRAINED)


def test_records_differ_by_all_but_versions_and_moved_files() -> None:
    old = RunRecord.model_validate(TRAINED)
    new = RunRecord.model_validate(
        {**TRAINED, "train": "moved", "versions": {}, "trainer": {"max_steps": 2, "x": "a" * 64}}
    )
    told = f"trainer.max_steps: 1 -> 2; trainer.x: null -> {'a' * 12}…{'a' * 12}"
    assert old.difference(new, NAMES, DATA, ROWS, WEIGHTS) == told
    assert old.difference(new, DATA, ROWS) == ""


@pytest.mark.parametrize("kind", [RunRecord, AnswersRecord])
def test_every_entry_says_what_it_shapes(kind: type[RunRecord | AnswersRecord]) -> None:
    known = {NAMES, DATA, ROWS, WEIGHTS, RESULT, CASES, REPLIES}
    for name, info in kind.model_fields.items():
        assert len(known.intersection(info.metadata)) == 1, name


@pytest.mark.parametrize("who", ["model", "classifier"])
def test_a_record_of_version_0_4_is_read_without_what_went(who: str) -> None:
    went = {"answered_by": who, "because": "better", "for_choice": True}
    old = {**ANSWERED, **went, "scaling": {"penalty": {"agree": (1.0, 0.0)}}}
    record = AnswersRecord.model_validate(old)
    assert record == AnswersRecord.model_validate({**ANSWERED, "asked": who == "model"})


def test_a_choice_comes_back_as_it_was_written(tmp_path: Path) -> None:
    field = {"answered_by": "model", "metric": "final", "model": 0.5, "classifier": 0.4}
    of_0_4 = {"cases": 3, "counted": 2, "calibration": {"a": {"agree": (1, 0)}}}
    fields = {"a": {**field, "low": 0.0, "high": 0.2}}
    choice = Choice.model_validate({**of_0_4, "fields": fields})
    assert (choice.answered_by, choice.score("a", "classifier")) == ({"a": "model"}, 0.4)
    weights = ConfidenceWeights(classifier=1, model=0, shift=0)
    assert choice.calibration == {"a": {"agree": weights}}
    assert model_less_classifier(choice.best["a"]) == pytest.approx((0.1, 0.0, 0.2))
    path = tmp_path / CHOICE
    assert if_any(Choice, path) is None
    write_json(path, choice.model_dump(mode="json"))
    assert if_any(Choice, path) == choice
    for broken in ('{"metric": "final", "cases": 10}', '{"fields": 3}', '{"adapter": "a"}'):
        path.write_text(broken, "utf-8")
        with pytest.raises(UserError, match=r"choice\.json: .*; delete it$"):
            if_any(Choice, path)


def test_what_is_missing_or_of_an_older_version_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such folder; nothing trained is there"):
        open_trained(tmp_path / "nowhere")
    with pytest.raises(UserError, match="`panjue generate` makes them"):
        read_answers(tmp_path)
    (tmp_path / "manifest.json").write_text('{"generate": {}}', "utf-8")
    with pytest.raises(UserError, match="another version of panjue made it"):
        read_answers(tmp_path)


def test_a_path_means_the_answers_to_the_gold_file(tmp_path: Path) -> None:
    gold, run = tmp_path / "gold.jsonl", tmp_path / "answers/run"
    gold.write_text("", "utf-8")
    run.mkdir(parents=True)
    (run / "config.yaml").touch()
    RunRecord.model_validate(TRAINED).write(run)
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    for name, digest in (("a", "1"), ("b", empty)):
        (run / "answers" / name).mkdir(parents=True)
        record = AnswersRecord.model_validate({**ANSWERED, "test_sha256": digest})
        record.write(run / "answers" / name)
    assert find_answers(run, gold, sha256(gold)) == run / "answers/b"
    (run / "answers/c").mkdir()
    for content in ("{", '{"test_sha256": 7}'):  # nothing else needs to be read
        (run / "answers/c/manifest.json").write_text(content, "utf-8")
        assert find_answers(run, gold, sha256(gold)) == run / "answers/b"
    (run / "answers/c/manifest.json").unlink()
    assert find_answers(run / "answers/a", gold, sha256(gold)) == run / "answers/a"
    assert find_answers(run / "answers/a/submission.jsonl") == run / "answers/a"
    assert find_answers(run / "answers", gold, sha256(gold)) == find_answers(
        run, gold, sha256(gold)
    )
    assert find_answers(tmp_path / "other.jsonl") is None
    with pytest.raises(UserError, match="has several answers; say which: "):
        find_answers(run)
    shutil.copytree(run / "answers/b", run / "answers/gold")
    with pytest.raises(UserError) as error:
        find_answers(run, gold, sha256(gold))
    assert str(error.value).endswith(f"which: {run}/answers/b, {run}/answers/gold")
    shutil.rmtree(run / "answers/gold")
    for name in (HELD_OUT, f"{HELD_OUT}-b"):
        folder = (run / "answers/b").rename(run / "answers" / name)
        assert find_answers(run) == run / "answers/a"
        assert find_answers(run, gold, sha256(gold)) == run / "answers/a"
        assert find_answers(folder, gold, sha256(gold)) == folder, "where they are named"
        folder.rename(run / "answers/b")


def test_a_folder_of_cases_is_recognised_by_its_content(tmp_path: Path) -> None:
    gold = tmp_path / "gold"
    (gold / "chat").mkdir(parents=True)
    (gold / "chat/chat_1.json").write_text("[]", "utf-8")
    for name, digest in {"a": sha256(gold), "b": "1"}.items():
        folder = tmp_path / "run/answers" / name
        record = AnswersRecord.model_validate({**ANSWERED, "test_sha256": digest})
        folder.mkdir(parents=True)
        record.write(folder)
    assert find_answers(tmp_path / "run", gold, sha256(gold)) == tmp_path / "run/answers/a"


def test_of_several_answers_the_empty_ones_do_not_count(tmp_path: Path) -> None:
    for name, file in {"a": "completions.jsonl", "b": "submission.jsonl", "c": None}.items():
        folder = tmp_path / "answers" / name
        folder.mkdir(parents=True)
        AnswersRecord.model_validate(ANSWERED).write(folder)
        (folder / "completions.jsonl").touch()  # of a generation that was killed at its start
        if file:
            (folder / file).write_text("{}\n", "utf-8")
    with pytest.raises(UserError) as error:
        find_answers(tmp_path)
    places = tmp_path / "answers"
    assert str(error.value).endswith(f"which: {places}/a, {places}/b")
    shutil.rmtree(places / "b")
    assert find_answers(tmp_path) == places / "a"


def test_answers_of_a_moved_run_find_its_adapter(tmp_path: Path) -> None:
    run = trained_run(tmp_path / "moved")
    folder = run / "answers/test"
    folder.mkdir(parents=True)
    assert weights_that_answered(folder, ANSWERED["trained"]) == run / "adapter"


def test_a_folder_without_answers_gets_one_line_with_the_way_out(
    tmp_path: Path, panjue: Callable[..., CompletedProcess[str]]
) -> None:
    run = trained_run(tmp_path / "run")
    kept = trained_run(run / "kept", "step-5") / "step-5"
    nothing = "has no answers; `panjue generate` makes them"
    other = f"{nothing} in a run folder, and nothing trained is in this one"

    def refused(folder: Path, reason: str) -> None:
        for words in (
            ("bundle", folder),
            ("bundle", folder, tmp_path / "out.zip"),
            ("report", folder),
        ):
            said = panjue(*words)
            assert (said.returncode, said.stderr) == (2, f"panjue: {folder}: {reason}\n")

    refused(run, nothing)
    refused(run / "adapter", nothing)
    refused(tmp_path, other)
    refused(tmp_path / "nowhere", "there is no such folder; `panjue runs` lists the trainings")
    folder = run / "answers/test"
    folder.mkdir(parents=True)
    AnswersRecord.model_validate(ANSWERED).write(folder)
    for place in (run / "adapter", kept):
        refused(place, f"has no answers; give its run folder, {run}")
    said = panjue("bundle", run)
    assert "use RUN OUT.zip [--base FOLDER], or --verify ZIP --cases TEST" in said.stderr


@pytest.mark.parametrize("content", ["[1, 2]", '{"name": "a web page"}', ""])
def test_a_manifest_of_something_else_is_not_read(content: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(content, "utf-8")
    for path in (tmp_path, tmp_path / "submission.jsonl"):
        assert find_answers(path) is None


def test_a_folder_of_answers_is_no_training(tmp_path: Path) -> None:
    run = trained_run(tmp_path / "answers/run", ".")
    assert open_trained(run).folder == run, "whatever the folder around it is called"
    AnswersRecord.model_validate(ANSWERED).write(run)
    with pytest.raises(UserError, match=r"run: has answers; give the run folder"):
        open_trained(run)
