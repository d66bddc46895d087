"""The definition of a task, and how to load one by name.

A field of an answer is closed if the code of the task lists all its labels (`LabelFields.order`),
and open if they come from the training file. A task whose answer takes several calls of
the model has `solve`, with settings of the user.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from panjue.prompts import tasks
from panjue.prompts.example import (
    Answer,
    Decoded,
    Example,
    LabelFields,
    Ranking,
    Solve,
    Solving,
    once,
)
from panjue.prompts.labels import Labels, collect
from panjue.prompts.plumbing.config import first_complaint
from panjue.prompts.plumbing.decode import after_thinking, load_json, visible
from panjue.prompts.plumbing.errors import UserError, did_you_mean
from panjue.prompts.plumbing.files import FileRow, dump
from panjue.prompts.plumbing.rows import case_rows
from panjue.prompts.plumbing.submissions import JSON_LINES, SubmissionFormat
from panjue.prompts.tasks.metrics import Item, Metric, Row, name_of

Messages = list[dict[str, str]]
Schema = dict[str, Any]


def id_of(row: Mapping[str, Any]) -> int | str:
    """Return the id of a row; UserError: it has none."""
    value = row.get("id")
    if not isinstance(value, int | str) or isinstance(value, bool):
        raise UserError("'id' must be a whole number or a string")
    if not str(value).strip():
        raise UserError("'id' is an empty text")
    return value


def text_of(row: Mapping[str, Any], field: str) -> str:
    """Return a text of a row without invisible characters; refuse an empty one."""
    value = row.get(field)
    text = visible(value) if isinstance(value, str) else ""
    if not text.strip():
        raise UserError(f"{field!r} must be a text that is not empty")
    return text


def closed_object(properties: Mapping[str, Schema]) -> Schema:
    """Return the JSON Schema of an object with all of these properties and no others."""
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }


def no_labels(_examples: Iterable[Example]) -> Labels:
    """Return no labels, for a task whose answers have none."""
    return Labels()


def count_labels(fields: LabelFields, examples: Iterable[Example]) -> Labels:
    """Count the labels of the gold answers in these fields."""
    return collect(_label_sets(fields, examples))


def _label_sets(
    fields: LabelFields, examples: Iterable[Example]
) -> Iterator[Mapping[str, Sequence[str]]]:
    """Yield field -> its labels to be counted, for each gold item (such as a person).

    The field has its name in `Labels`. An empty set counts as `fields.nothing`, if the task has it.
    """
    of_empty_set = [fields.nothing] if fields.nothing else []
    for example in examples:
        for item in fields.items_of(example.answer) if example.answer else ():
            found: dict[str, Sequence[str]] = {}
            for name in fields.fields:
                labels = item[name] if name in fields.sets else [item[name]]
                found[fields.kind(name)] = labels or of_empty_set
            yield found


def yield_nothing(*_: object) -> Iterator[Any]:
    """Return an empty iterator: the default of a function that yields."""
    return iter(())


def answer_as_json(example: Example) -> str:
    """Return the gold answer in compact JSON."""
    assert example.answer is not None, "a test example has no target"
    return dump(example.answer)


@dataclass(frozen=True)
class Data:
    """The files of a task: how to read cases, and how to write a submission."""

    read: Callable[[Mapping[str, Any]], Example]  # UserError: a bad row
    write: Callable[[Example, Answer], dict[str, Any]]  # returns a row of the official submission
    rows: Callable[[Path], Iterator[FileRow]] = case_rows
    numbered: bool = False
    """Whether rows may have no `id`; it is then the number of the line or row."""
    submission: SubmissionFormat = JSON_LINES
    check: Callable[[Example, Row, Labels | None], Iterator[str]] = yield_nothing
    """Returns the faults of a submission row that the contest would reject."""
    by_hand: Callable[[str, Sequence[str]], Example] | None = None  # typed text, names


@dataclass(frozen=True)
class Ask:
    """What the model is asked, and how its reply becomes an answer."""

    prompt: Callable[[Example], Messages]
    schema: Callable[[Example, Labels], Schema]
    """Returns the JSON Schema of the reply to an example."""
    decode: Callable[[str, Example, Labels], Decoded]
    """Decodes a reply, and never raises. Think blocks are dropped before. The answer to an empty
    reply consists of fallbacks; it is the task's first baseline."""
    target: Callable[[Example], str] = answer_as_json
    """Returns the gold reply in compact JSON, always valid under the schema."""
    labels: Callable[[Iterable[Example]], Labels] = no_labels
    """Collects the labels of the training examples; by default those of `Task.answer`."""
    doubts: Callable[[Labels], Iterator[str]] = yield_nothing
    """Yields lines on what is odd about the labels of a whole training file."""
    reserve: int | Callable[[Example], int] = 64
    """Tokens to keep free for a reply, beyond 1.5 times the tokens of the answer to an empty
    reply; or a function that returns them."""

    def __post_init__(self) -> None:
        """Drop think blocks before the task's `decode`, so that no task has to do it."""
        object.__setattr__(self, "decode", partial(_decode_answer, self.decode))


