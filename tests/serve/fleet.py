"""A fleet of replicas whose engine answers at once: what the driver makes of those that die.

No test of pytest: Ray leaves warnings behind, which are errors there. Prints a JSON object, name of
a scenario -> what came of it.
"""

import asyncio
import faulthandler
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import ray

from panjue.prompts.example import Example, call_key
from panjue.prompts.plumbing.errors import UserError
from panjue.serve.ask import CompletionRow, answer_all
from panjue.serve.ray import RESTARTS, Fleet, cluster

EXAMPLES = 60
REPLICAS = 2


class Fake:
    """A replica whose engine answers at once.

    `folder` has a file for each process of a replica; `deaths` of them die, each after five
    examples; if it is negative, the first one cannot start; an example takes `calls` calls; without
    calls no engine can start.
    """

    def __init__(self, folder: str, deaths: int, calls: int) -> None:
        self._folder, self._deaths, self._calls, self._left = Path(folder), deaths, calls, 5

    async def start(self) -> None:
        if self._calls == 0 or (self._deaths < 0 and not list(self._folder.iterdir())):
            (self._folder / "bad").touch()
            raise UserError("engine: is broken")
        await asyncio.sleep(1 if self._deaths < 0 else 0)  # the bad one is faster
        (self._folder / str(os.getpid())).touch()

    async def answer(
        self, example: Example, old_rows: dict[str, CompletionRow]
    ) -> AsyncIterator[CompletionRow]:
        calls = range(self._calls)
        made: list[CompletionRow] = [{"id": example.id, "call": call} for call in calls]
        new = [row for row in made if call_key(row) not in old_rows]
        if self._left == 0 and len(list(self._folder.iterdir())) <= self._deaths:
            for row in new[:-1]:
                yield row
            os._exit(1)
        self._left = max(0, self._left - 1)
        for row in new:
            yield row


async def outcome(deaths: int, calls: int, *, stopped: bool = False) -> dict[str, Any]:
    """Run one scenario."""
    keys: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        actor = ray.remote(Fake).options(max_restarts=RESTARTS, num_cpus=0, max_concurrency=9)
        fakes = [actor.remote(folder, deaths, calls) for _ in range(REPLICAS)]
        fleet, error = Fleet(fakes, slots=8), ""

        async def answer(example: Example) -> None:
            await fleet.answer(example, lambda row: keys.append(call_key(row)), {})

        async def work() -> None:
            await fleet.wait_for_first()
            await answer_all((Example(i, "案情") for i in range(EXAMPLES)), answer, fleet.slots)

        try:
            await asyncio.wait_for(work(), 0.001 if stopped else None)
        except (UserError, TimeoutError) as problem:
            error = str(problem) or "stopped"
        said = fleet.status()
        for fake in fakes:
            ray.kill(fake)  # type: ignore[arg-type]
    return {"keys": keys, "said": said, "again": fleet.repeats, "error": error}


async def scenarios() -> dict[str, dict[str, Any]]:
    """Run all that need a cluster, at once: most of their time they wait for Ray."""
    started = {
        "0 deaths, 1": outcome(0, 1),
        "5 deaths, 3": outcome(5, 3),
        "always": outcome(10**6, 2),
        "broken": outcome(0, 0),
        "one bad": outcome(-1, 1),
        "stopped": outcome(0, 1, stopped=True),
    }
    return dict(zip(started, await asyncio.gather(*started.values()), strict=True))


def main() -> None:
    """Run all scenarios; if that takes too long, say where it is."""
    faulthandler.dump_traceback_later(540, exit=True)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]  # workers cannot import it
    ray.init("local", include_dashboard=False)
    outcomes = asyncio.run(scenarios())
    ray.shutdown()
    try:
        with cluster():
            pass
    except UserError as problem:
        outcomes["no cluster"] = {"error": str(problem)}
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
