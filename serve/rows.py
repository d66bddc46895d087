"""Examples -> rows of `completions.jsonl`: whatever each example's way to its answer asks."""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from panjue.prompts.example import Decoded, Example, Solve, Solving, call_key, first_reply
from panjue.prompts.plumbing.errors import UserError
from panjue.serve.alternatives import alternatives
from panjue.serve.ask import Asker
from panjue.serve.endpoint import Endpoint, PlainAsker, Told
from panjue.serve.engine import CompletionOutput, Engine, RequestOutput
from panjue.serve.source import Refusal, Request, Sampling, complete, requests

NEAR_TIE = 1e-4
"""Difference in log-probability under which two tokens count as equally likely (float32)."""

Row = dict[str, Any]
Known = Callable[[str], Row | None]
"""Key of a call, as `prompts.task.call_key` makes it -> its row of an earlier run."""


@dataclass
class ExampleRun:
    """One example on the way to its answer.

    Attributes:
        first: Number of the first of the calls it waits for.
        replies: The replies to them, as far as they are there.
    """

    example: Example
    solving: Solving
    first: int = 0
    replies: list[Decoded | None] = field(default_factory=list)
    begun: bool = False


class Calls:
    """The calls of all examples, side by side.

    Attributes:
        solved: Examples whose way has come to its end.
        made: Calls whose rows were made, the refused ones among them.
        tokens: Of their replies.
    """

    def __init__(
        self,
        asker: Asker | PlainAsker,
        examples: Iterator[Example],
        passes: Sequence[Sampling] = ({"logprobs": 2},),
        known: Known = lambda _: None,
    ) -> None:
        """Take the examples one by one; `passes` are the requests that make one call."""
        self.solved = self.made = self.tokens = 0
        self._asker, self._examples, self._passes, self._known = asker, examples, passes, known
        self._ready: deque[Request] = deque()
        self._rows: deque[Row] = deque()
        self._open: dict[str, tuple[ExampleRun, int, Example]] = {}
        self._answered: dict[str, list[tuple[Request, RequestOutput | Told]]] = {}

    @property
    def in_flight(self) -> int:
        """Return the calls that were asked and are not answered."""
        return len(self._open) - len(self._ready) // len(self._passes)

    def requests(self) -> Iterator[Request | None]:
        """Yield what to ask next; None where that depends on a reply that is still to come."""
        while True:
            if self._ready:
                yield self._ready.popleft()
            elif (example := next(self._examples, None)) is not None:
                self._go_on(ExampleRun(example, self._asker.task.answer.solving(example)))
            elif self._open:
                yield None
            else:
                return

    def take(self, request: Request, output: RequestOutput | Told) -> None:
        """Take a finished request; with the last of its call the example goes on its run."""
        key = str(request.id)
        answered = self._answered.setdefault(key, [])
        answered.append((request, output))
        if len(answered) < len(self._passes):
            return
        run, call, question = self._open.pop(key)
        in_order = sorted(self._answered.pop(key), key=lambda made: made[0].sampling_pass)
        made = {
            **self._names(run, call, question),
            **row(in_order, self._asker.tokenizer, with_alternatives=len(in_order) > 1),
        }
        self.tokens += made.get("completion_tokens", 0)
        self._put(run, call, question, made)
        if None not in run.replies:
            self._go_on(run)

    def rows(self) -> Iterator[Row]:
        """Yield the rows that were made since."""
        while self._rows:
            yield self._rows.popleft()

    def _go_on(self, run: ExampleRun) -> None:
        """Hand the replies over and ask what is asked next, until something must be waited for."""
        while None not in run.replies:
            replies = [reply for reply in run.replies if reply]
            run.first += len(replies)
            try:
                questions = run.solving.send(replies if run.begun else None)  # type: ignore[arg-type]
            except StopIteration:
                self.solved += 1
                return
            run.begun, run.replies = True, [None] * len(questions)
            for call, question in enumerate(questions, start=run.first):
                self._ask(run, call, question)

    def _ask(self, run: ExampleRun, call: int, question: Example) -> None:
        names = self._names(run, call, question)
        before = self._known(call_key(names))
        if before is not None:
            if before.get("question") != names.get("question"):
                raise UserError(
                    f"id {run.example.id}: call {call} was {before.get('question')!r}, now it is "
                    f"{names.get('question')!r}; choose another run=FOLDER"
                )
            self._reply(run, call, question, before)
            return
        try:
            asked = requests(question.id, self._asker.question(question), self._passes)
        except Refusal as refusal:
            self._put(run, call, question, {**names, "refused": str(refusal)})
            return
        self._ready.extend(asked)
        self._open[str(question.id)] = (run, call, question)

    def _names(self, run: ExampleRun, call: int, question: Example) -> Row:
        if not isinstance(self._asker.task.answer, Solve):
            return {"id": run.example.id}
        return {"id": run.example.id, "call": call, "question": str(question.id)}

    def _put(self, run: ExampleRun, call: int, question: Example, made: Row) -> None:
        self.made += 1
        self._rows.append(made)
        self._reply(run, call, question, made)

    def _reply(self, run: ExampleRun, call: int, question: Example, made: Row) -> None:
        decoded = self._asker.task.ask.decode(first_reply(made), question, self._asker.labels)
        run.replies[call - run.first] = decoded


