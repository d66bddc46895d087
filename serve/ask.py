"""Ask the model: turn an example into a question, requests and a row of `completions.jsonl`.

`panjue generate`, `panjue serve`, Python's `load` and the replicas in a Ray cluster all use this
file. `finetune.classifier.opinions.read_answer` reads the answer of a row, there and in
`panjue decode`.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from llguidance import LLMatcher

from panjue.finetune.classifier.opinions import Advisor, Opinion
from panjue.finetune.trained import Trained
from panjue.prompts.example import (
    ENGINE_FAILED,
    Decoded,
    Example,
    LabelFields,
    call_key,
    first_reply,
)
from panjue.prompts.labels import Labels
from panjue.prompts.model import load_tokenizer
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.render import neutralize_messages, template_args
from panjue.prompts.shorten import ShortenedPrompt, shortened_prompt, shortest
from panjue.prompts.task import Messages, Schema, Task
from panjue.serve.reply_logprobs import field_logprobs, tokens_of
from panjue.serve.together import Together

T = TypeVar("T")

Sampling = Mapping[str, Any]
"""Arguments of vLLM's SamplingParams, or of OpenAI's API. `temperature` is 0 by default."""

OnText = Callable[[str], None]  # callback that receives each new piece of a reply

CompletionRow = dict[str, Any]  # a row of `completions.jsonl`
Write = Callable[[CompletionRow], None]
OldRows = Mapping[str, CompletionRow]
"""Key of a call (`prompts.example.call_key`) -> its row from an earlier run."""

LONGEST = 2**15
"""Limit on the tokens of prompt plus reply for cases that need more than training had. vLLM keeps
rows of this length for every request, and copies some at each step
(vllm/v1/worker/gpu/states.py:33)."""

CHARACTERS_A_TOKEN = 8
"""So many characters are more than a token, in Chinese and in English text."""


class Refusal(Exception):
    """An example cannot be asked. The message says why."""


class Budget(NamedTuple):
    """Limits on the tokens of a prompt and its reply together."""

    usual: int = 0  # the limit of the training, to which longer cases are shortened
    longest: int = 0  # the limit for cases that do not fit into `usual`


class Question(NamedTuple):
    """The prompt of one call, and the form of its reply."""

    prompt: list[int]  # token ids; empty for an endpoint with another tokenizer
    schema: Schema | None  # of the reply; None for free text
    room: int  # tokens left for the reply; 0 leaves the limit to the endpoint
    dropped: int  # sentences that were left out of the prompt
    messages: Messages  # the prompt for an endpoint
    opinions: Sequence[Opinion] = ()  # what the text classifier thinks of the case
    template: Mapping[str, Any] = {}  # arguments of the chat template that made `prompt`


@dataclass(frozen=True)
class Request:
    """One question and how to sample its reply."""

    id: int | str
    question: Question
    sampling: Sampling
    sampling_pass: int = 0  # number of this request among those of one row
    with_logprobs: bool = False  # whether the tokens' log-probabilities are wanted
    on_text: OnText | None = None  # receives each new piece of the first reply


class Source(Protocol):
    """What answers requests: an engine or an endpoint."""

    longest: int  # limit on the tokens of a prompt and its reply; 0 if it is not known
    runner: asyncio.Runner  # of its event loop, unless that is already running

    async def ask(self, request: Request) -> Any:
        """Return the finished output of one request."""


class QuestionMaker:
    """Turns examples into questions: shortens and renders prompts, makes and checks schemas."""

    def __init__(
        self,
        task: Task,
        trained: Trained | None,
        model: Path | None,
        budget: Budget,
        *,
        constrained: bool = True,  # False: replies need not follow the schema
    ) -> None:
        """Load the text classifier of a training, and the tokenizer of `model`.

        Without a model (an endpoint with another tokenizer), prompts are not shortened, and the
        endpoint limits the replies.
        """
        self.task = task
        self.labels = task.closed_labels or Labels()
        self.advisor: Advisor | None = None
        self.budget = budget
        self.tokenizer: Any = None
        self._constrained = constrained
        if model:
            self.tokenizer = load_tokenizer(model)
            import llguidance.hf  # imports transformers, which decoding alone does not need

            self._grammar_tokenizer = llguidance.hf.from_tokenizer(self.tokenizer)
        if trained:
            self.labels = trained.labels
            advisor = trained.advisor(task)
            self.advisor = advisor and replace(advisor, in_prompts=trained.record.opinions)
        self._together = Together(self.opinions_on)

    def opinions_on(self, examples: Sequence[Example]) -> list[list[Opinion]]:
        """Return the text classifier's opinions on each example; empty without a classifier."""
        return self.advisor.opinions_on(examples) if self.advisor else [[] for _ in examples]

    async def opinions(self, example: Example) -> Sequence[Opinion]:
        """Return the text classifier's opinions, computed together with other waiting examples."""
        return await self._together.opinions(example) if self.advisor else ()

    def refuse_hopeless(self, example: Example) -> None:
        """Raise Refusal if no shortening of a very long text can fit; only its start is tokenized.

        `question` refuses it too, but only after the classifier and the tokenizer saw all of it.
        """
        limit = self.budget.usual
        start = shortest(example).text[: CHARACTERS_A_TOKEN * limit]
        if len(self.tokenizer(start, add_special_tokens=False).input_ids) > limit:
            raise Refusal(
                f"the sentences that must stay need more than {limit} tokens, the limit on prompt "
                "and reply; break the text into sentences, or shorten it"
            )

    def question(
        self, example: Example, source_limit: int = 0, opinions: Sequence[Opinion] | None = None
    ) -> Question:
        """Return the question for one example; raise Refusal if it cannot be asked.

        `source_limit` is the limit of the engine or endpoint on the tokens of prompt and reply; 0
        allows no more than training had. Without `opinions`, the text classifier is asked now. A
        long case takes tens of milliseconds.
        """
        if opinions is None:
            [opinions] = self.opinions_on([example])
        if self.advisor:
            example = self.advisor.show(example, opinions)
        schema = self.task.ask.schema(example, self.labels) if self._constrained else None
        if self.tokenizer is None:  # an endpoint's: it renders the messages, and limits the reply
            messages = neutralize_messages(None, self.task.ask.prompt(example))
            return Question([], schema, room=0, dropped=0, messages=messages, opinions=opinions)
        asked, limit = self._shortened(example, source_limit)
        shortened, messages, prompt, needed = asked
        if not shortened.fits:
            way_out = "use a larger max_tokens, of the server or of a new training"
            if source_limit:  # of the engine of `generate`
                way_out = "give more memory and delete this row of completions.jsonl"
            raise Refusal(
                f"the prompt needs {len(prompt)} tokens and the reply {needed}, and the limit is "
                f"{limit}; shorten the text, or {way_out}"
            )
        if schema and (problem := self._grammar_problem(schema)):
            raise Refusal(f"the grammar library refuses its schema: {problem}")
        room = limit - len(prompt)
        template = template_args(self.tokenizer)
        return Question(prompt, schema, room, shortened.dropped, messages, opinions, template)

    def _shortened(self, example: Example, source_limit: int) -> tuple[ShortenedPrompt, int]:
        """Return the shortened prompt, and the limit on prompt and reply to which it was shortened.

        The limit is that of training, since the model knows such prompts. If a case does not fit,
        the tokens for its reply, `room`, are added to the limit. If it still does not fit, the
        limit is the highest one. For a reply of 1,000 tokens: 4,096, then 5,096, then 32,768.
        """
        shorten = partial(shortened_prompt, self.task, example, self.labels, self.tokenizer)
        limit = self.budget.usual
        highest = max(limit, min(source_limit, self.budget.longest))
        asked = shorten(limit)
        with_room = min(limit + asked.room, highest)
        for higher in (with_room, highest):
            if higher > limit and not asked.shortened.fits:
                limit = higher
                asked = shorten(limit)
        return asked, limit

    def _grammar_problem(self, schema: Schema) -> str:
        """Return why the grammar library refuses a schema; empty if it does not.

        vLLM itself refuses a schema only if its grammar cannot be parsed. If a grammar fails later,
        at compilation, vLLM returns an empty reply and only writes a log line.
        """
        options = {"whitespace_flexible": False}
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=options)
        problem = LLMatcher(self._grammar_tokenizer, grammar, log_level=0).get_error()
        return problem.splitlines()[0] if problem else ""


