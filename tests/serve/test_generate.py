"""`panjue generate` as a user runs it, on the engine that runs already."""

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import jsonschema
import pytest

from panjue.eval.choice import Choice, read_choice
from panjue.finetune.classifier.opinions import load_advisor
from panjue.prompts.example import Example
from panjue.prompts.labels import load_labels
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump, read_json, read_lines, sha256, write_json
from panjue.prompts.plumbing.run import Answers, AnswersRecord, Run
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.serve.ask import answer_all
from panjue.serve.decoding import decode_answers
from panjue.serve.generate import generate
from panjue.serve.settings import generate_settings

Panjue = Callable[..., CompletedProcess[str]]
Lines = Callable[..., list[str]]


@pytest.fixture
def cases(workshop: Path) -> Path:
    return workshop / "demo/test.jsonl"


@pytest.fixture
def fresh(trained: Path, tmp_path: Path) -> Path:
    """Return a copy of a training that has answered nothing."""
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def run(answered: Path, tmp_path: Path) -> Path:
    """Return a copy of a finished run."""
    return shutil.copytree(answered, tmp_path / "run")


def change_record(run: Path, **changes: Any) -> None:
    """Change entries in the record of a training; None removes one."""
    path = run / "adapter/manifest.json"
    record = {**read_json(path), **changes}
    write_json(path, {name: value for name, value in record.items() if value is not None})


def answer(run: Path, test: Path, *words: str) -> None:
    settings = generate_settings(Run(run), test, ["answer=model", *words])
    generate(Run(run), test, settings, decode_answers)


