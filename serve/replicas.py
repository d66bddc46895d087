"""Replicas of the engine in a Ray cluster: what runs on its machines."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import version
from math import ceil, prod
from typing import Any

import ray

from panjue.prompts.example import Example
from panjue.prompts.model import prompt_sha256
from panjue.prompts.plumbing.debug import debug_log
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import difference
from panjue.serve.engine import VLLM_VERSION, EngineEnded, on_cpu
from panjue.serve.fleet import RESTARTS
from panjue.serve.job import Job, start
from panjue.serve.rows import Calls, rows
from panjue.serve.settings import GenerateConfig
from panjue.serve.trained import Served
from panjue.serve.work import Row, Step

STEP_S = 1.0
"""How often a replica hands over its rows; those of the last second are lost if it dies."""

GPUS = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "data_parallel_size",
)
"""The engine arguments whose product is the number of its GPUs."""

SAME_VERSIONS = ("panjue", "transformers", "llguidance", "torch")
"""Packages that must have one version in the whole cluster, as vLLM: replies depend on them."""


def versions(task: str) -> dict[str, str]:
    """Return the versions that replies depend on."""
    packages = {name: version(name) for name in SAME_VERSIONS}
    return {"prompt": prompt_sha256(task), "vllm": VLLM_VERSION, **packages}


def amounts(name: str) -> list[float]:
    """Return how much of a resource each living machine of the cluster has."""
    return [node["Resources"].get(name, 0) for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def resources(config: GenerateConfig) -> dict[str, float]:
    """Return what Ray sets aside for a replica: its GPUs, else its share of a machine's cores."""
    if on_cpu():
        machines = [count for count in amounts("CPU") if count] or [1]
        on_each = ceil(config.replicas / len(machines))
        return {"num_cpus": max(1, min(machines) // on_each)}
    return {"num_cpus": 1, "num_gpus": prod(config.engine.get(name, 1) for name in GPUS)}


def capacity(takes: dict[str, float]) -> str:
    """Say what a replica takes, of `resources`, and what the machines have now."""
    name = "CPU" if on_cpu() else "GPU"
    nodes = amounts(name)
    largest = f"the largest machine {max(nodes, default=0):.0f}"
    each = f"each takes {takes[f'num_{name.lower()}s']:.0f} {name}"
    return f"{each}, {largest}, the cluster has {sum(nodes):.0f}"


class Replica:
    """An engine and its asker in a process of their own: an actor, wherever Ray puts it."""

    def __init__(self, job: Job, wanted: dict[str, str]) -> None:
        """Take the job, and the versions of the driver."""
        self._job, self._wanted = job, wanted
        self._running = ExitStack()
        self._started: tuple[Any, Any] | None = None

    def start(self) -> None:
        """Start the engine if it is not running.

        Raises:
            UserError: This machine lacks the model or has other versions, or the engine cannot
                start.
        """
        if self._started:
            return
        config, host = self._job.config, socket.gethostname()
        if changed := difference(self._wanted, versions(config.task)):
            raise UserError(f"ray: {host} has other versions than the driver: {changed}")
        for folder in filter(None, self._job.served or ()):
            if not folder.is_dir():
                raise UserError(
                    f"ray: {host} has no {folder}; copy it there, or use a disk that all share"
                )
        if on_cpu():  # Ray has set OMP_NUM_THREADS; vLLM would bind each replica to all cores
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        self._running.enter_context(debug_log(config.run))
        try:
            self._started = self._running.enter_context(start(self._job, self._job.task))
        except EngineEnded:
            os._exit(1)  # Ray starts another process, on this machine or another

    def answer(self, examples: list[Example], old_rows: dict[str, Row]) -> Iterator[Step]:
        """Yield the new rows of a batch, about once a second, with counts for this batch.

        Raises:
            UserError: An old row is of another call.
        """
        assert self._started, "the driver sends no batch before `start` has returned"
        source, asker = self._started
        calls = Calls(asker, iter(examples), self._job.passes, old_rows.get)
        new: list[Row] = []
        due = time.monotonic() + STEP_S
        try:
            for row in rows(source, calls, self._job.config.in_flight):
                new.append(row)
                if time.monotonic() > due:
                    yield calls.step(new)
                    new, due = [], time.monotonic() + STEP_S
        except EngineEnded:
            os._exit(1)  # as above
        yield calls.step(new)


def check_build() -> None:
    """Refuse to answer with the CPUs of a cluster that has GPUs.

    Raises:
        UserError: vLLM here is built for the CPU, and the cluster has GPUs.
    """
    gpus = ray.cluster_resources().get("GPU", 0)  # type: ignore[no-untyped-call]
    if gpus and on_cpu():
        raise UserError(
            f"ray: the cluster has {gpus:.0f} GPUs, but vLLM is installed for the CPU; remove "
            ".venv and run KIND=gpu .ci/install python3 ray"
        )


def replicas(job: Job, takes: dict[str, float]) -> list[Any]:
    """Return the replicas of a run, as actors that Ray starts where a machine has what each takes.

    Args:
        job: The job of each.
        takes: What Ray sets aside for each; see `resources`.
    """
    actor = ray.remote(Replica).options(max_restarts=RESTARTS, **takes)
    count, words = job.config.replicas, (everywhere(job), versions(job.config.task))
    return [actor.remote(*words) for _ in range(count)]


def everywhere(job: Job) -> Job:
    """Return the job with whole paths: replicas have working folders of their own."""
    config = job.config.model_copy(update={"run": job.config.run.absolute()})
    served = job.served
    if served:
        served = Served(served.model.absolute(), served.adapter and served.adapter.absolute())
    training = replace(job.training, folder=job.training.folder and job.training.folder.absolute())
    return replace(job, config=config, training=training, served=served)
