"""The headline metric of whatever task chooses the adapter, and its numbers are kept and shown."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from panjue.eval.metric_values import MetricValues, scored, submission_rows
from panjue.prompts.cli_choose import Adapter, best_of, show_candidates
from panjue.prompts.plumbing.files import write_json
from panjue.prompts.plumbing.run import Chosen, Run
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


def adapters_in(run: Path) -> list[Adapter]:
    adapters = []
    for step, place in ((2, "adapter"), (1, "kept/step-1")):
        write_json(run / place / "manifest.json", {"step": step})
        adapters.append(Adapter(run / place, step, loss=0.25 / step))
    return adapters


@pytest.mark.parametrize("name", task_folders())
def test_the_metric_of_every_task_chooses(name: str, tmp_path: Path) -> None:
    values = [values_of(name, tmp_path / kind, gold=kind == "gold") for kind in ("worse", "gold")]
    run = Run(tmp_path / "run")
    chosen = best_of(run, adapters_in(run.folder), values)
    headline = load_task(name).score.headline
    assert (chosen.adapter, chosen.metric) == ("kept/step-1", headline)
    assert chosen.cases == len(values[0])
    of_both = [of.metrics[headline] for of in chosen.candidates.values()]
    assert chosen.gain[0] == pytest.approx(of_both[1] - of_both[0])
    assert chosen.gain[0] > 0
    write_json(run.folder / "chosen.json", chosen.model_dump(mode="json"))
    assert Chosen.read(run.folder) == chosen
    told = StringIO()
    show_candidates(chosen, Console(file=told, width=80))
    for metric in load_task(name).score.names:
        assert metric in told.getvalue()
    assert f"adapter of step 1, chosen by {headline} " in told.getvalue()


def test_of_equal_ones_the_lowest_loss_counts(tmp_path: Path) -> None:
    values = [values_of("severity", tmp_path / kind, gold=True) for kind in ("a", "b")]
    run = Run(tmp_path / "run")
    chosen = best_of(run, adapters_in(run.folder), values)
    assert chosen.adapter == "adapter"
    assert chosen.gain == (0, 0, 0)
