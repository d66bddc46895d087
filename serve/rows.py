"""Examples -> rows of `completions.jsonl`, one row per call; an example takes one call or more."""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from panjue.prompts.example import Decoded, Example, Solving, call_key, first_reply
from panjue.prompts.plumbing.errors import UserError
from panjue.serve.alternatives import ALTERNATIVES, alternatives
from panjue.serve.ask import Asker
from panjue.serve.endpoint import Endpoint, EndpointOutput, PlainAsker
from panjue.serve.engine import CompletionOutput, Engine, RequestOutput
from panjue.serve.source import Refusal, Request, Sampling, complete, requests
from panjue.serve.work import Row, Step

NEAR_TIE = 1e-4
"""Two tokens whose log-probabilities differ by less count as equally likely (float32)."""

Output: TypeAlias = RequestOutput | EndpointOutput
FindRow = Callable[[str], Row | None]
"""Key of a call (`prompts.example.call_key`) -> its row from an earlier run."""


@dataclass
class ExampleRun:
    """One example while it is being solved.

    Attributes:
        solving: The generator that yields questions and receives replies.
        first: Number of the first call whose reply is awaited.
        replies: Replies to the awaited calls; None if missing.
        started: Whether `solving` has yielded its first questions.
    """

    example: Example
    solving: Solving
    first: int = 0
    replies: list[Decoded | None] = field(default_factory=list)
    started: bool = False


class Calls:
    """The calls of all examples, many at once.

    Attributes:
        solved: Number of examples that have their answer.
        finished: Number of calls that have a new row, refused calls included.
        tokens: Number of tokens in their replies.
    """

    def __init__(
        self,
        asker: Asker | PlainAsker,
        examples: Iterator[Example],
        passes: Sequence[Sampling] = ({"logprobs": 2},),
        find_row: FindRow = lambda _: None,
    ) -> None:
        """Take the examples one by one; each call sends one request per item of `passes`."""
        self.solved = self.finished = self.tokens = 0
        self._asker, self._examples = asker, examples
        self._passes, self._find_row = passes, find_row
        self._with_alternatives = len(passes) > 1 or passes[0].get("logprobs") == ALTERNATIVES
        self._ready: deque[Request] = deque()
        self._rows: deque[Row] = deque()
        self._open: dict[str, tuple[ExampleRun, int, Example]] = {}
        self._outputs: dict[str, list[tuple[Request, Output]]] = {}

    @property
    def in_flight(self) -> int:
        """Return the number of calls that were sent and are not answered."""
        return len(self._open) - len(self._ready) // len(self._passes)

    def requests(self) -> Iterator[Request | None]:
        """Yield the next requests; None if the next one needs a reply that is still missing."""
        while True:
            if self._ready:
                yield self._ready.popleft()
            elif (example := next(self._examples, None)) is not None:
                self._advance(ExampleRun(example, self._asker.task.answer.solving(example)))
            elif self._open:
                yield None
            else:
                return

    def take(self, request: Request, output: Output) -> None:
        """Take a finished request; after the last one of a call, make its row and continue."""
        key = str(request.id)
        outputs = self._outputs.setdefault(key, [])
        outputs.append((request, output))
        if len(outputs) < len(self._passes):
            return
        run, call, question = self._open.pop(key)
        in_order = sorted(self._outputs.pop(key), key=lambda pair: pair[0].sampling_pass)
        new_row = {
            **self._key_fields(run, call, question),
            **row(in_order, self._asker.tokenizer, with_alternatives=self._with_alternatives),
        }
        self.tokens += new_row.get("completion_tokens", 0)
        self._add_row(run, call, question, new_row)
        if None not in run.replies:
            self._advance(run)

    def rows(self) -> Iterator[Row]:
        """Yield the rows that are new since the last call."""
        while self._rows:
            yield self._rows.popleft()

    def step(self, rows: list[Row]) -> Step:
        """Return these new rows with the counts so far."""
        return Step(rows, self.solved, self.finished, self.tokens, self.in_flight)

    def _advance(self, run: ExampleRun) -> None:
        """Pass on the replies and ask the next questions, until a reply is missing."""
        while None not in run.replies:
            replies = [reply for reply in run.replies if reply]
            run.first += len(replies)
            try:
                questions = run.solving.send(replies if run.started else None)  # type: ignore[arg-type]
            except StopIteration:
                self.solved += 1
                return
            run.started, run.replies = True, [None] * len(questions)
            for call, question in enumerate(questions, start=run.first):
                self._ask(run, call, question)

    def _ask(self, run: ExampleRun, call: int, question: Example) -> None:
        fields = self._key_fields(run, call, question)
        old_row = self._find_row(call_key(fields))
        if old_row is not None:
            if old_row.get("question") != fields.get("question"):
                raise UserError(
                    f"id {run.example.id}: call {call} was {old_row.get('question')!r}, now it is "
                    f"{fields.get('question')!r}; choose another run=FOLDER"
                )
            self._decode(run, call, question, old_row)
            return
        try:
            call_requests = requests(question.id, self._asker.question(question), self._passes)
        except Refusal as refusal:
            self._add_row(run, call, question, {**fields, "refused": str(refusal)})
            return
        self._ready.extend(call_requests)
        self._open[str(question.id)] = (run, call, question)

    def _key_fields(self, run: ExampleRun, call: int, question: Example) -> Row:
        if not self._asker.task.answer.several_calls:
            return {"id": run.example.id}
        return {"id": run.example.id, "call": call, "question": str(question.id)}

    def _add_row(self, run: ExampleRun, call: int, question: Example, new_row: Row) -> None:
        self.finished += 1
        self._rows.append(new_row)
        self._decode(run, call, question, new_row)

    def _decode(self, run: ExampleRun, call: int, question: Example, result: Row) -> None:
        decoded = self._asker.task.ask.decode(first_reply(result), question, self._asker.labels)
        run.replies[call - run.first] = decoded


