"""Generation on a Ray cluster: replicas of the engine, and the driver that gives them examples.

It uses Ray's actors. Ray Data lost or doubled streamed rows when a worker was killed (ray#35768).
Here every row comes to one process, which knows the missing rows.
"""

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from math import ceil, prod
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from rich.console import Console

from panjue.prompts.example import Example, call_key
from panjue.prompts.fingerprint import trained_files
from panjue.prompts.gpu import check_gpu
from panjue.prompts.model import is_tiny, prompt_sha256
from panjue.prompts.plumbing.debug import debug_log
from panjue.prompts.plumbing.errors import UserError, first_line
from panjue.prompts.plumbing.files import difference
from panjue.prompts.plumbing.version import panjue_version
from panjue.serve.ask import Answerer, CompletionRow, Write
from panjue.serve.engine import VLLM_VERSION, EngineEnded, on_cpu, running_engine
from panjue.serve.job import Job
from panjue.serve.merge import Served
from panjue.serve.output import StopSignals, starting

HOST = socket.gethostname()
RESTARTS = 3  # how often Ray restarts a replica's process, on any machine

ONE_MACHINE = ("VLLM_HOST_IP", "VLLM_PORT", "VLLM_API_KEY")  # variables for one machine only
PARALLEL = ("tensor", "pipeline", "prefill_context", "data")
"""An engine needs as many GPUs as the product of these settings, each with `_parallel_size`."""

SAME_VERSIONS = ("transformers", "llguidance", "torch")
"""Packages that, like panjue and vLLM, need the same version in the whole cluster, because replies
depend on them."""


@contextmanager
def running_fleet(job: Job, signals: StopSignals, console: Console) -> Iterator["Fleet"]:
    """Start replicas of the engine in a Ray cluster; they end with the block."""
    with cluster(), asyncio.Runner() as runner:
        fleet = runner.run(signals.until_stopped(start_fleet(job, console)))
        fleet.runner = runner
        yield fleet
        console.print(fleet.status())
        if fleet.error:
            console.print(f"a replica has ended: {fleet.error}")


async def start_fleet(job: Job, console: Console) -> "Fleet":
    """Start a fleet, and return it when its first replica is ready."""
    job = absolute(job.with_model())  # merge only when there is a cluster
    needs = resources(job)
    count = job.config.replicas
    slots = job.config.slots() * count
    # One replica may get all examples before the others have started; plus one call for its start.
    limits = {"max_restarts": RESTARTS, "max_concurrency": slots + 1}
    actor = ray.remote(Replica).options(**limits, **needs)
    wanted = versions(job.task_name)
    files = fingerprints(job)
    fleet = Fleet([actor.remote(job, wanted, files) for _ in range(count)], slots)
    each = " and ".join(f"{n:.0f} {kind.removeprefix('num_')}" for kind, n in needs.items())
    with starting(console, f"the first of {count} replicas, each takes {each}"):
        await fleet.wait_for_first()
    return fleet


def absolute(job: Job) -> Job:
    """Return the job with absolute paths, because replicas have other working folders."""
    assert job.trained, "no endpoint is asked by replicas"
    assert job.served, "the model to load is chosen"
    model, adapter = job.served
    served = Served(model.absolute(), adapter and adapter.absolute())
    trained = replace(
        job.trained, run=job.trained.run.absolute(), folder=job.trained.folder.absolute()
    )
    return replace(job, run=job.run.absolute(), trained=trained, served=served)


@contextmanager
def cluster() -> Iterator[None]:
    """Connect to this machine's Ray cluster; all replicas have ended at the end of the block."""
    names = [name for name in os.environ if name.startswith("VLLM_") and name not in ONE_MACHINE]
    variables = {"env_vars": {name: os.environ[name] for name in names}}
    # Ray tries 20 times for 30 seconds to reach a cluster that has died and left its address here.
    # Set this variable if yours takes longer to answer.
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "1")
    try:
        ray.init("auto", logging_level=logging.ERROR, runtime_env=variables)
    except (ConnectionError, ValueError, RuntimeError, RayError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"ray: {reason}; see serve/README.md on how to start a cluster") from None
    try:
        yield
    finally:
        ray.shutdown()


