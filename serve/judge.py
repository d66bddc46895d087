"""Judge one case with a training, over HTTP or from Python with `load`."""

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from panjue.finetune.classifier.opinions import Advisor, FinalAnswer, by_choice, read_answer
from panjue.finetune.trained import Trained
from panjue.prompts.example import Decoded, Example, LabelFields
from panjue.prompts.gpu import check_gpu
from panjue.prompts.model import is_demo
from panjue.prompts.names import names_not_in
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump
from panjue.prompts.plumbing.records import Choice
from panjue.prompts.shorten import named_by, split_sentences
from panjue.prompts.task import Task, load_task
from panjue.serve.ask import Budget, CompletionRow, OnText, Question, QuestionMaker, Refusal, ask
from panjue.serve.decoding import who_answered
from panjue.serve.engine import Engine, check_engine, running_engine
from panjue.serve.merge import served_model
from panjue.serve.settings import NAME, ServeConfig, serve_settings

NUMBERS = count()  # a number for each case, since every request to vLLM needs its own name

MAX_DEFENDANTS = 200  # more than any case has

LONG = 8000
"""Facts with more characters are prepared one at a time. Almost all cases are shorter. To tokenize
80,000 characters takes a second, in which others would wait for Python's lock."""


class CaseFields(BaseModel):
    """A case with the fields of a line of a file of cases."""

    model_config = ConfigDict(extra="forbid", strict=True)

    fact: str
    defendants: list[str] = Field(max_length=MAX_DEFENDANTS)  # their names, in order
    id: int | str | None = None  # returned with the answer
    outcomes: Any = None  # gold, which is ignored; a note says so


class CaseRequest(CaseFields):
    """Body of `POST /v1/judgments`."""

    model: str = NAME  # the training that answers, if the server has several
    stream: bool = False  # as events: `start`, several `delta`, then `result` or `error`


SomeFields = TypeVar("SomeFields", bound=CaseFields)


class BadCase(UserError):
    """A case cannot be asked. The message says why."""


def checked_case(form: type[SomeFields], fields: Mapping[str, Any]) -> SomeFields:
    """Return the fields of a case; raise BadCase if one is missing, unknown or wrong."""
    try:
        return form.model_validate(dict(fields))
    except ValidationError as error:
        problems = []
        # A misspelled field is both missing and unknown; its own name says more.
        if unknown := [name for name in fields if name not in form.model_fields]:
            known = ", ".join(form.model_fields)
            named = ", ".join(f"{name:.40}" for name in unknown[:3])
            problems.append(f"{named}: no such field; a case has {known}")
        for problem in error.errors():
            if problem["type"] != "extra_forbidden":
                field, *within = problem["loc"]  # `defendants.2` is the third name
                numbers = [f".{part}" for part in within if isinstance(part, int)]
                problems.append(f"{field}{''.join(numbers)}: {problem['msg']}")
        raise BadCase("; ".join(problems[:2])) from None


