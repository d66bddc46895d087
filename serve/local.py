"""A trained model in this process, for Python code: `panjue.load(run)`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from panjue.prompts.plumbing.config import first_complaint
from panjue.prompts.plumbing.debug import debug_log
from panjue.prompts.plumbing.errors import UserError
from panjue.serve.endpoint import Endpoint
from panjue.serve.engine import Engine, check_engine, engine
from panjue.serve.guard import Problem
from panjue.serve.judgments import Case, validation_message
from panjue.serve.service import Service, make_service
from panjue.serve.settings import ServeConfig


class LocalJudge:
    """Judges cases with a running engine, one after another; `load_judge` makes it."""

    def __init__(self, answer: Callable[[Case], dict[str, Any]]) -> None:
        """Take what answers a case."""
        self._answer: Callable[[Case], dict[str, Any]] | None = answer

    def close(self) -> None:
        """Let go of the engine: vLLM's object complains if it lives until Python exits."""
        self._answer = None

    def judge(
        self, fact: str, defendants: Sequence[str] | None = None, samples: int = 0
    ) -> dict[str, Any]:
        """Return the judgments of one case, as `POST /v1/judgments` does.

        Args:
            fact: The facts.
            defendants: Their names, in order; by default they are found in the facts by rules.
            samples: Samples besides the greedy reply; with them the answer is decided by expected
                score.

        Raises:
            UserError: The case cannot be asked, the engine has failed, or the `with` block is over.
        """
        if self._answer is None:
            raise UserError("the engine has stopped; call judge within the `with` block")
        names = None if defendants is None else list(defendants)
        try:
            return self._answer(Case(fact=fact, defendants=names, samples=samples))
        except ValidationError as error:
            raise UserError(validation_message(error)) from None
        except Problem as problem:
            raise UserError(problem.message) from None


@contextmanager
def load_judge(run: Path, settings: Mapping[str, Any]) -> Iterator[LocalJudge]:
    """Start the engine of a run, and stop it at the end of the block.

    Args:
        run: The run folder.
        settings: Settings of `ServeConfig`.

    Raises:
        UserError: A setting is wrong, nothing trained is there, or the engine does not start.
    """
    try:
        config = ServeConfig.model_validate({**settings, "run": run})
    except ValidationError as error:
        raise UserError(f"{run}: {first_complaint(ServeConfig, error)}") from None
    check_engine(config.engine)
    # The event loop has a thread of its own: in a notebook this thread runs one already.
    with debug_log(run), ThreadPoolExecutor(1) as thread, ExitStack() as at_end:
        service, in_thread = make_service(config), ExitStack()
        at_end.callback(lambda: thread.submit(in_thread.close).result())
        source = thread.submit(_start, service, in_thread).result()
        runner, judgments = source.runner, service.routes(source)
        assert runner, "only a server's engine has none"
        judge = LocalJudge(lambda case: thread.submit(runner.run, judgments.answer(case)).result())
        at_end.callback(judge.close)
        yield judge


def _start(service: Service, stack: ExitStack) -> Engine | Endpoint:
    """Start what answers; `stack` stops it."""
    config = service.config
    if config.endpoint:
        return stack.enter_context(closing(Endpoint(config.endpoint)))
    return stack.enter_context(
        engine(service.served, config.engine, service.max_tokens, config.seed)
    )