def rows(
    source: Engine | Endpoint,
    calls: Calls,
    in_flight: int,
    check: Callable[[], None] = lambda: None,
) -> Generator[Row, None, None]:
    """Yield one row of `completions.jsonl` per call, in the order they finish.

    `check` is called between replies, and may end it all.
    """
    outcomes: Generator[tuple[Request, Any], None, None]
    outcomes = complete(source, calls.requests(), in_flight, check)
    with closing(outcomes):
        taken = source.taken(outcomes) if isinstance(source, Endpoint) else outcomes
        for request, output in taken:
            calls.take(request, output)
            yield from calls.rows()
        yield from calls.rows()


def row(
    passes: Sequence[tuple[Request, RequestOutput | Told]],
    tokenizer: Any,
    *,
    with_alternatives: bool = False,
) -> Row:
    """Return what the requests of one call say, the first reply first.

    With `with_alternatives` also where each reply might well have gone on otherwise.
    """
    request, first = passes[0]
    refused = next((output.refused for _, output in passes if isinstance(output, Told)), "")
    if refused:
        return {"refused": refused}
    replies = [reply for _, output in passes for reply in output.outputs]
    if replies[0].finish_reason == "error" and not replies[0].text:
        return {"refused": "the engine failed at it"}
    replies = replies[:1] + [reply for reply in replies[1:] if reply.finish_reason != "error"]
    with_alternatives = (
        with_alternatives and replies[0].logprobs is not None
    )  # an endpoint tells none
    return {
        "texts": [reply.text for reply in replies],
        "finish": [reply.finish_reason for reply in replies],
        "alternatives": [_alternatives(reply, tokenizer) for reply in replies]
        if with_alternatives
        else [],
        "prompt_tokens": sum(_prompt_tokens(*made) for made in passes),
        "cached_tokens": sum(output.num_cached_tokens or 0 for _, output in passes),
        "completion_tokens": sum(len(reply.token_ids) for reply in replies),
        "dropped_sentences": request.question.dropped,
        "loosened_schema": request.question.loosened,
        "near_ties": near_ties(first.outputs[0]) if request.is_greedy else [],
    }


def _prompt_tokens(request: Request, output: RequestOutput | Told) -> int:
    return output.prompt_tokens if isinstance(output, Told) else len(request.question.prompt)


def _alternatives(reply: CompletionOutput, tokenizer: Any) -> list[Any]:
    options = [{token: o.logprob for token, o in here.items()} for here in reply.logprobs or ()]
    return alternatives(list(reply.token_ids), options, tokenizer)


def near_ties(reply: CompletionOutput) -> list[int]:
    """Return the positions of a greedy reply where the two best tokens lie within `NEAR_TIE`.

    There, and only there, may another batch or machine continue differently: sums of floats
    depend on their order.
    """
    best_two = (
        sorted(t.logprob for t in options.values())[-2:] for options in reply.logprobs or ()
    )
    return [i for i, two in enumerate(best_two) if len(two) == 2 and two[1] - two[0] < NEAR_TIE]