@pytest.fixture
def lines_of(panjue: Panjue, cases: Path) -> Lines:
    """Return what runs `panjue generate RUN TEST …` and returns the lines that it prints."""

    def lines(run: Path, *words: str, test: Path = cases) -> list[str]:
        done = panjue("generate", run, test, *words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    return lines


def submission(run: Path) -> bytes:
    return (run / "answers/test/submission.jsonl").read_bytes()


def held_out_of(run: Path) -> Path:
    """Return the folder of the answers to the held-out cases, which there must be once."""
    [folder] = run.glob("answers/held-out-*")
    return folder


def test_generate_writes_completions_and_a_clean_submission(
    answered: Path, cases: Path, panjue: Panjue
) -> None:
    folder = answered / "answers/test"
    rows = {row["id"]: row for _, row in read_lines(folder / "completions.jsonl")}
    fields = "id texts finish prompt_tokens cached_tokens completion_tokens dropped_sentences"
    assert {" ".join(row) for row in rows.values()} == {f"{fields} opinions"}
    assert panjue("check", folder / "submission.jsonl", "--cases", cases).returncode == 0
    task = load_task("judgment")
    labels = load_labels(folder / "labels.json")
    for case in Reader(task).read(cases):
        [reply] = rows.pop(case.id)["texts"]
        jsonschema.validate(json.loads(reply), task.ask.schema(case, labels))
    assert not rows
    report = read_json(folder / "decode.json")
    assert report["examples"] == 24
    assert report["unreadable"] == report["cut"] == 0
    record = Answers(folder).record
    assert (record.task, record.max_tokens, record.is_of_adapter) == ("judgment", 1024, True)


def test_the_first_generate_asks_who_is_better_and_the_classifier_answers(
    fresh: Path, cases: Path, lines_of: Lines, running_engine: list[Path]
) -> None:
    lines = lines_of(fresh)
    choice = read_choice(held_out_of(fresh))
    assert choice
    assert choice.classifier > choice.model, "a model of two layers has learnt little"
    assert str(choice) in lines
    assert lines[-2:] == [
        f"answered by the text classifier: {choice}",
        f"written: {fresh}/answers/test/submission.jsonl",
    ]
    held_out = Answers(held_out_of(fresh)).record
    assert (held_out.held_out, held_out.answered_by) == (True, "model")
    asked = list(read_lines(held_out_of(fresh) / "completions.jsonl"))
    assert len(asked) == choice.cases > 0
    assert running_engine == [fresh / "merged"]

    assert Answers(fresh / "answers/test").record.answered_by == "classifier"
    assert not (fresh / "answers/test/completions.jsonl").exists(), "no test case was asked"
    task = load_task("judgment")
    advisor = load_advisor(fresh / "adapter", task, load_labels(fresh / "adapter/labels.json"))
    assert advisor
    own = []
    for case in Reader(task).read(cases):
        own.append(task.data.write(case, advisor.alone(case, advisor.opinions(case))))
    assert [row for _, row in read_lines(fresh / "answers/test/submission.jsonl")] == own


def test_the_choice_is_resumed_and_made_once_for_each_way_to_reply(
    fresh: Path, lines_of: Lines, running_engine: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = lines_of(fresh)
    torn = held_out_of(fresh) / "completions.jsonl"
    kept, _, last = torn.read_bytes().rstrip().rpartition(b"\n")
    torn.write_bytes(kept + b"\n" + last[:-10])
    (held_out_of(fresh) / "choice.json").unlink()
    again = lines_of(fresh)
    assert "continuing: 9 of 10 are answered already" in again
    assert again[-2:] == lines[-2:]
    assert torn.read_bytes().startswith(kept + b"\n"), "finished rows are never made again"
    assert len(running_engine) == 2
    for words in (["answers=free", "constrained=false"], ["answers=seeded", "seed=1"]):
        lines_of(fresh, *words)
    assert len(running_engine) == 4, "other replies are compared anew"
    monkeypatch.setattr("panjue.serve.generate.held_out_cases", None)  # needs no training file
    assert lines_of(fresh, "answers=later")[-2] == lines[-2]
    assert len(running_engine) == 4


def test_where_the_model_is_better_one_engine_answers_both_files(
    fresh: Path, lines_of: Lines, running_engine: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Choice, "answered_by", "model")
    monkeypatch.setattr("panjue.finetune.classifier.calibration.MIN_SCALED", 1)
    lines = lines_of(fresh)
    assert running_engine == [fresh / "merged"]
    choice = read_choice(held_out_of(fresh))
    assert choice
    assert AnswersRecord.read(fresh / "answers/test").scaling == choice.scaling != {}
    assert AnswersRecord.read(held_out_of(fresh)).scaling == {}, "they are what it was fitted on"
    assert len(list(read_lines(fresh / "answers/test/completions.jsonl"))) == 24
    assert lines[-2] == f"answered by the model: {choice}"
    for who in ("classifier", "model"):
        lines_of(fresh, f"answer={who}")
        assert AnswersRecord.read(fresh / "answers/test").scaling == choice.scaling


def test_a_dev_file_of_the_training_is_asked_once(
    fresh: Path, cases: Path, lines_of: Lines, running_engine: list[Path]
) -> None:
    change_record(fresh, dev=str(cases), dev_sha256=sha256(cases))
    lines = lines_of(fresh)
    assert "on 24 held-out cases" in lines[-2]
    assert [path.parent.name for path in fresh.glob("answers/*/completions.jsonl")] == ["test"]
    assert lines_of(fresh)[-2] == lines[-2]
    assert len(running_engine) == 1


def test_who_answers_can_be_said_and_said_again(
    run: Path, answered: Path, lines_of: Lines, running_engine: list[Path]
) -> None:
    completions = run / "answers/test/completions.jsonl"
    before = completions.read_bytes()
    lines = lines_of(run, "answer=classifier")
    assert lines[-2] == "answered by the text classifier: as answer=classifier says"
    assert submission(run) != submission(answered)
    lines = lines_of(run, "answer=model")
    assert lines[-2] == "answered by the model: as answer=model says"
    assert submission(run) == submission(answered)
    assert completions.read_bytes() == before
    assert not running_engine, "nothing is asked again"
    assert not list(run.glob("answers/held-out*"))


def test_without_the_file_of_the_training_the_model_answers(
    fresh: Path, lines_of: Lines, running_engine: list[Path]
) -> None:
    change_record(fresh, train="gone.jsonl")
    why = "no held-out cases to compare it on: gone.jsonl is missing, or was changed"
    assert lines_of(fresh)[-2] == f"answered by the model: {why}"
    assert len(running_engine) == 1


def test_a_classifier_that_was_not_fitted_cannot_answer(fresh: Path, cases: Path) -> None:
    change_record(fresh, classifier_sha256=None)
    with pytest.raises(UserError, match=f"^answer=classifier: the training of {fresh} fitted none"):
        answer(fresh, cases, "answer=classifier")
    assert not (fresh / "answers/test").exists()


def test_answers_of_the_classifier_are_not_replaced_by_those_to_another_file(
    fresh: Path, cases: Path, tmp_path: Path
) -> None:
    words = ("answer=classifier", "answers=a")
    answer(fresh, cases, *words)
    before = sha256(fresh / "answers/a")
    other = tmp_path / "test.jsonl"
    other.write_text(cases.read_text("utf-8").partition("\n")[0], "utf-8")
    with pytest.raises(UserError, match=f"has answers to another file, {cases}; they are kept"):
        answer(fresh, other, *words)
    assert sha256(fresh / "answers/a") == before
    scores = fresh / "answers/a/scores.json"
    scores.write_text("{}", "utf-8")
    answer(fresh, cases, *words)
    assert scores.exists(), "they are of the same answers"


def test_a_run_resumes_with_other_versions_and_settings_of_memory_and_speed(
    run: Path, cases: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After running out of memory such settings must change."""
    path = run / "answers/test/manifest.json"
    record = read_json(path)
    record["versions"]["transformers"] = "5.0"
    write_json(path, record)
    answer(run, cases, "engine.gpu_memory_utilization=0.5", "in_flight=3")
    printed = capsys.readouterr().out
    assert "resuming with other versions: transformers: 5.0 -> " in printed
    assert "all 24 are answered already" in printed, "and no engine is started"
    assert read_json(path)["versions"] == record["versions"], "those of the old rows"


def test_files_made_from_completions_are_deleted_with_them(
    run: Path, cases: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run / "answers/test"
    for name in ("scores.json", "report.html"):
        (folder / name).write_text("{}", "utf-8")
    (folder / "completions.jsonl").unlink()
    with pytest.raises(UserError, match="engine"):  # so it never answers
        answer(run, cases, "sampling.temperature=0.5", "engine.dtype=float23")
    assert "deleted submission.jsonl, cases.jsonl, decode.json" in capsys.readouterr().out
    assert {path.name for path in folder.glob("[!.]*")} == {"manifest.json", "labels.json"}


def test_answers_of_other_settings_are_kept_and_another_name_is_offered(
    run: Path, cases: Path
) -> None:
    before = sha256(run / "answers/test/completions.jsonl")
    with pytest.raises(UserError) as error:
        answer(run, cases, "sampling.temperature=0.5")
    assert str(error.value) == (
        f"{run}/answers/test: has answers made with other settings "
        "(sampling.temperature: null -> 0.5); they are kept: name another folder for these with "
        "answers=NAME"
    )
    assert sha256(run / "answers/test/completions.jsonl") == before


def test_nobody_else_writes_the_answers_until_they_are_decoded(run: Path, cases: Path) -> None:
    def while_held(folder: Path) -> None:
        with ThreadPoolExecutor(1) as another:
            another.submit(decode_answers, folder).result()

    settings = generate_settings(Run(run), cases, ["answer=model"])
    with pytest.raises(UserError, match="answers/test: another process is at work there"):
        generate(Run(run), cases, settings, while_held)
    decode_answers(run / "answers/test")


def test_a_case_that_training_has_no_room_for_is_asked(
    run: Path, tmp_path: Path, lines_of: Lines, running_engine: list[Path]
) -> None:
    """Else the heaviest case of its file would be answered without a look at it."""
    before = sha256(run / "answers/test")
    names = [f"张某{chr(0x4E00 + i)}" for i in range(40)]
    many = {"id": 1, "fact": f"被告人{'、'.join(names)}共同盗窃。", "defendants": names}
    long = {"id": 2, "fact": "被告人张某一" + "出行" * 20_000, "defendants": ["张某一"]}
    test = tmp_path / "many.jsonl"
    test.write_text(f"{dump(many)}\n{dump(long)}\n{{}}\n", "utf-8")
    printed = "\n".join(lines_of(run, "answer=model", test=test))
    rows = {row["id"]: row for _, row in read_lines(run / "answers/many/completions.jsonl")}
    assert len(rows[1]["texts"]) == 1
    assert rows[1]["prompt_tokens"] + rows[1]["completion_tokens"] > Run(run).record.max_tokens
    assert rows[2]["refused"].endswith("delete this row of completions.jsonl")
    assert f"bad rows skipped: 1; the first: {test}:3: " in printed
    assert "what no reply has is answered by: text classifier" in printed
    assert f"id 2: {rows[2]['refused']}" in printed
    assert sha256(run / "answers/test") == before, "each test file has a folder of answers"


def test_a_file_that_cannot_be_read_to_its_end_is_one_error_after_the_answers() -> None:
    answered: list[int | str] = []

    def examples() -> Iterator[Example]:
        yield Example(0, "甲")
        raise UserError("cases.jsonl:2: cut off")

    async def answer(example: Example) -> None:
        await asyncio.sleep(0.01)
        answered.append(example.id)

    with pytest.raises(UserError, match=r"^cases.jsonl:2: cut off$"):
        asyncio.run(answer_all(examples(), answer, asyncio.Semaphore(8)))
    assert answered == [0]