class ServedRun:
    """A training that answers cases: it makes questions and reads replies. It has no engine."""

    def __init__(self, trained: Trained, config: ServeConfig) -> None:
        record = trained.record
        self.task_name = record.task
        self.task = load_task(record.task)
        by_hand = self.task.data.by_hand
        if by_hand is None:
            raise UserError(f"{trained.run}: task {record.task!r} defines no 'by_hand' for serving")
        self._make_example = by_hand  # from the facts and the defendants that a client sends
        self.folders = served_model(trained, config.adapter, config.base)
        max_tokens = config.max_tokens or record.max_tokens
        # Unlike `generate`, serving gives long cases no more tokens than other cases.
        budget = Budget(usual=max_tokens, longest=max_tokens)
        self.question_maker = QuestionMaker(self.task, trained, self.folders.model, budget)
        self.who_answers = "the model"  # in words
        advisor = self.question_maker.advisor
        # Held-out cases decided between classifier and adapter. The base alone was not compared.
        if advisor and config.answer == "auto" and config.adapter != "none":
            choice = served_choice(trained)
            self.who_answers = who_answered(choice)
            self.question_maker.advisor = by_choice(advisor, choice)
        self.demo = is_demo(self.folders.model)
        self._thread_for_long = ThreadPoolExecutor(1)  # for one long case at a time

    async def question(self, case: CaseFields) -> tuple[Example, Question]:
        """Return a case and its question; raise BadCase if it cannot be asked.

        Slow work runs in threads; the text classifier looks at all waiting cases together. Cases
        longer than `LONG` go one by one through a single thread, which also asks the classifier.
        """
        maker = self.question_maker
        try:
            example = self._make_example(case.fact, case.defendants)
            if len(case.fact) > LONG:
                loop = asyncio.get_running_loop()
                making = loop.run_in_executor(self._thread_for_long, self._long_question, example)
                return example, await making
            opinions = await maker.opinions(example)
            question = await asyncio.to_thread(maker.question, example, opinions=opinions)
            return example, question
        except UserError as error:
            raise BadCase(str(error)) from None
        except Refusal as refusal:
            raise BadCase(f"this case cannot be asked: {refusal}") from None

    def _long_question(self, example: Example) -> Question:
        """Return the question of a long case; refuse it early if no shortening is enough."""
        self.question_maker.refuse_hopeless(example)
        return self.question_maker.question(example)

    async def answer(
        self,
        engine: Engine,
        case: CaseFields,
        example: Example,
        question: Question,
        on_text: OnText | None = None,
    ) -> dict[str, Any]:
        """Return the body of `POST /v1/judgments`; raise UserError if the engine has failed.

        `on_text` receives each new piece of the reply.
        """
        advisor = self.question_maker.advisor
        # The model's log-probabilities take time, so only those that count are asked for.
        fields = self.task.answer if advisor and advisor.needs_logprobs else LabelFields()
        row = await ask(engine, question, next(NUMBERS), fields, on_text=on_text)
        if "refused" in row:
            raise UserError(row["refused"])
        return await asyncio.to_thread(self._body, case, example, row)

    def _body(self, case: CaseFields, example: Example, row: CompletionRow) -> dict[str, Any]:
        """Return the body for `answer` from the row of the reply."""
        advisor = self.question_maker.advisor
        read = read_answer(self.task, self.question_maker.labels, advisor, example, row)
        submission = self.task.data.write(example, read.answer)
        del submission["id"]  # the task's own id; the case may have none
        body: dict[str, Any] = {} if case.id is None else {"id": case.id}
        body |= {"defendants": list(example.names), **submission, "answer": read.answer}
        if advisor:
            body |= opinion_entries(self.task, advisor, read)
        body["repairs"] = list(read.decoded.repairs)
        body["finish"] = row["finish"][0]
        body["dropped_sentences"] = row["dropped_sentences"]
        sentences = split_sentences(example.text, None, example.names)
        body["sentences"] = [
            {"text": sentence, "defendants": sorted(numbers)}  # whom it names, by position
            for sentence, numbers in zip(sentences, named_by(sentences, example.names), strict=True)
        ]
        missing = names_not_in(example.text, example.names)
        body["notes"] = [*example.notes, *(f"the facts do not name {name}" for name in missing)]
        if case.outcomes is not None:
            body["notes"].append("outcomes: not looked at; the facts alone are judged")
        usage = {name: row[name] for name in ("prompt_tokens", "completion_tokens")}
        body["usage"] = {**usage, "total_tokens": sum(usage.values())}
        return body


def opinion_entries(task: Task, advisor: Advisor, read: FinalAnswer) -> dict[str, Any]:
    """Return who answered each field, how surely, and what model and text classifier said."""
    answered_by = {
        name: "classifier" if name in advisor.answers else "model" for name in task.answer.fields
    }
    return {
        "answered_by": answered_by,
        "confidence": read.confidence,
        "model": list(said_by_model(task, read.decoded)),
        "classifier": [opinion.answer for opinion in read.opinions],
        "probabilities": list(class_probabilities(task, read)),
    }


