"""`panjue choose`: the adapter with the best score on half of the held-out cases is used."""

import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from panjue.finetune.trained import open_trained, read_trained
from panjue.prompts.plumbing.files import dump, read_json, read_lines, sha256, write_json
from panjue.prompts.plumbing.records import WHOLE, AnswersRecord, Choice, RunRecord, if_any
from panjue.prompts.plumbing.run import ADAPTER_WEIGHTS
from panjue.prompts.reader import Reader, half_of
from panjue.prompts.task import load_task
from panjue.serve.answers import read_answers
from panjue.serve.merge import merge

Panjue = Callable[..., CompletedProcess[str]]
TASK = load_task("judgment")
LOWEST = 12  # the step of the lowest loss of the short training


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """Return a training that kept two more adapters, which are what checkpoints had."""
    run = shutil.copytree(trained, tmp_path / "run")
    with (run / "log.jsonl").open("a", encoding="utf-8") as log:
        for step, loss in ((3, 9.5), (4, 9.25)):
            log.write(dump({"step": step, "eval_loss": loss}) + "\n")
            shutil.copytree(run / "adapter", run / f"kept/step-{step}")
            earlier = run / "checkpoints/checkpoint-6" / ADAPTER_WEIGHTS
            shutil.copy(earlier, run / f"kept/step-{step}")
    losses = {}
    for _, entry in read_lines(run / "log.jsonl"):
        if "eval_loss" in entry:
            losses[entry["step"]] = entry["eval_loss"]
    assert min(losses, key=losses.__getitem__) == LOWEST
    return run


def answers_of(run: Path, step: int) -> Path:
    return run / f"answers/held-out.step-{step}"


def trained_of(answers: Path) -> Path:
    trained = read_answers(answers).trained
    assert trained
    return trained.folder


def chosen_of(run: Path) -> Choice:
    chosen = if_any(Choice, run / "chosen.json")
    assert chosen
    return chosen


def give_gold(folder: Path) -> None:
    """Have an adapter answered all right."""
    held_out = AnswersRecord.read(folder)
    gold = {str(one.id): one for one in Reader(TASK).read(Path(held_out.test))}
    rows = [row for _, row in read_lines(folder / "completions.jsonl")]
    with (folder / "completions.jsonl").open("w", encoding="utf-8") as out:
        for row in rows:
            reply = TASK.ask.target(gold[str(row["id"])])
            out.write(dump({**row, "texts": [reply]}) + "\n")


def half_ids(workshop: Path, half: str) -> set[str]:
    held_out = Reader(TASK, held_out=True).read(workshop / "demo/train.jsonl")
    return {str(one.id) for one in held_out if half_of(one) == half}


def test_each_held_out_case_is_in_one_half(workshop: Path) -> None:
    choosing, other = half_ids(workshop, "choosing"), half_ids(workshop, "other")
    assert choosing
    assert other
    assert not choosing & other
    everything = Reader(TASK, held_out=True).read(workshop / "demo/train.jsonl")
    assert choosing | other == {str(one.id) for one in everything}


def asked_ids(folder: Path) -> set[str]:
    return {str(row["id"]) for _, row in read_lines(folder / "completions.jsonl")}


def test_each_adapter_answers_the_half_that_chooses(
    run: Path, panjue: Panjue, running_engine: list[Path], workshop: Path
) -> None:
    done = panjue("choose", run)
    assert done.returncode == 0, done.stderr
    assert running_engine == [run / "merged"] * 3, "an engine for each merged adapter"
    chosen = chosen_of(run)
    assert chosen.adapter == "adapter", "the same engine answered: of equal ones the lowest loss"
    assert list(chosen.candidates) == ["adapter", "kept/step-4", "kept/step-3"]
    assert [of.step for of in chosen.candidates.values()] == [LOWEST, 4, 3]
    assert set(chosen.best[WHOLE].less_first.values()) == {(0, 0, 0)}
    for step in (LOWEST, 3, 4):
        record = AnswersRecord.read(answers_of(run, step))
        assert (record.half, record.held_out) == ("choosing", True)
        assert asked_ids(answers_of(run, step)) == half_ids(workshop, "choosing")
    assert trained_of(answers_of(run, 3)) == run / "kept/step-3"
    assert not (run / "merged").exists(), "the merges of the others are deleted"


@pytest.fixture
def chosen_run(run: Path, panjue: Panjue, running_engine: list[Path]) -> Path:
    """Return the training after `panjue choose`, in which the adapter of step 4 had all right."""
    panjue("choose", run)
    give_gold(answers_of(run, 4))
    running_engine.clear()
    assert panjue("choose", run).returncode == 0
    assert not running_engine, "nothing is asked again"
    return run


def said_of(run: Path) -> str:
    return f"adapter of step 4, chosen by final 1.0000 on {chosen_of(run).cases} held-out cases"


