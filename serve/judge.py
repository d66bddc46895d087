"""Judge cases from Python, without a server: `with load("runs/mine") as judge: judge(fact)`."""

import asyncio
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

from panjue.prompts.plumbing.errors import UserError
from panjue.serve.engine import Engine, check_engine, running_engine
from panjue.serve.served import ServedRun, case_request
from panjue.serve.settings import NAME, ServeConfig, serve_settings


class Judge:
    """Judges cases with a running engine; `load` makes it."""

    def __init__(self, run: ServedRun, engine: Engine, in_flight: int) -> None:
        """Take an engine of the running event loop; the judge is called in other threads."""
        self._run, self._in_flight = run, in_flight
        self._engine: Engine | None = engine
        self._loop = asyncio.get_running_loop()

    def __call__(
        self, fact: str, defendants: Sequence[str] | None = None, samples: int = 0
    ) -> dict[str, Any]:
        """Return the judgments of one case, as `POST /v1/judgments` does.

        The arguments are fields of `CaseRequest`.
        """
        names = None if defendants is None else list(defendants)
        return self._submit({"fact": fact, "defendants": names, "samples": samples}).result()

    def many(self, cases: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the judgments of cases in their order, with many in the engine at once.

        A case is a mapping with `fact`, and `defendants` and `samples` as for one case. After an
        error no case is answered.
        """
        waiting: deque[Future[dict[str, Any]]] = deque()
        try:
            for case in cases:
                waiting.append(self._submit(case))
                if len(waiting) == 2 * self._in_flight:  # although the first one may be slow
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

    def close(self) -> None:
        """Forget the engine: vLLM's object complains if it lives until Python exits."""
        self._engine = None

    def _submit(self, fields: Mapping[str, Any]) -> Future[dict[str, Any]]:
        if self._engine is None:
            raise UserError("the engine has stopped; call judge within the `with` block")
        answer = self._run.answer(self._engine, case_request(fields))
        return asyncio.run_coroutine_threadsafe(answer, self._loop)


@contextmanager
def load(run: Path | str, settings: Mapping[str, Any] | None = None) -> Iterator[Judge]:
    """Start the engine of a run, and stop it at the end of the block.

    `settings` are settings of `ServeConfig`, in place of those in `run`/config.yaml.
    """
    words = [f"{key}={json.dumps(value)}" for key, value in (settings or {}).items()]
    config, runs = serve_settings(Path(run), words)
    check_engine(config.engine)
    started: Future[Judge] = Future()
    end: Future[None] = Future()
    work = run_engine(ServedRun(runs[NAME], config), config, started, end)
    # In a thread of its own: in a notebook, this one runs an event loop already.
    thread = Thread(target=asyncio.run, args=[work], name="panjue engine")
    thread.start()
    try:
        yield started.result()
    finally:
        end.set_result(None)
        thread.join()


async def run_engine(
    run: ServedRun, config: ServeConfig, started: "Future[Judge]", end: "Future[None]"
) -> None:
    """Run an engine until `end` is done; `started` receives its judge, or why there is none."""
    try:
        arguments = (run.folders, config.engine, run.asker.max_tokens, config.seed)
        async with running_engine(*arguments) as engine:
            judge = Judge(run, engine, config.slots)
            started.set_result(judge)
            await asyncio.wrap_future(end)
            judge.close()
    except BaseException as error:
        if started.done():
            raise
        started.set_exception(error)