async def ask(
    source: Source,
    question: Question,
    key: int | str,
    fields: LabelFields,
    passes: Sequence[Sampling] = ({},),
    on_text: OnText | None = None,
) -> CompletionRow:
    """Ask one call with a request for each of `passes`; return its row without the key.

    The row has the model's log-probability of each of the `fields` in the first reply, if the
    source gives those of the tokens.
    """
    requests = []
    for number, sampling in enumerate(passes):
        wanted = number == 0 and bool(fields.fields)
        requests.append(Request(key, question, sampling, number, wanted, on_text))
    outputs = await all_of(source.ask(request) for request in requests)
    made = row(question, outputs)
    if "refused" not in made and (tokens := tokens_of(outputs[0].outputs[0])):
        logprobs = field_logprobs(made["texts"][0], tokens, fields)
        if logprobs is not None:
            made["logprobs"] = logprobs
    if question.opinions:
        made["opinions"] = [vars(opinion) for opinion in question.opinions]
    return made


def row(question: Question, outputs: Sequence[Any]) -> CompletionRow:
    """Return the row for the outputs of a question's requests; the first reply comes first.

    Outputs are vLLM's `RequestOutput`, or `EndpointOutput`, which adds `refused` and
    `prompt_tokens`.
    """
    replies: list[Any] = []
    for output in outputs:
        if getattr(output, "refused", ""):
            return {"refused": output.refused}
        replies += output.outputs
    first, *samples = replies
    if first.finish_reason == "error" and not first.text:
        return {"refused": ENGINE_FAILED}
    # The start of a first reply can be read. A sample that an error has cut does not vote.
    replies = [first, *(sample for sample in samples if sample.finish_reason != "error")]
    prompt_tokens = len(question.prompt)  # for the engine, which gets token ids
    return {
        "texts": [reply.text for reply in replies],
        "finish": [reply.finish_reason for reply in replies],
        "prompt_tokens": sum(getattr(o, "prompt_tokens", prompt_tokens) for o in outputs),
        "cached_tokens": sum(output.num_cached_tokens or 0 for output in outputs),
        "completion_tokens": sum(len(reply.token_ids) for reply in replies),
        "dropped_sentences": question.dropped,
    }