def _decode_answer(
    decode: Callable[[str, Example, Labels], Decoded], reply: str, example: Example, labels: Labels
) -> Decoded:
    """Decode a reply without its think block, and report that as a repair if there is no other."""
    # If a reply is JSON, text that looks like a think block is part of a string.
    rest = reply if load_json(reply) is not None else after_thinking(reply)
    decoded = decode(rest, example, labels)
    if rest == reply or decoded.repairs:
        return decoded
    return replace(decoded, repairs=("think block dropped",))


@dataclass(frozen=True)
class Score:
    """How answers are scored and shown."""

    metrics: tuple[Metric, ...]  # the last one is the headline metric
    weight: Callable[[Example], float] = lambda _: 1.0
    fallback: str = "commonest labels"  # name of the fallback in reports
    baselines: Callable[[Example], Iterator[tuple[str, Row, Row]]] = yield_nothing
    """Yields name, gold row and row of trivial or human answers."""
    classes: Callable[[Row], Iterable[str]] | None = None
    """Returns the classes of a gold or submission row, for reports by class."""
    order: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Field -> order of its values in reports; the key `class` is for values of `classes`."""
    readable: Mapping[str, Callable[[str], str]] = field(default_factory=dict)
    """Decided field -> function that makes a label readable, if labels are not."""
    needs: Callable[[Row], bool] | None = None
    """Says whether a row has an answer. It is set if the contest only scores files with exactly one
    row and an answer for each example."""
    ranked_over: tuple[str, Sequence[str]] | None = None
    """Attribute and its groups, if the contest ranks by the mean of the groups' scores."""
    shown: Callable[[Row, Row | None], Iterator[Item]] | None = None
    """Yields the fields that a report shows; None for the decided fields or the classes."""
    titles: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Metric, field, baseline or `gold` -> its name on the report page, in English and Chinese."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Decided field -> the metric of this field alone, if it is not the headline metric."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Metric -> its weight, if the headline metric is a weighted sum of metrics."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(map(name_of, self.metrics))

    @property
    def headline(self) -> str:
        """Return the name of the headline metric."""
        return self.names[-1]

    def metric_of(self, name: str) -> str:
        """Return the metric of one field alone, by which model and text classifier are compared."""
        return self.fields.get(name, self.headline)


