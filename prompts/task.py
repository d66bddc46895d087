"""What a task is, and how one is found by name."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from panjue.prompts import tasks
from panjue.prompts.example import Answer, Decoded, Example, First, Solve
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.config import first_complaint
from panjue.prompts.plumbing.decode import after_thinking, load_json
from panjue.prompts.plumbing.errors import UserError, did_you_mean
from panjue.prompts.plumbing.files import Record, case_lines, dump
from panjue.prompts.plumbing.submissions import JSON_LINES, SubmissionFormat
from panjue.prompts.tasks.metrics import Item, Metric, Row, name_of

Messages = list[dict[str, str]]
Schema = dict[str, Any]

BUILT_IN = ("ngrams", "agree")
"""What compares texts where nothing else is said: it needs no model."""


def id_of(row: Mapping[str, Any]) -> int | str:
    """Return a row's id.

    Raises:
        UserError: There is none, or it is neither a number nor a string.
    """
    found = row.get("id")
    if not isinstance(found, int | str) or isinstance(found, bool):
        raise UserError("'id' must be a number or a string")
    return found


def text_of(row: Mapping[str, Any], field: str) -> str:
    """Return the text of a field.

    Raises:
        UserError: It is missing, empty, or no text.
    """
    found = row.get(field)
    if not isinstance(found, str) or not found.strip():
        raise UserError(f"{field!r} must be a text that is not empty")
    return found


def no_labels(_examples: Iterable[Example]) -> Labels:
    """Collect nothing: the task has no label sets."""
    return Labels()


def no_faults(_example: Example, _row: Row, _labels: Labels | None) -> Iterator[str]:
    """Find nothing wrong with a submission row beyond its id."""
    return iter(())


def no_baselines(_example: Example) -> Iterator[tuple[str, Row, Row]]:
    """Yield nothing: the fallback is the only baseline."""
    return iter(())


def unit_weight(_example: Example) -> float:
    """Weigh every example alike."""
    return 1.0


def answer_as_json(example: Example) -> str:
    """Return the gold answer as compact JSON."""
    assert example.answer is not None, "a test example has no target"
    return dump(example.answer)


@dataclass(frozen=True)
class Data:
    """The files of a task: cases in, a submission out.

    Attributes:
        read: One row of a cases file -> its example; a UserError says what is wrong with it.
        write: Example, answer -> one row of the official submission, with its `id`.
        rows: A cases file -> its rows; by default one JSON object a line.
        submission: The form of the submission file.
        check: Example, submission row, labels if known -> what the contest would refuse.
        by_hand: Text and names as somebody types them -> example; None where nobody does.
        languages: Of the texts, as ISO 639-1 has them.
    """

    read: Callable[[Mapping[str, Any]], Example]
    write: Callable[[Example, Answer], dict[str, Any]]
    rows: Callable[[Path], Iterator[Record]] = case_lines
    submission: SubmissionFormat = JSON_LINES
    check: Callable[[Example, Row, Labels | None], Iterator[str]] = no_faults
    by_hand: Callable[[str, Sequence[str]], Example] | None = None
    languages: tuple[str, ...] = ("zh",)


@dataclass(frozen=True)
class Ask:
    """What the model is asked, and how its reply becomes an answer.

    Attributes:
        prompt: Example -> chat messages, from `tasks/<task>/prompt.md`.
        schema: Example, labels -> JSON Schema of exactly this example's reply.
        decode: Reply, example, labels -> answer. Never raises. What it makes of an empty reply
            is the task's fallback, and the first baseline that a score is printed beside. A think
            block is dropped before.
        target: Example -> the gold reply, compact JSON, always valid under the schema.
        labels: Training examples -> the label sets.
        reserve: Tokens kept free for a reply beyond one and a half times the fallback's, or a
            function of the example that returns them.
    """

    prompt: Callable[[Example], Messages]
    schema: Callable[[Example, Labels], Schema]
    decode: Callable[[str, Example, Labels], Decoded]
    target: Callable[[Example], str] = answer_as_json
    labels: Callable[[Iterable[Example]], Labels] = no_labels
    reserve: int | Callable[[Example], int] = 64

    def __post_init__(self) -> None:
        """Make every task, a new one too, read replies without their think block."""
        if not isinstance(self.decode, AfterThinking):
            object.__setattr__(self, "decode", AfterThinking(self.decode))


@dataclass(frozen=True)
class Score:
    """How answers are scored and reported.

    Attributes:
        metrics: See `tasks/metrics.py`. The last is the headline.
        weight: Example -> its weight in the mean over examples.
        fallback: What the fallback is called.
        baselines: Example -> (name, gold row, row) of what is trivially reached, or by people.
        reported: Numbers that stand beside the metrics in the scores file: name -> (attribute of
            groups, or `baselines`; which of them; metric).
        classes: A gold or submission row -> the classes that it names, for reports by class.
        order: Field -> its values as reports have them in order, penalties from the gravest on;
            `class` for what `classes` names.
        shown: What a report shows of a gold row and a submission row, where that is neither what
            is decided nor a class.
        compared_by: What the metrics compare texts by, for their tables; None: they compare none.
        by_meaning: Names of what gives cosines and of a judge -> `metrics`, `shown` and
            `compared_by` with these; None where no texts are compared.
    """

    metrics: tuple[Metric, ...]
    weight: Callable[[Example], float] = unit_weight
    fallback: str = "commonest labels"
    baselines: Callable[[Example], Iterator[tuple[str, Row, Row]]] = no_baselines
    reported: Mapping[str, tuple[str, str, str]] = field(default_factory=dict)
    classes: Callable[[Row], Iterable[str]] | None = None
    order: Mapping[str, Sequence[str]] = field(default_factory=dict)
    shown: Callable[[Row, Row | None], Iterator[Item]] | None = None
    compared_by: str | None = None
    by_meaning: Callable[[str, str], Mapping[str, Any]] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Return what the metrics are called."""
        return tuple(map(name_of, self.metrics))


