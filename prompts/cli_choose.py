"""`panjue choose`: of the adapters that a training kept, the best by the task's own metric."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from panjue.eval.choice import FEW
from panjue.eval.compare import paired_differences
from panjue.eval.metric_values import (
    MetricValues,
    Summary,
    or_ones,
    scored,
    submission_rows,
    summarize,
    without_nan,
)
from panjue.prompts.cli_generate import held_out_file, refuse_others
from panjue.prompts.fingerprint import model_sha256
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import delete, exclusive_lock, write_json
from panjue.prompts.plumbing.run import (
    ANSWERS,
    CHOSEN,
    HELD_OUT,
    MANIFEST,
    RESULTS,
    Candidate,
    Chosen,
    Run,
    RunRecord,
    held_out_losses,
    kept_adapters,
)
from panjue.prompts.plumbing.version import panjue_version
from panjue.serve.decoding import decode_answers
from panjue.serve.job import Job, make_job
from panjue.serve.merge import place_of, served_model
from panjue.serve.session import Session, read_cases, session
from panjue.serve.settings import GenerateConfig


@dataclass(frozen=True)
class Adapter:
    """An adapter that may be chosen."""

    folder: Path
    step: int
    loss: float  # on all held-out cases


def choose_adapter(run: Run, config: GenerateConfig) -> None:
    """Ask half of the held-out cases with each adapter; write RUN/chosen.json.

    The answers are kept, so that a run that was killed resumes.
    """
    console = Console(soft_wrap=True, highlight=False, markup=False)
    adapters = adapters_of(run)
    jobs = [make_job(Run(adapter.folder), config) for adapter in adapters]
    found = held_out_file(jobs[0], "choosing")
    if isinstance(found, str):
        raise UserError(f"{run.folder}: nothing can choose: {found}")
    reader, file = found
    with exclusive_lock(run.folder):
        values = []
        with sessions_of(jobs, console) as sessions:
            for adapter, job, ask in zip(adapters, jobs, sessions, strict=True):
                place = run.folder / ANSWERS / f"{HELD_OUT}-step-{adapter.step}"
                cases = read_cases(file, reader, place)
                refuse_others(job, cases)
                console.print(f"step {adapter.step}: {cases.count} held-out cases")
                with exclusive_lock(place):
                    ask.ask(cases)
                decode_answers(place, "model")
                rows = submission_rows(job.task, place)
                values.append(scored(reader, file, rows))
        chosen = best_of(run, adapters, values)
        delete_other_merge(run, run.folder / chosen.adapter)
        write_json(run.folder / CHOSEN, chosen.model_dump(mode="json"))
    show_candidates(chosen, console)
    console.print(f"written: {run.folder / CHOSEN}")
    console.print(f"next: panjue generate {run.folder} TEST")


def adapters_of(run: Run) -> list[Adapter]:
    """Return the adapters of a training, first that of the lowest loss; UserError: only one."""
    result = run.folder / RESULTS[0]
    if not (result / MANIFEST).is_file():
        raise UserError(f"{run.folder}: has no adapter; `panjue sft` with keep=3 keeps several")
    losses = held_out_losses(run.folder)
    others = {step: place for step, place in kept_adapters(run.folder).items() if step in losses}
    if not others:
        way_out = "train into another folder with keep=3"
        raise UserError(f"{run.folder}: kept one adapter, so there is none to choose; {way_out}")
    lowest = min(losses, key=lambda step: (losses[step], step))
    places = {lowest: result, **others}
    return [Adapter(place, step, losses[step]) for step, place in places.items()]


@contextmanager
def sessions_of(jobs: Sequence[Job], console: Console) -> Iterator[Iterator[Session]]:
    """Give a session for each job, one after the other.

    Where adapters are asked unmerged it is the same one, with one engine for all.
    """
    if not are_unmerged(jobs):
        yield merged_sessions(jobs, console)
        return
    jobs = [replace(job, config=job.config.model_copy(update={"adapter": "lora"})) for job in jobs]
    with session(jobs[0], console) as opened:
        yield unmerged_sessions(opened, jobs)


def merged_sessions(jobs: Sequence[Job], console: Console) -> Iterator[Session]:
    for job in jobs:
        with session(job, console) as opened:
            yield opened


def unmerged_sessions(opened: Session, jobs: Sequence[Job]) -> Iterator[Session]:
    for job in jobs:
        opened.switch(job)
        yield opened


def are_unmerged(jobs: Sequence[Job]) -> bool:
    """Say whether the adapters are loaded unmerged: where that is said, and on a GPU if possible.

    On a CPU an unmerged adapter is slow.
    """
    from torch import cuda  # noqa: PLC0415

    if jobs[0].config.adapter == "lora":
        return True
    if not cuda.is_available():
        return False
    try:
        for job in jobs:
            served = served_model(job.run.trained, "lora", job.config.base)
            assert served.lora_rank, "an adapter has a rank"
    except UserError:  # vLLM cannot have such an adapter unmerged
        return False
    return True


def best_of(run: Run, adapters: Sequence[Adapter], values: Sequence[MetricValues]) -> Chosen:
    """Return the adapter with the highest headline metric; of equal ones, that of lower loss."""
    summaries = [summarize(one) for one in values]
    metric = values[0].task.score.headline

    def rank(number: int) -> tuple[float, float]:
        return -summaries[number].mean[metric], adapters[number].loss

    best = min(range(len(adapters)), key=rank)
    gain = paired_differences(values[0], values[best])[metric]
    candidates = {}
    for adapter, summary in zip(adapters, summaries, strict=True):
        name = adapter.folder.relative_to(run.folder).as_posix()
        candidates[name] = candidate_of(adapter, summary)
    return Chosen(
        adapter=list(candidates)[best],
        adapter_sha256=model_sha256(adapters[best].folder),
        panjue=panjue_version(),
        metric=metric,
        cases=len(values[0]),
        counted=int(np.count_nonzero(or_ones(values[0].weights))),
        candidates=candidates,
        gain=(gain.mean, gain.low, gain.high),
    )


def candidate_of(adapter: Adapter, summary: Summary) -> Candidate:
    return Candidate(
        step=adapter.step,
        loss=adapter.loss,
        metrics=summary.mean,
        interval=without_nan(summary.interval),
    )


def delete_other_merge(run: Run, chosen: Path) -> None:
    """Delete RUN/merged if it is the merge of another adapter than the chosen one."""
    merged = place_of(chosen, "merged")
    if not (merged / MANIFEST).is_file():
        return
    if RunRecord.read(merged).adapter_sha256 != model_sha256(chosen):
        delete(merged)


def show_candidates(chosen: Chosen, console: Console) -> None:
    """Print the adapters side by side, and which is chosen and why."""
    first, *_ = chosen.candidates.values()
    steps = [f"step {of.step}" for of in chosen.candidates.values()]
    table = Table(Column("metric", no_wrap=True), *steps)
    losses = [f"{of.loss:.4f}" for of in chosen.candidates.values()]
    table.add_row("held-out loss", *losses)
    for metric in first.metrics:
        cells = [shown(of, metric) for of in chosen.candidates.values()]
        table.add_row(metric, *cells, style="bold" if metric == chosen.metric else None)
    console.print(table)
    mean, low, high = chosen.gain
    console.print(str(chosen))
    console.print(
        f"  less step {first.step}, of the lowest loss: {mean:+.4f} "
        f"(95% interval {low:+.4f} to {high:+.4f}, on the cases that have chosen)"
    )
    if chosen.counted < FEW:
        console.print(f"  under {FEW} cases count: who is better there may be luck")


def shown(candidate: Candidate, metric: str) -> str:
    """Return a metric with its interval, in 16 characters: `.891 (.856-.922)`."""
    ends: Mapping[str, tuple[float | None, float | None]] = candidate.interval
    low, high = (f"{end:.3f}".removeprefix("0") if end is not None else "-" for end in ends[metric])
    return f"{candidate.metrics[metric]:.3f} ({low}-{high})".removeprefix("0")