def resources(job: Job) -> dict[str, float]:
    """Return what Ray reserves for a replica: its GPUs, or its share of a machine's cores.

    Replicas are spread evenly. The machine with the fewest cores decides the share.
    """
    if not on_cpu():
        engine = job.config.engine
        sizes = [engine.get(f"{name}_parallel_size", 1) for name in PARALLEL]
        return {"num_cpus": 1, "num_gpus": prod(sizes)}
    assert job.served, "the model to load is chosen"
    if is_tiny(job.served.model):
        return {"num_cpus": 1}  # Ray gives it as many threads
    cores = []  # cores of each machine
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        if node["Alive"] and node["Resources"].get("CPU"):
            cores.append(node["Resources"]["CPU"])
    replicas_on_each = ceil(job.config.replicas / max(1, len(cores)))
    cores_of_replica = min(cores, default=1) // replicas_on_each
    return {"num_cpus": max(1, cores_of_replica)}


def versions(task: str) -> dict[str, str]:
    """Return what must be equal on all machines: name -> version, or hash of the prompt.

    For panjue the commit counts, too, since unreleased changes have the version of a release.
    """
    packages = {name: version(name) for name in SAME_VERSIONS}
    own = {"panjue": panjue_version(), "prompt": prompt_sha256(task)}
    return {**own, "vllm": VLLM_VERSION, **packages}


def fingerprints(job: Job) -> dict[str, str]:
    """Return file -> hash for the model to load, the labels and the text classifier."""
    assert job.served, "the model to load is chosen"
    assert job.trained, "no endpoint is asked by replicas"
    files = {}
    # The training's folder has labels and classifier; it may also be one of the others.
    folders = {folder for folder in (*job.served, job.trained.folder) if folder}
    for folder in folders:
        for name, digest in trained_files(folder).items():
            files[f"{folder}/{name}"] = digest
    return files


class Replica:
    """An actor of Ray on any machine: a process with an engine and its QuestionMaker."""

    def __init__(self, job: Job, wanted: dict[str, str], files: dict[str, str]) -> None:
        """Keep what `start` needs: `wanted` and `files` are the driver's versions and hashes."""
        self._job = job
        self._wanted = wanted
        self._files = files
        self._running = AsyncExitStack()
        self._answerer: Answerer | None = None

    async def start(self) -> None:
        """Start the engine unless it runs. The driver calls this again after any error of Ray."""
        if self._answerer:
            return
        job = self._job
        config = job.config
        assert job.served
        if changed := difference(self._wanted, versions(job.task_name)):
            raise UserError(f"ray: {HOST} has other versions than the driver: {changed}")
        needed = (*job.served, job.run)
        if missing := [folder for folder in needed if folder and not folder.is_dir()]:
            raise UserError(f"ray: {HOST} has no {missing[0]}; copy it there, or share a disk")
        if changed := difference(self._files, fingerprints(job)):
            raise UserError(
                f"ray: {HOST} has other files than the driver: {changed}; copy them there, or "
                "share a disk"
            )
        check_gpu(answering=True)
        if on_cpu():  # Ray has set OMP_NUM_THREADS; vLLM would bind every replica to all cores
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        self._running.enter_context(debug_log(job.run))
        starting = running_engine(job.served, config.engine, job.budget, config.seed)
        try:
            engine = await self._running.enter_async_context(starting)
        except EngineEnded:
            os._exit(1)  # Ray starts another process, on this machine or another
        slots = asyncio.Semaphore(config.slots())
        self._answerer = Answerer(engine, job.question_maker(), slots, job.passes)

    async def answer(
        self, example: Example, old_rows: dict[str, CompletionRow]
    ) -> AsyncIterator[CompletionRow]:
        """Yield each new row of an example as soon as it exists."""
        assert self._answerer, "the driver sends no example before `start` has returned"
        rows: asyncio.Queue[CompletionRow | None] = asyncio.Queue()
        work = self._answerer.answer(example, rows.put_nowait, old_rows)
        answering = asyncio.ensure_future(work)
        answering.add_done_callback(lambda _: rows.put_nowait(None))  # no more rows come
        while (row := await rows.get()) is not None:
            yield row
        try:
            await answering
        except EngineEnded:
            os._exit(1)  # Ray starts another process, as in `start`