@dataclass(frozen=True)
class Answerer:
    """Asks all calls of examples and writes their rows. A call has a request for each pass."""

    source: Source
    question_maker: QuestionMaker
    slots: asyncio.Semaphore  # one for each call that is asked now
    passes: Sequence[Sampling] = ({},)

    def status(self) -> str:
        """Return what progress also shows: nothing here; a fleet of replicas shows how many run."""
        return ""

    @property
    def runner(self) -> asyncio.Runner:
        """Return the runner of the event loop in which the engine or endpoint is asked."""
        return self.source.runner

    async def answer(self, example: Example, write: Write, old_rows: OldRows) -> None:
        """Ask all questions of one example; `write` the row of each call without an old row.

        Questions that a task's step yields together are asked together; see `example.Solving`.
        """
        task = self.question_maker.task
        solving = task.solving(example)
        replies = None
        number = 0
        while True:
            try:
                questions = solving.send(replies)  # type: ignore[arg-type]  # None starts it
            except StopIteration:
                return
            calls = []
            for call, question in enumerate(questions, start=number):
                key: CompletionRow = {"id": example.id}
                if task.solve:
                    key |= {"call": call, "question": str(question.id)}
                calls.append(self._reply(key, question, write, old_rows.get(call_key(key))))
            replies = await all_of(calls)
            number += len(questions)

    async def _reply(
        self, key: CompletionRow, question: Example, write: Write, old_row: CompletionRow | None
    ) -> Decoded:
        """Return the decoded reply to one call, from its old row if there is one.

        `key` identifies the call: the id of the example, the number of the call, the id of the
        question.
        """
        row = old_row
        if row is None:
            async with self.slots:
                try:
                    opinions = await self.question_maker.opinions(question)
                    limit = self.source.longest
                    asked = self.question_maker.question(question, limit, opinions)
                    fields = self.question_maker.task.answer
                    made = await ask(self.source, asked, question.id, fields, self.passes)
                    row = {**key, **made}
                except Refusal as refusal:
                    row = {**key, "refused": str(refusal)}
                write(row)
        elif row.get("question") != key.get("question"):
            raise UserError(
                f"id {key['id']}: call {key['call']} was {row.get('question')!r}, now it is "
                f"{key['question']!r}; name another folder with answers=NAME"
            )
        return self.question_maker.task.ask.decode(
            first_reply(row), question, self.question_maker.labels
        )


async def all_of(coroutines: Iterable[Awaitable[T]]) -> list[T]:
    """Return all results in order. Before raising the first error, wait for every coroutine."""
    results = await asyncio.gather(*coroutines, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return cast(list[T], results)


async def answer_all(
    examples: Iterable[Example],
    answer: Callable[[Example], Coroutine[Any, Any, None]],
    slots: asyncio.Semaphore,
) -> None:
    """Answer examples, each in a coroutine; take the next one when no question waits for a slot.

    So memory stays constant, and the next prompts are prepared while others are answered. After an
    error, take no further example, but finish those under way, so that their rows are kept.
    """
    errors: list[Exception] = []

    async def answer_one(example: Example) -> None:
        try:
            await answer(example)
        except Exception as error:  # a TaskGroup would cancel the others
            errors.append(error)

    async with asyncio.TaskGroup() as group:
        try:
            for example in examples:
                async with slots:  # slots are given in order, so questions that wait come first
                    pass
                if errors:
                    break
                group.create_task(answer_one(example))
                await asyncio.sleep(0)  # let it ask for its slots first
        except Exception as error:  # the next example cannot be read
            errors.append(error)
    if errors:
        raise errors[0]
