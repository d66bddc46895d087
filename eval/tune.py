"""Fit the strength of the pair prior on held-out completions, by the task's headline metric."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from panjue.eval.answers import DECISION, Run, open_run
from panjue.eval.decide import Decider
from panjue.eval.means import Columns, metric_values, summarize
from panjue.prompts.errors import UserError
from panjue.prompts.files import read_json, write_json
from panjue.prompts.task import Answer

STRENGTHS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)


def main(folder: Path) -> None:
    """Print the scores at every strength; write the best into the run and beside its adapter."""
    run = open_run(folder)
    if run.task.decides is None:
        raise UserError(f"{folder}: answers of this task are not decided, nothing to tune")
    greedy, by_strength = tune(run)
    best = max(by_strength, key=lambda strength: (by_strength[strength][headline(run)], -strength))
    table = Table("strength", *greedy)
    table.add_row("greedy", *(f"{value:.4f}" for value in greedy.values()))
    for strength, means in by_strength.items():
        style = "bold" if strength == best else None
        table.add_row(f"{strength:g}", *(f"{v:.4f}" for v in means.values()), style=style)
    console = Console(soft_wrap=True)
    console.print(table)
    trained = Path(read_json(folder / "manifest.json")["generate"]["trained"])
    for place in (folder, trained):
        write_json(place / DECISION, {"strength": best, "fitted_on": str(folder)})
        console.print(f"written: {place / DECISION}", highlight=False)


def headline(run: Run) -> str:
    """Return the metric that the fit goes by."""
    return run.task.metrics[-1]


def tune(run: Run) -> tuple[dict[str, float], dict[float, dict[str, float]]]:
    """Return the metrics of the first replies, and of the answers decided at each strength.

    Raises:
        UserError: An example has no gold answer.
    """
    task = run.task
    deciders = {strength: Decider(task, run.labels, strength) for strength in STRENGTHS}
    scored = {how: Columns(task.metrics) for how in ("greedy", *map(str, STRENGTHS))}
    for example, row in run.completions():
        if example.answer is None:
            raise UserError(f"{run.test}: id {example.id} has no gold answer to tune on")
        first = task.decode(row["texts"][0] if "texts" in row else "", example, run.labels).answer
        answers: dict[str, Answer] = {"greedy": first}
        for strength, decider in deciders.items():
            decides = "texts" in row
            answers[str(strength)] = decider.decide(example, row).answer if decides else first
        for how, answer in answers.items():
            place = f"{run.folder}: id {example.id}"
            values = metric_values(task, example.answer, task.submission(example, answer), place)
            scored[how].add(example, task.weight(example), values)
    means = {how: summarize(columns, resamples=0).mean for how, columns in scored.items()}
    return means["greedy"], {strength: means[str(strength)] for strength in STRENGTHS}
