"""An adopted adapter: scored first, then answered with, chosen among and packed as one of ours."""

import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from panjue.finetune.trained import open_trained
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import sha256
from panjue.prompts.plumbing.records import AnswersRecord, Choice, if_any
from panjue.prompts.plumbing.run import ADAPTER_WEIGHTS
from panjue.prompts.task import task_folders
from tests.finetune.conftest import lend_rows

Panjue = Callable[..., CompletedProcess[str]]


def adopt(
    panjue: Panjue, run: Path, workshop: Path, folders: Sequence[Path]
) -> CompletedProcess[str]:
    lend_rows(workshop, run)
    return panjue("adopt", *folders, f"run={run}", f"train={workshop / 'demo/train.jsonl'}")


@pytest.fixture
def run(
    foreign: Path, workshop: Path, tmp_path: Path, panjue: Panjue, running_engine: list[Path]
) -> Path:
    """Return a run that has adopted the adapter of plain peft; the tiny trained model answers."""
    done = adopt(panjue, tmp_path / "run", workshop, [foreign])
    assert done.returncode == 0, done.stderr
    assert running_engine == [tmp_path / "run/merged"]
    running_engine.clear()
    return tmp_path / "run"


def test_its_score_on_held_out_cases_is_the_first_that_is_said(
    run: Path, foreign: Path, workshop: Path, panjue: Panjue, running_engine: list[Path]
) -> None:
    done = adopt(panjue, run, workshop, [foreign])  # again: all is there
    lines = done.stdout.splitlines()
    assert lines[0] == f"{run}/adapter: already adopted, with these cases"
    assert not running_engine
    [choice] = open_trained(run).choices
    assert lines[1] == f"scores on {choice.cases} held-out cases, asked with panjue's prompt"
    headline = choice.candidates["model"].metrics["final"]
    [final] = [line for line in lines if "final" in line]
    assert f"{headline:.3f}".removeprefix("0") in final
    heads = next(line for line in lines if "metric" in line)
    assert "model" in heads
    assert "text classifier" in heads
    assert [line for line in lines if line.startswith("  charges: charge_f1 model ")]
    assert lines[-1] == f"next: panjue generate {run} TEST"
    assert "## Held-out cases" in (run / "adapter/README.md").read_text("utf-8")


def test_it_answers_is_scored_reported_and_packed_as_ours(
    run: Path, workshop: Path, tmp_path: Path, panjue: Panjue, running_engine: list[Path]
) -> None:
    test = workshop / "demo/test.jsonl"
    held_out = (run / "answers/held-out/completions.jsonl").read_bytes()
    done = panjue("generate", run, test)
    assert done.returncode == 0, done.stderr
    assert "held-out cases say who answers" not in done.stdout, "adopt has asked them"
    assert (run / "answers/held-out/completions.jsonl").read_bytes() == held_out
    assert AnswersRecord.read(run / "answers/test").is_of_adapter
    for words in (
        ("generate", run, test, "answer=model"),
        ("decode", run),
        ("score", test, run),
        ("check", run, "--cases", test),
        ("report", run),
        ("runs", run),
        ("merge", run),
        ("bundle", run, tmp_path / "out.zip"),
    ):
        done = panjue(*words)
        assert done.returncode == 0, (words, done.stderr)
    page = (run / "answers/test/report.html").read_text("utf-8")
    assert "another program; on which prompts and cases is not known" in page
    assert "由其他程序训练" in page
    assert "batch" not in page.partition('class="settings"')[2].partition("</table>")[0]
    with zipfile.ZipFile(tmp_path / "out.zip") as packed:
        packed.extractall(tmp_path / "out")
    unpacked = open_trained(tmp_path / "out")
    assert sha256(unpacked.folder / ADAPTER_WEIGHTS) == sha256(run / "adapter" / ADAPTER_WEIGHTS)
    assert unpacked.record.adopted == ("foreign",), "no paths"


def test_several_checkpoints_are_chosen_among(
    foreign: Path, workshop: Path, tmp_path: Path, panjue: Panjue, running_engine: list[Path]
) -> None:
    run = tmp_path / "run"
    folders = [foreign / "checkpoint-2", foreign / "checkpoint-4"]
    done = adopt(panjue, run, workshop, folders)
    assert done.returncode == 0, done.stderr
    assert running_engine == [run / "merged"] * 2
    chosen = if_any(Choice, run / "chosen.json")
    assert chosen
    assert [*chosen.candidates] == ["adapter", "kept/step-2"]
    lines = done.stdout.splitlines()
    assert f"adapter of step 4, chosen by final {final_of(chosen):.4f} on" in done.stdout
    assert "less step 4" not in done.stdout, "it is not compared with itself"
    assert "held-out loss" not in done.stdout, "none is known"
    assert lines[-1] == f"next: panjue generate {run} TEST"
    assert panjue("choose", run).returncode == 0
    done = panjue("generate", run, workshop / "demo/test.jsonl")
    assert done.stdout.startswith("adapter of step 4, chosen by final "), done.stderr
    assert AnswersRecord.read(run / "answers/held-out").half == "other"


def final_of(chosen: Choice) -> float:
    return chosen.candidates[chosen.adapter].metrics["final"]


def test_an_engine_that_cannot_start_does_not_lose_the_run(
    foreign: Path, workshop: Path, tmp_path: Path, panjue: Panjue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise UserError("engine: no memory")

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("panjue.serve.engine.engine", broken)
        done = adopt(panjue, run, workshop, [foreign])
    kept = f"{run} is adopted, and the same command asks again"
    assert (done.returncode, done.stderr) == (2, f"panjue: engine: no memory; {kept}\n")
    assert f"written: {run}/adapter\n" in done.stdout
    assert open_trained(run).record.adopted == (str(foreign),)


def test_a_task_without_a_classifier_has_the_score_of_the_model(
    foreign: Path, tmp_path: Path, panjue: Panjue, running_engine: list[Path]
) -> None:
    [sample] = task_folders()["reading"].glob("sample.*")
    run = tmp_path / "run"
    words = (f"run={run}", f"train={sample}", "task=reading")
    done = panjue("adopt", foreign, *words)
    assert done.returncode == 0, done.stderr
    record = open_trained(run).record
    assert (record.task, record.classifier_sha256) == ("reading", None)
    assert running_engine
    assert "held-out cases, asked with panjue's prompt" in done.stdout
    assert "text classifier" not in done.stdout
