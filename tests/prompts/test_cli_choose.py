"""The headline metric of whatever task chooses the adapter, and its numbers are kept and shown."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from panjue.eval.metric_values import MetricValues, scored, submission_rows
from panjue.finetune.trained import Trained
from panjue.prompts.cli_choose import Adapter, best_adapter, show_candidates
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.files import write_json
from panjue.prompts.plumbing.records import WHOLE, Choice, RunRecord, if_any
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task, task_folders


def values_of(name: str, folder: Path, *, gold: bool) -> MetricValues:
    """Return the scores of gold answers, or of the task's fallback, on its sample."""
    task = load_task(name)
    [sample] = task_folders()[name].glob("sample.*")
    examples = list(Reader(task).read(sample))
    labels = task.ask.labels(examples)
    with task.data.submission.writing(folder / task.data.submission.name) as write:
        for example in examples:
            fallback = task.ask.decode("", example, labels).answer
            write(task.data.write(example, (gold and example.answer) or fallback))
    return scored(Reader(task), sample, submission_rows(task, folder))


PLACES = ("adapter", "kept/step-1")


def adapters_in(run: Path, task: str) -> list[Adapter]:
    adapters = []
    for step, place in zip((2, 1), PLACES, strict=True):
        write_json(run / place / "manifest.json", {"step": step})
        record = RunRecord.model_construct(task=task)
        trained = Trained(run, run / place, record, f"{step}", Labels(), "")
        adapters.append(Adapter(trained, step, loss=0.25 / step))
    return adapters


@pytest.mark.parametrize("name", task_folders())
def test_the_metric_of_every_task_chooses(name: str, tmp_path: Path) -> None:
    values = [values_of(name, tmp_path / kind, gold=kind == "gold") for kind in ("worse", "gold")]
    run = tmp_path / "run"
    chosen = best_adapter(adapters_in(run, name), dict(zip(PLACES, values, strict=True)))
    headline = load_task(name).score.headline
    best = chosen.best[WHOLE]
    assert (chosen.adapter, best.metric) == ("kept/step-1", headline)
    assert chosen.cases == len(values[0])
    of_both = [of.metrics[headline] for of in chosen.candidates.values()]
    gain, _, _ = best.less_first["kept/step-1"]
    assert gain == pytest.approx(of_both[1] - of_both[0])
    assert gain > 0
    write_json(run / "chosen.json", chosen.model_dump(mode="json"))
    assert if_any(Choice, run / "chosen.json") == chosen
    told = StringIO()
    show_candidates(chosen, Console(file=told, width=80))
    for metric in load_task(name).score.names:
        assert metric in told.getvalue()
    assert f"adapter of step 1, chosen by {headline} " in told.getvalue()


def test_of_equal_ones_the_lowest_loss_counts(tmp_path: Path) -> None:
    values = [values_of("severity", tmp_path / kind, gold=True) for kind in ("a", "b")]
    run = tmp_path / "run"
    chosen = best_adapter(adapters_in(run, "severity"), dict(zip(PLACES, values, strict=True)))
    assert chosen.adapter == "adapter"
    assert chosen.best[WHOLE].less_first == {"kept/step-1": (0, 0, 0)}