@dataclass(frozen=True)
class Task:
    """A task for the model. The name of its folder is its name everywhere."""

    data: Data
    ask: Ask
    score: Score
    answer: LabelFields = field(default_factory=LabelFields)
    ranking: Ranking | None = None  # if the answer is a ranked list
    solve: Solve | None = None  # if the answer takes several calls

    def __post_init__(self) -> None:
        """Let the labels of its fields be counted, unless the task has its own way of counting."""
        if self.answer.fields and self.ask.labels is no_labels:
            object.__setattr__(self.ask, "labels", partial(count_labels, self.answer))

    def gold(self, example: Example) -> Row:
        """Return the gold row of an example: in the form of a submission, or its references."""
        if example.references:
            return {"id": example.id, "references": example.references}
        assert example.answer is not None, "a test case has no gold row"
        return self.data.write(example, example.answer)

    def as_gold(self, row: Row) -> Row:
        """Return the row of an answer so that the task's metrics can read it as a gold row.

        Metrics of some tasks compare with `references`, which only gold rows have. Here they find
        an empty one. Such a row is used to check or show an answer without gold.
        """
        return {**row, "references": [[""]]}

    @property
    def open_fields(self) -> list[str]:
        """Return the fields whose labels come from the training file, not from the task's code."""
        return [name for name in self.answer.fields if name not in self.answer.order]

    @property
    def closed_labels(self) -> Labels | None:
        """Return the labels that the code of the task lists, each with the count 0.

        Return empty labels if the task's answers have none, and None if labels have to be collected
        from a training file.
        """
        if self.ask.labels is no_labels:
            return Labels()
        # Without `fields`, the task collects labels in its own way (`Ask.labels`).
        if self.open_fields or not self.answer.fields:
            return None
        counts = {}
        most = {}  # as in `Labels`: the largest number of labels in an answer
        for name in self.answer.fields:
            labels = list(self.answer.order[name])
            is_set = name in self.answer.sets
            most[self.answer.kind(name)] = len(labels) if is_set else 1
            if is_set and self.answer.nothing:
                # The label of an empty set is the first, so that it counts as the commonest.
                labels.insert(0, self.answer.nothing)
            counts[self.answer.kind(name)] = dict.fromkeys(labels, 0)
        return Labels(counts, most)

    def solving(self, example: Example) -> Solving:
        """Return the steps to the answer: a call of the model, or those of the task's `solve`."""
        if self.solve is None:
            return once(example)
        return self.solve.steps(example, self.solve.settings)

    def training_examples(self, example: Example) -> Iterator[Example]:
        """Return the training examples: the questions of a perfect run with their answers."""
        if self.solve is None:
            return iter((example,))
        return self.solve.training_examples(example)


def configured(task: Task, given: Mapping[str, Any]) -> Task:
    """Return the task with these settings of `Task.solve`; others keep their defaults."""
    if task.solve is None:
        if given:
            raise UserError("solve: this task takes one call and has no settings")
        return task
    settings_class = type(task.solve.settings)
    try:
        settings = settings_class.model_validate(dict(given))
    except ValidationError as error:
        raise UserError(f"solve: {first_complaint(error, settings_class.model_fields)}") from None
    return replace(task, solve=replace(task.solve, settings=settings))


def task_folders() -> dict[str, Path]:
    """Return the name of each task -> its folder."""
    files: list[Path] = []
    for root in tasks.__path__:
        files += Path(root).glob("*/task.py")
    return {file.parent.name: file.parent for file in sorted(files)}


def folders_with(data: Data) -> list[Path]:
    """Return the folder of the task with this `data`, where its sample file is.

    There may be several folders, since tasks can share their data.
    """
    return [folder for name, folder in task_folders().items() if load_task(name).data is data]


def load_task(name: str, solve: Mapping[str, Any] = MappingProxyType({})) -> Task:
    """Return the task of the folder `name`, with the user's settings for it in `solve`."""
    names = list(task_folders())
    if name not in names:
        known = ", ".join(names)
        raise UserError(f"no task {name!r} in prompts/tasks/ ({known}){did_you_mean(name, names)}")
    module = import_module(f"{tasks.__name__}.{name}.task")
    task = getattr(module, "TASK", None)
    if not isinstance(task, Task):
        raise UserError(f"{module.__file__}: has no TASK = Task(…)")
    return configured(task, solve)
