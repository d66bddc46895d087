"""`panjue choose`: choose the best of a training's kept adapters by the task's own metric.

Held-out cases have two halves: `choosing` chooses the adapter here, and `other` decides later who
answers each field, the model or the text classifier. In a `Choice` among adapters, the key `WHOLE`
is in place of a field, since the adapter answers whole cases.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from panjue.eval.choice import FEW, best_of
from panjue.eval.metric_values import MetricValues, scored, submission_rows
from panjue.finetune.trained import Trained, read_trained
from panjue.prompts.cli_generate import held_out_file, refuse_others
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import delete, exclusive_lock, write_json
from panjue.prompts.plumbing.intervals import interval_text, with_interval
from panjue.prompts.plumbing.records import (
    CHOSEN,
    MANIFEST,
    WHOLE,
    Candidate,
    Choice,
    RunRecord,
    TrainingSummary,
)
from panjue.prompts.plumbing.run import ANSWERS, HELD_OUT, held_out_losses, kept_adapters
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.serve.decoding import decode
from panjue.serve.job import Job, make_job
from panjue.serve.merge import lock_of, place_of, served_model
from panjue.serve.session import Cases, Session, read_cases, session
from panjue.serve.settings import GenerateConfig


@dataclass(frozen=True)
class Adapter:
    """An adapter that can be chosen."""

    trained: Trained
    step: int
    loss: float | None  # on all held-out cases; None if this step was not evaluated

    @property
    def name(self) -> str:
        """Return its folder, relative to the run folder: `adapter`, `kept/step-20`."""
        return self.trained.folder.relative_to(self.trained.run).as_posix()


def choose_adapter(run: Path, adapters: Sequence[Adapter], config: GenerateConfig) -> None:
    """Answer held-out cases with each adapter; write the best one to RUN/chosen.json.

    Only the half `choosing` is asked, since the adapter's score is too good on the cases that chose
    it. The answers are kept, so that a killed command resumes. The caller holds the run's lock.
    """
    console = Console(soft_wrap=True, highlight=False, markup=False)
    jobs = [make_job(run, adapter.trained, config) for adapter in adapters]
    found = held_out_file(jobs[0], adapters[0].trained, "choosing")
    if isinstance(found, str):
        raise UserError(f"{run}: nothing can choose: {found}")
    reader, file = found
    jobs[0].check_engine()
    values = {}
    # Unmerged adapters (`lora`) share one engine with the base. An adapter merged into its base is
    # a model of its own and needs its own engine.
    if are_unmerged(jobs):
        jobs = [
            replace(job, config=job.config.model_copy(update={"adapter": "lora"})) for job in jobs
        ]
        with session(jobs[0], console) as asking:
            for adapter, job in zip(adapters, jobs, strict=True):
                asking.switch(job)
                values[adapter.name] = step_values(adapter, asking, reader, file)
    else:
        for adapter, job in zip(adapters, jobs, strict=True):
            with session(job, console) as asking:
                values[adapter.name] = step_values(adapter, asking, reader, file)
    chosen = best_adapter(adapters, values)
    delete_other_merge(run, chosen)  # RUN/merged must not be an adapter that lost
    write_json(run / CHOSEN, chosen.model_dump(mode="json"))
    show_candidates(chosen, console)
    console.print(f"written: {run / CHOSEN}")
    console.print(f"next: panjue generate {run} TEST")


def adapters_of(run: Path) -> list[Adapter]:
    """Return the adapters of a training, the lowest loss first; UserError: there is only one.

    One is the result of the training, the others are in RUN/kept.
    """
    result = run / "adapter"
    if not (result / MANIFEST).is_file():
        raise UserError(f"{run}: has no adapter; `panjue sft` with keep=3 keeps several")
    losses = held_out_losses(run)
    summary = TrainingSummary.read(run)
    step = summary.kept_step if summary else None
    if step is None:  # version 0.4 and earlier did not record it
        step = min(losses, key=lambda step: (losses[step], step), default=0)
    adopted = RunRecord.read(result).adopted  # another trainer's adapters, whose loss is unknown
    others = {}
    for other_step, folder in kept_adapters(run).items():
        if other_step != step and (adopted or other_step in losses):
            others[other_step] = folder
    if not others:
        way_out = "train into another folder with keep=3"
        if adopted:
            way_out = "adopt several of its checkpoints: panjue adopt FOLDER FOLDER run=RUN"
        raise UserError(f"{run}: kept one adapter, so there is none to choose; {way_out}")
    adapters = []
    for number, folder in {step: result, **others}.items():
        adapters.append(Adapter(read_trained(folder, run), number, losses.get(number)))
    return sorted(adapters, key=lambda one: inf if one.loss is None else one.loss)


def step_values(adapter: Adapter, asking: Session, reader: Reader, file: Path) -> MetricValues:
    """Answer held-out cases with an adapter; return the metric values of its answers."""
    place = adapter.trained.run / ANSWERS / f"{HELD_OUT}.step-{adapter.step}"
    cases = read_cases(file, reader, place)
    asking.console.print(f"step {adapter.step}: {cases.count} held-out cases")
    return values_of(asking, cases)


def values_of(asking: Session, cases: Cases) -> MetricValues:
    """Ask the model cases with gold; return the metric values of its answers."""
    place = cases.folder
    refuse_others(asking.job, cases)
    with exclusive_lock(place):
        decode(asking.ask(cases), "model")
    rows = submission_rows(asking.job.task, place)
    return scored(cases.reader, cases.file, rows)


def are_unmerged(jobs: Sequence[Job]) -> bool:
    """Say whether to load the adapters unmerged: if the settings say so, and on a GPU if possible.

    On a CPU, an unmerged adapter is slow.
    """
    from torch import cuda  # noqa: PLC0415

    if jobs[0].config.adapter == "lora":
        return True
    if not cuda.is_available():
        return False
    try:
        for job in jobs:
            assert job.trained, "what has an adapter is a training"
            served = served_model(job.trained, "lora", job.config.base)
            assert served.lora_rank, "an adapter has a rank"
    except UserError:  # vLLM cannot load such an adapter unmerged
        return False
    return True


def best_adapter(adapters: Sequence[Adapter], values: Mapping[str, MetricValues]) -> Choice:
    """Return which adapter answers best by the headline metric of the task.

    `values` has the metric values of each adapter's answers, by the adapter's name.
    """
    task = load_task(adapters[0].trained.record.task)
    chosen = best_of(values, {WHOLE: task.score.headline})
    candidates = {}
    for adapter in adapters:
        known = {"sha256": adapter.trained.sha256, "step": adapter.step, "loss": adapter.loss}
        candidates[adapter.name] = chosen.candidates[adapter.name].model_copy(update=known)
    return chosen.model_copy(update={"candidates": candidates, "half": "choosing"})


def delete_other_merge(run: Path, chosen: Choice) -> None:
    """Delete RUN/merged if it was made from another adapter than the chosen one."""
    merged = place_of(run / chosen.adapter, "merged")
    with lock_of(merged):
        if not (merged / MANIFEST).is_file():
            return
        if RunRecord.read(merged).adapter_sha256 != chosen.adapter_sha256:
            delete(merged)


def show_candidates(chosen: Choice, console: Console) -> None:
    """Print the adapters side by side, which one is chosen, and how much better it is."""
    candidates = list(chosen.candidates.values())
    first = candidates[0]  # of `adapters_of`: the one with the lowest loss
    best = chosen.best[WHOLE]
    table = Table(Column("metric", no_wrap=True), *[f"step {one.step}" for one in candidates])
    if first.loss is not None:  # the losses of another trainer's adapters are all unknown
        losses = ["-" if one.loss is None else f"{one.loss:.4f}" for one in candidates]
        table.add_row("held-out loss", *losses)
    add_metrics(table, candidates, best.metric)
    console.print(table)
    console.print(str(chosen))
    # `less` is minus: the score of each adapter minus that of the first one, with an interval.
    difference_to_first = best.less_first.get(chosen.adapter)  # None: the first one is chosen
    if difference_to_first:
        mean, low, high = difference_to_first
        interval = interval_text((low, high), "+.4f", " to ")
        of_first = "" if first.loss is None else ", of the lowest loss"
        console.print(
            f"  less step {first.step}{of_first}: {mean:+.4f} "
            f"(95% interval {interval}, on the cases that have chosen)"
        )
    if chosen.counted < FEW:
        console.print(f"  under {FEW} cases count, so who is better may be luck")


def add_metrics(table: Table, candidates: Sequence[Candidate], headline: str) -> None:
    """Add a row for each metric to a table that has a column for each candidate."""
    for metric in candidates[0].metrics:
        cells = [shown(one, metric) for one in candidates]
        table.add_row(metric, *cells, style="bold" if metric == headline else None)


def shown(candidate: Candidate, metric: str) -> str:
    """Return a metric with its interval, in 16 characters: `.891 (.856-.922)`."""
    text = with_interval(candidate.metrics[metric], candidate.interval[metric], ".3f", "-")
    return text.replace("0.", ".")
