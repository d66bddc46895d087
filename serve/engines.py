"""Where cases are answered: an engine in this process, an endpoint, or replicas in a Ray cluster.

Each starts with the first cases that are asked, and stays until its block ends.
"""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.console import Console

from panjue.prompts.example import Example
from panjue.serve.ask import Answerer, answer_all
from panjue.serve.endpoint import Endpoint
from panjue.serve.engine import Engine, engine
from panjue.serve.job import Job
from panjue.serve.output import Rest, StopSignals, output, starting


class Answering(Protocol):
    """What answers cases; it is started when the first ones come."""

    def answer(self, folder: Path, rest: Rest) -> None:
        """Write the rows of the examples to `folder`."""


@contextmanager
def answering(job: Job, console: Console) -> Iterator[Answering]:
    """Yield what answers the cases of a job; it stops at the end of the block."""
    with StopSignals() as signals, ExitStack() as stack:
        if job.config.ray:
            from panjue.serve.ray import Cluster

            yield Cluster(job, signals, stack, console)
        else:
            yield Here(job, signals, stack, console)


@dataclass
class Here:
    """One engine in this process, or an endpoint; it ends with `stack`."""

    job: Job
    signals: StopSignals
    stack: ExitStack
    console: Console
    source: Engine | Endpoint | None = None
    answerer: Answerer | None = None

    def answer(self, folder: Path, rest: Rest) -> None:
        self.signals.folder = folder
        answerer = self.answerer or self._start()
        with output(folder, rest.done, rest.total, self.console) as out:

            async def answer(example: Example) -> None:
                await answerer.answer(example, out.write, rest.find_row)
                out.solved()

            assert self.source, "started above"
            assert self.source.runner
            work = answer_all(rest.examples, answer, answerer.slots)
            self.source.runner.run(self.signals.until_stopped(work))

    def _start(self) -> Answerer:
        job = self.job.with_model()
        config = job.config
        if config.endpoint:
            asker = job.asker()
            self.source = self.stack.enter_context(closing(Endpoint(config.endpoint)))
        else:
            assert job.served, "without an endpoint, `make_job` has found a training"
            with starting(self.console, "the engine"):
                asker = job.asker()
                running = engine(job.served, config.engine, job.budget, config.seed)
                self.source = self.stack.enter_context(running)
        slots = asyncio.Semaphore(config.slots)
        self.answerer = Answerer(self.source, asker, slots, job.passes)
        return self.answerer
