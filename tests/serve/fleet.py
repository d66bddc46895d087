"""A fleet of replicas whose engine answers at once: what the driver makes of those that die.

No test of pytest: Ray leaves warnings behind, which are errors there. Prints a JSON object, name of
a scenario -> what came of it.
"""

import faulthandler
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray

from panjue.prompts.example import Example, call_key
from panjue.prompts.plumbing.errors import UserError
from panjue.serve.fleet import RESTARTS, Fleet, cluster
from panjue.serve.work import Row, Step, Work, batches

EXAMPLES = 60
REPLICAS = 2


class Fake:
    """A replica whose engine answers at once.

    `folder` has a file for each process of a replica; `deaths` of them die, each after five
    examples; an example takes `calls` calls.
    """

    def __init__(self, folder: str, deaths: int, calls: int) -> None:
        self._folder, self._deaths, self._calls, self._left = Path(folder), deaths, calls, 5

    def start(self) -> None:
        if self._calls == 0:
            raise UserError("engine: is broken")
        (self._folder / str(os.getpid())).touch()

    def answer(self, examples: list[Example], old_rows: dict[str, Row]) -> Iterator[Step]:
        for solved, example in enumerate(examples):
            row = {"id": example.id, "completion_tokens": 2}
            made = [{**row, "call": call} for call in range(self._calls)]
            new = [row for row in made if call_key(row) not in old_rows]
            new = new if self._calls > 1 else [row]
            if self._left == 0 and len(list(self._folder.iterdir())) <= self._deaths:
                if len(new) > 1:
                    yield Step(new[:1], solved, 1, 2, len(new) - 1)
                os._exit(1)
            self._left = max(0, self._left - 1)
            yield Step(new, solved + 1)


def outcome(deaths: int, calls: int, check: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Run one scenario."""
    keys, last, solved, error = [], Step([]), [0], ""
    work = Work((Example(i, f"案情{i}") for i in range(EXAMPLES)), EXAMPLES, None)
    with tempfile.TemporaryDirectory() as folder:
        actor = ray.remote(Fake).options(max_restarts=RESTARTS, num_cpus=0)
        fakes = [actor.remote(folder, deaths, calls) for _ in range(REPLICAS)]
        fleet = Fleet(fakes, batches(work, REPLICAS, in_flight=4), check)
        try:
            fleet.wait_for_first()
            for last in fleet.steps():
                keys += [call_key(row) for row in last.rows]
                solved.append(last.solved)
        except UserError as problem:
            error = str(problem)
        for fake in fakes:
            ray.kill(fake)  # type: ignore[arg-type]
    grows = solved == sorted(solved)
    return {"keys": keys, "last": last[1:], "grows": grows, "again": fleet.again, "error": error}


def stop() -> None:
    """End the run."""
    raise UserError("stopped")


def stranger() -> str:
    """Return the error of a process that reaches the cluster's port and has no token."""
    address = ray.get_runtime_context().gcs_address
    script = (
        f"from ray._raylet import GcsClient; GcsClient(address={address!r}).get_all_node_info()"
    )
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    words = [sys.executable, "-c", script]
    return subprocess.run(words, env=env, capture_output=True, text=True, check=False).stderr


def no_cluster() -> dict[str, Any]:
    """Connect to nothing."""
    try:
        with cluster("auto"):
            return {"error": ""}
    except UserError as problem:
        return {"error": str(problem)}


def main() -> None:
    """Run all scenarios; if that takes too long, say where it is."""
    faulthandler.dump_traceback_later(540, exit=True)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]  # workers cannot import it
    outcomes: dict[str, dict[str, Any]] = {}
    with cluster("local"):
        outcomes["stranger"] = {"error": stranger()}
        for deaths, calls in ((0, 1), (5, 1), (5, 3)):
            outcomes[f"{deaths} deaths, {calls}"] = outcome(deaths, calls)
        outcomes["always"] = outcome(10**6, 1)
        outcomes["broken"] = outcome(0, 0)
        outcomes["stopped"] = outcome(0, 1, stop)
    outcomes["no cluster"] = no_cluster()
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