def class_probabilities(task: Task, read: FinalAnswer) -> Iterator[dict[str, dict[str, float]]]:
    """Yield for each item: field with one class -> class -> its probability.

    The class that was answered gets the confidence in the answer as its probability. The text
    classifier's probabilities of the other classes are scaled so that all sum to 1.
    """
    items = task.answer.items_of(read.answer)
    for item, opinion, confidence in zip(items, read.opinions, read.confidence, strict=True):
        yield {
            name: agreeing(opinion.probabilities[name], item[name], confidence[name])
            for name in task.answer.classes
        }


def said_by_model(task: Task, decoded: Decoded) -> Iterator[dict[str, Any]]:
    """Yield the fields of each item in the reply; None for a field that it lacks."""
    for number, item in enumerate(task.answer.items_of(decoded.answer)):
        yield {
            name: None if decoded.is_fallback(number, name) else item[name]
            for name in task.answer.fields
        }


def agreeing(chances: Mapping[str, float], answered: str, confidence: float) -> dict[str, float]:
    """Return the classifier's probabilities, changed so that `answered` has this confidence.

    The confidence is calibrated. The other classes share the rest in proportion to `chances`.
    """
    others = {label: chance for label, chance in chances.items() if label != answered}
    left = (1 - confidence) / (sum(others.values()) or 1)
    scaled = {label: chance * left for label, chance in others.items()}
    return {label: scaled.get(label, confidence) for label in dict.fromkeys([*chances, answered])}


def served_choice(trained: Trained) -> Choice:
    """Return who answers each field: the newest choice made from replies under a schema."""
    for choice in reversed(trained.choices):
        if choice.asked["constrained"]:
            return choice
    raise UserError(
        f"{trained.run}: nobody has decided who answers, the model or the text classifier; "
        f"`panjue generate {trained.run} TEST` has held-out cases decide, or say answer=model"
    )


@dataclass
class Judge:
    """Judges cases with an engine in the event loop of a portal; `load` makes it."""

    run: ServedRun
    engine: Engine | None
    in_flight: int
    portal: BlockingPortal

    def __call__(self, fact: str, defendants: Sequence[str]) -> dict[str, Any]:
        """Return the judgments of one case, like `POST /v1/judgments`."""
        return self._submit({"fact": fact, "defendants": list(defendants)}).result()

    def many(self, cases: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the judgments of cases in order; the engine answers many at once.

        A case has the fields of `CaseFields`. After an error, no further case is answered.
        """
        waiting: deque[Future[dict[str, Any]]] = deque()
        try:
            for case in cases:
                waiting.append(self._submit(case))
                # Twice as many as run at once: the engine stays busy while the first one is slow.
                if len(waiting) == 2 * self.in_flight:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

    def _submit(self, fields: Mapping[str, Any]) -> Future[dict[str, Any]]:
        """Begin to answer a case in the portal's event loop; the future gets its judgments."""
        if self.engine is None:
            raise UserError("the engine has stopped; call judge within the `with` block")
        case = checked_case(CaseFields, fields)
        return self.portal.start_task_soon(self._answer, self.engine, case)

    async def _answer(self, engine: Engine, case: CaseFields) -> dict[str, Any]:
        example, question = await self.run.question(case)
        return await self.run.answer(engine, case, example, question)


@contextmanager
def load(run: Path | str, settings: Mapping[str, Any] | None = None) -> Iterator[Judge]:
    """Start the engine of a run, and stop it at the end of the block.

    `settings` are settings of `ServeConfig`, which replace those in `run`/config.yaml.
    """
    words = [f"{key}={dump(value)}" for key, value in (settings or {}).items()]
    config, runs = serve_settings(Path(run), words)
    check_gpu(answering=True)
    check_engine(config.engine)
    served = ServedRun(runs[NAME], config)
    running = running_engine(
        served.folders, config.engine, served.question_maker.budget, config.seed
    )
    # In its own thread, because this one already runs an event loop in a notebook.
    with start_blocking_portal() as portal:
        with portal.wrap_async_context_manager(running) as engine:
            judge = Judge(served, engine, config.slots(engine.sequences), portal)
            try:
                yield judge
            finally:
                judge.engine = None  # vLLM's engine complains if it lives until Python exits
        portal.call(portal.stop, True)  # otherwise it would wait for requests that nobody awaits