def rows(
    source: Engine | Endpoint,
    calls: Calls,
    in_flight: int,
    check: Callable[[], None] = lambda: None,
) -> Generator[Row, None, None]:
    """Yield one row of `completions.jsonl` per call, in the order they finish.

    `check` is called between replies and may raise to stop the run.
    """
    outcomes: Generator[tuple[Request, Any], None, None]
    outcomes = complete(source, calls.requests(), in_flight, check)
    with closing(outcomes):
        checked = source.check_outcomes(outcomes) if isinstance(source, Endpoint) else outcomes
        for request, output in checked:
            calls.take(request, output)
            yield from calls.rows()
        yield from calls.rows()


def row(
    passes: Sequence[tuple[Request, Output]], tokenizer: Any, *, with_alternatives: bool = False
) -> Row:
    """Return the row of one call, from the outputs of its requests; the first reply comes first.

    With `with_alternatives` it has the alternatives of each reply too.
    """
    request, first = passes[0]
    refused = next((o.refused for _, o in passes if isinstance(o, EndpointOutput)), "")
    if refused:
        return {"refused": refused}
    replies = [reply for _, output in passes for reply in output.outputs]
    if replies[0].finish_reason == "error" and not replies[0].text:
        return {"refused": "the engine failed on this request"}
    replies = replies[:1] + [reply for reply in replies[1:] if reply.finish_reason != "error"]
    # An endpoint returns no log-probabilities.
    with_alternatives = with_alternatives and replies[0].logprobs is not None
    return {
        "texts": [reply.text for reply in replies],
        "finish": [reply.finish_reason for reply in replies],
        "alternatives": [_alternatives(reply, tokenizer) for reply in replies]
        if with_alternatives
        else [],
        "prompt_tokens": sum(_prompt_tokens(*pair) for pair in passes),
        "cached_tokens": sum(output.num_cached_tokens or 0 for _, output in passes),
        "completion_tokens": sum(len(reply.token_ids) for reply in replies),
        "dropped_sentences": request.question.dropped,
        "loosened_schema": request.question.loosened,
        "near_ties": near_ties(first.outputs[0]) if request.is_greedy else [],
    }


def _prompt_tokens(request: Request, output: Output) -> int:
    if isinstance(output, EndpointOutput):
        return output.prompt_tokens
    return len(request.question.prompt)


def _alternatives(reply: CompletionOutput, tokenizer: Any) -> list[Any]:
    options = [{i: token.logprob for i, token in top.items()} for top in reply.logprobs or ()]
    return alternatives(list(reply.token_ids), options, tokenizer)


def near_ties(reply: CompletionOutput) -> list[int]:
    """Return the positions of a greedy reply where the two best tokens differ by under `NEAR_TIE`.

    Only there may another batch or machine choose another token: sums of floats depend on their
    order.
    """
    best_two = (sorted(t.logprob for t in top.values())[-2:] for top in reply.logprobs or ())
    return [i for i, two in enumerate(best_two) if len(two) == 2 and two[1] - two[0] < NEAR_TIE]