@dataclass(frozen=True)
class Task:
    """One question we put to the model. Its folder's name is the task's name everywhere.

    Six fields are needed: `Data(read, write)`, `Ask(prompt, schema, decode)`, `Score(metrics)`.
    """

    data: Data
    ask: Ask
    score: Score
    answer: First = field(default_factory=First)
    """How an answer comes about: `First`, `Decide`, `Rank` or `Solve`."""

    def gold(self, example: Example) -> Row:
        """Return what a submission row of a labelled example is scored against."""
        if example.references:
            return {"id": example.id, "references": example.references}
        assert example.answer is not None, "a test case has no gold row"
        return self.data.write(example, example.answer)


@dataclass(frozen=True)
class AfterThinking:
    """How every task reads a reply: what stands before `</think>` is no part of the answer."""

    read: Callable[[str, Example, Labels], Decoded]

    def __call__(self, reply: str, example: Example, labels: Labels) -> Decoded:
        """Read what follows the think block; leaving it out counts as a repair.

        A reply that is JSON as it stands has none: a `</think>` in it belongs to a text.
        """
        rest = after_thinking(reply)
        if rest == reply or load_json(reply) is not None:
            return self.read(reply, example, labels)
        decoded = self.read(rest, example, labels)
        if decoded.repairs:
            return decoded
        return replace(decoded, repairs=("what was thought is left out",))


def configured(task: Task, given: Mapping[str, Any], folder: Path | None = None) -> Task:
    """Return the task as it solves under these settings.

    Args:
        task: Any task.
        given: Settings of `solve`; what is left out has its default.
        folder: Of the run, where the settings keep what is dear to find again.

    Raises:
        UserError: There is no such setting, or the task takes one call.
    """
    if not isinstance(task.answer, Solve):
        if given:
            raise UserError("solve: this task takes one call, there is nothing to set")
        return task
    kind = type(task.answer.settings)
    try:
        settings = kind.model_validate(dict(given)).in_folder(folder)
    except ValidationError as error:
        raise UserError(f"solve: {first_complaint(kind, error)}") from None
    return replace(task, answer=replace(task.answer, settings=settings))


def comparing(task: Task, embeddings: str, judge: str) -> Task:
    """Return the task as its metrics compare texts by these.

    Raises:
        UserError: A name means nothing, or the task compares no texts.
    """
    if (embeddings, judge) == BUILT_IN:
        return task
    if task.score.by_meaning is None:
        raise UserError("--embeddings, --judge: the metrics of this task compare no texts")
    return replace(task, score=replace(task.score, **task.score.by_meaning(embeddings, judge)))


def task_folders() -> dict[str, Path]:
    """Return the name of every task -> its folder."""
    places = (place for root in tasks.__path__ for place in Path(root).glob("*/task.py"))
    return {place.parent.name: place.parent for place in sorted(places)}


def load_task(name: str) -> Task:
    """Return `TASK` from `prompts/tasks/<name>/task.py`.

    Raises:
        UserError: There is no such folder.
    """
    known = list(task_folders())
    if name not in known:
        raise UserError(
            f"no task {name!r} in prompts/tasks/ ({', '.join(known)}){did_you_mean(name, known)}"
        )
    task: Task = import_module(f"{tasks.__name__}.{name}.task").TASK
    return task