def test_the_best_adapter_is_chosen(chosen_run: Path, panjue: Panjue) -> None:
    lines = panjue("choose", chosen_run).stdout.splitlines()
    chosen = chosen_of(chosen_run)
    assert chosen.adapter == "kept/step-4"
    assert chosen.candidates["kept/step-4"].metrics["final"] == pytest.approx(1)
    mean, low, high = chosen.best[WHOLE].less_first["kept/step-4"]
    assert low is not None
    assert high is not None
    assert 0 < low <= mean <= high
    assert said_of(chosen_run) in lines
    assert lines[-1] == f"next: panjue generate {chosen_run} TEST"
    assert open_trained(chosen_run).folder == chosen_run / "kept/step-4"


def test_the_chosen_adapter_answers_and_the_other_half_says_who(
    chosen_run: Path, panjue: Panjue, running_engine: list[Path], workshop: Path
) -> None:
    test = workshop / "demo/test.jsonl"
    done = panjue("generate", chosen_run, test)
    assert done.stdout.startswith(f"{said_of(chosen_run)}\n"), done.stderr
    assert running_engine == [chosen_run / "merged"]
    merged = RunRecord.read(chosen_run / "merged")
    assert merged.adapter_sha256 == chosen_of(chosen_run).adapter_sha256
    held_out = chosen_run / "answers/held-out"
    record = AnswersRecord.read(held_out)
    assert (record.half, record.trained) == ("other", str(chosen_run / "kept/step-4"))
    assert asked_ids(held_out) == half_ids(workshop, "other")
    assert panjue("score", test, chosen_run / "answers/test").returncode == 0
    done = panjue("merge", chosen_run)
    assert done.stdout == f"{said_of(chosen_run)}\nwritten: {chosen_run}/merged\n"


def test_a_bundle_has_the_chosen_adapter(
    chosen_run: Path, panjue: Panjue, workshop: Path, tmp_path: Path
) -> None:
    panjue("generate", chosen_run, workshop / "demo/test.jsonl")
    done = panjue("bundle", chosen_run / "answers/test", tmp_path / "out.zip")
    assert done.stdout.startswith(f"{said_of(chosen_run)}\n"), done.stderr
    with zipfile.ZipFile(tmp_path / "out.zip") as packed:
        packed.extractall(tmp_path / "out")
    packed_weights = sha256(tmp_path / "out/adapter" / ADAPTER_WEIGHTS)
    assert packed_weights == sha256(chosen_run / "kept/step-4" / ADAPTER_WEIGHTS)
    assert open_trained(tmp_path / "out").folder == tmp_path / "out/adapter"


def test_another_adapter_than_the_chosen_one_is_refused(
    chosen_run: Path, panjue: Panjue, workshop: Path, tmp_path: Path
) -> None:
    moved = chosen_run.rename(tmp_path / "moved")
    assert trained_of(answers_of(moved, 4)) == moved / "kept/step-4"
    (moved / "kept/step-4" / ADAPTER_WEIGHTS).write_bytes(b"another")
    for words in (("generate", moved, workshop / "demo/test.jsonl"), ("serve", moved)):
        done = panjue(*words)
        told = "is not the adapter that was chosen; `panjue choose "
        assert (done.returncode, told in done.stderr) == (2, True)
    shutil.rmtree(moved / "kept/step-4")
    done = panjue("serve", moved)
    told = f"panjue: {moved}/chosen.json: names {moved}/kept/step-4, which is missing; "
    assert (done.returncode, done.stderr.startswith(told)) == (2, True)


def test_a_choice_that_was_killed_goes_on_where_it_was(
    run: Path, panjue: Panjue, running_engine: list[Path]
) -> None:
    panjue("choose", run)
    before = chosen_of(run)
    (run / "chosen.json").unlink()
    rows = answers_of(run, 3) / "completions.jsonl"
    lines = rows.read_text("utf-8").splitlines(keepends=True)
    rows.write_text("".join(lines[:2]) + lines[2][:20], "utf-8")
    shutil.rmtree(answers_of(run, 4))
    running_engine.clear()
    done = panjue("choose", run)
    assert done.returncode == 0, done.stderr
    assert "continuing: 2 of" in done.stdout
    assert len(running_engine) == 2, "the first was answered completely"
    assert chosen_of(run) == before


def test_what_cannot_choose_is_one_line(run: Path, trained: Path, panjue: Panjue) -> None:
    def told(*words: object) -> str:
        done = panjue("choose", *words)
        assert done.returncode == 2, done.stdout
        return done.stderr

    way_out = "so there is none to choose; train into another folder with keep=3"
    assert told(trained) == f"panjue: {trained}: kept one adapter, {way_out}\n"
    for word in ("answer=classifier", "endpoint=x#y", "ray=auto"):
        assert "`panjue choose` asks each adapter itself; leave it out" in told(run, word)
    assert "adapter=none: asks the base alone" in told(run, "adapter=none")
    merged = merge(read_trained(run / "adapter"))
    for place in ("adapter", "kept/step-3", "kept/step-4"):
        path = run / place / "manifest.json"
        write_json(path, {**read_json(path), "train": "gone.jsonl"})
    assert "nothing can choose: gone.jsonl is missing, or was changed" in told(run)
    assert merged.exists()
    shutil.rmtree(run / "adapter")
    assert "panjue sft" in told(run)
