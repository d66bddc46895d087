"""Fit the strength of the pair prior on held-out completions, by the task's headline metric."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from panjue.eval.answers import Run, open_run
from panjue.eval.decide import Decider
from panjue.eval.means import Columns, metric_values, summarize
from panjue.prompts.errors import UserError
from panjue.prompts.files import read_json, write_json
from panjue.prompts.model import DECISION
from panjue.prompts.task import Answer

STRENGTHS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)


def main(folder: Path) -> None:
    """Print the scores at every strength; write the best beside the run's adapter."""
    run = open_run(folder)
    check(run)
    greedy, by_strength = tune(run)
    best = max(by_strength, key=lambda strength: (by_strength[strength][headline(run)], -strength))
    table = Table("strength", *greedy)
    table.add_row("greedy", *(f"{value:.4f}" for value in greedy.values()))
    for strength, means in by_strength.items():
        style = "bold" if strength == best else None
        table.add_row(f"{strength:g}", *(f"{v:.4f}" for v in means.values()), style=style)
    console = Console(soft_wrap=True)
    console.print(table)
    write_json(run.trained / DECISION, {"strength": best, "fitted_on": str(folder)})
    console.print(f"written: {run.trained / DECISION}; `panjue decode` uses it", highlight=False)


def check(run: Run) -> None:
    """Refuse runs that nothing may be fitted on.

    Raises:
        UserError: The answers are not decided, there are no samples, or the cases are not those
            that training held out.
    """
    made = read_json(run.folder / "manifest.json")["generate"]
    if run.task.decides is None or not made["samples"]:
        raise UserError(f"{run.folder}: has no samples to decide from; generate with samples=8")
    dev = read_json(run.trained / "manifest.json").get("dev_sha256")
    if not run.held_out and (dev is None or made["test_sha256"] != dev):
        raise UserError(
            f"{run.folder}: its cases are not those that training held out; generate with "
            "held_out=true on the training file, or on the dev file if training had one"
        )


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