@dataclass(eq=False)
class Running:
    """A replica whose engine is running."""

    actor: Any
    examples: int = 0  # examples that it answers now


class Fleet:
    """The replicas, and how many examples each of them is answering."""

    runner: asyncio.Runner  # of the driver's event loop

    def __init__(self, actors: list[Any], slots: int) -> None:
        """Start the engines of all replicas. Call this in the event loop."""
        self.slots = asyncio.Semaphore(slots)  # one for each example under way
        self.repeats = 0  # examples given to another replica, because theirs had ended
        self.error = ""  # error of the last replica that has ended or could not start
        self._count = len(actors)
        self._changed = asyncio.Event()
        self._running: list[Running] = []
        self._starting: set[asyncio.Task[None]] = set()
        self._start_error: Exception | None = None  # ends the run if no replica has started
        self._has_started = False
        for actor in actors:
            self._start(actor)

    def status(self) -> str:
        """Return the text that progress shows: how many replicas run."""
        again = f", {self.repeats} cases given out again" if self.repeats else ""
        return f"{len(self._running)} of {self._count} replicas{again}"

    async def wait_for_first(self) -> Running:
        """Return the running replica with the fewest examples; wait for one if none runs.

        UserError: no replica runs or can start.
        """
        while not self._running:
            if not self._starting:
                if self._start_error and not self._has_started:
                    raise self._start_error
                ended = f"ray: all replicas have ended for good: {self.error}; see debug.log"
                kept = "finished rows are kept, run the same command to resume"
                raise UserError(f"{ended} in the run folder, or Ray's logs; {kept}")
            self._changed.clear()
            await self._changed.wait()
        return min(self._running, key=lambda replica: replica.examples)

    async def answer(
        self, example: Example, write: Write, old_rows: dict[str, CompletionRow]
    ) -> None:
        """Let a replica answer an example, another one if it ends; add new rows to `old_rows`."""
        async with self.slots:
            while not await self._try_to_answer(example, write, old_rows):
                self.repeats += 1

    async def _try_to_answer(
        self, example: Example, write: Write, rows: dict[str, CompletionRow]
    ) -> bool:
        """Let a replica answer an example; return False if the replica ended before it was done.

        Each row that came is written and kept in `rows`, which the next replica gets.
        """
        replica = await self.wait_for_first()
        replica.examples += 1
        try:
            answer = replica.actor.answer.options(num_returns="streaming")
            async for reference in answer.remote(example, rows):
                row = await reference
                rows[call_key(row)] = row
                write(row)
        except RayTaskError as error:
            raise (error.cause if isinstance(error.cause, UserError) else error) from None
        except RayError as error:  # the replica's process, its machine, or rows there
            if replica in self._running:  # this example is the first to notice
                self.error = first_line(error).rstrip(".")
                self._running.remove(replica)
                self._start(replica.actor)  # Ray restarts its process, which has no engine yet
            return False
        finally:
            replica.examples -= 1
        return True

    def _start(self, actor: Any) -> None:
        """Let a replica start its engine in the background."""
        starting = asyncio.create_task(self._wait_for_start(actor))
        self._starting.add(starting)
        starting.add_done_callback(self._starting.discard)
        starting.add_done_callback(lambda _: self._changed.set())

    async def _wait_for_start(self, actor: Any) -> None:
        """Add a replica to those that run when its engine has started; otherwise note the error."""
        try:
            # Ray tries again, also to find a machine, and gives up after `RESTARTS`.
            await actor.start.options(max_task_retries=-1).remote()
        except RayTaskError as error:
            self._start_error = error.cause if isinstance(error.cause, UserError) else error
            self.error = first_line(self._start_error).rstrip(".")  # e.g. its GPU has failed
            ray.kill(actor)  # another one may wait for the resources that it holds
        except RayError as error:  # Ray cannot restart it any more
            self.error = first_line(error).rstrip(".")
        else:
            self._has_started = True
            self._running.append(Running(actor))
