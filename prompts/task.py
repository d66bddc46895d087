"""What a task is, and how one is found by name."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from panjue.prompts import tasks
from panjue.prompts.example import Answer, Decoded, Example, Solving, drive, groups_of, once
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.config import SolveSettings, first_complaint
from panjue.prompts.plumbing.decode import after_thinking, load_json
from panjue.prompts.plumbing.errors import BadRow, UserError, did_you_mean
from panjue.prompts.plumbing.files import Record, case_lines
from panjue.prompts.plumbing.handin import JSON_LINES, HandIn
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


def stop(bad: BadRow) -> None:
    """Let a bad row end the work."""
    raise bad


def no_labels(_examples: Iterable[Example]) -> Labels:
    """Collect nothing: the task has no label sets."""
    return Labels()


def no_faults(_example: Example, _row: Mapping[str, Any], _labels: Labels | None) -> Iterator[str]:
    """Find nothing wrong with a submission row beyond its id."""
    return iter(())


def no_peers(_example: Example) -> Iterator[tuple[str, Row, Row]]:
    """Yield nothing: the fallback is the only peer."""
    return iter(())


def one(_example: Example) -> float:
    """Weigh every example alike."""
    return 1.0


def every(_example: Example) -> bool:
    """Leave out no example."""
    return True


@dataclass(frozen=True)
class Decides:
    """How an answer is decided from what several samples and their probabilities say.

    Attributes:
        items: The key under which the answer lists its items.
        sets: Fields of an item that are label sets, decided by expected F1. Where there are two,
            `Labels.pairs` says which labels of theirs go together.
        classes: Fields of an item with one label, decided by probability.
        order: Field -> its labels in their own order; where the hand-in has numbers, these count
            through them.
    """

    items: str
    sets: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    order: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def fields(self) -> tuple[str, ...]:
        """Return all fields that are decided."""
        return (*self.sets, *self.classes)


@dataclass(frozen=True)
class Ranks:
    """An answer is a list, best first, and several samples are ranked by their votes.

    Attributes:
        field: The key of the list in the answer, and of its labels, which fill it up.
        most: How long it is.
    """

    field: str
    most: int


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


@dataclass(frozen=True)
class Task:
    """One question we put to the model. Its folder's name is the task's name everywhere.

    Attributes:
        from_row: One row of a cases file -> its example; a UserError says what is wrong with it.
        prompt: Example -> chat messages, from `tasks/<task>/prompt.md`.
        schema: Example, labels -> JSON Schema of exactly this example's reply.
        target: Example -> the gold reply, compact JSON, always valid under the schema.
        decode: Reply, example, labels -> answer. Never raises. What it makes of an empty reply
            is the task's fallback, and the first peer that a score is printed beside. A think
            block is dropped before.
        submission: Example, answer -> one row of the official hand-in, with its `id`.
        metrics: What its answers are scored by; see `tasks/metrics.py`. The last is the headline.
        rows: A cases file -> its rows; by default one JSON object a line.
        handin: The form of the submission file.
        labels: Training examples -> the label sets.
        faults: Example, submission row, labels if known -> what the contest would refuse.
        weight: Example -> its weight in the mean over examples.
        decides: What of an answer may be decided from several samples; None echoes the first.
        ranks: What of an answer is a ranked list, to be filled up and voted on.
        fallback: What the fallback is called.
        languages: Of its texts, as ISO 639-1 has them.
        slack: Tokens kept free for a reply beyond one and a half times the fallback's, or what
            tells them of an example.
        peers: Example -> (name, gold row, row) of what is trivially reached, or by people.
        reported: Numbers that stand beside the metrics in the scores file: name -> (attribute of
            groups, or `peers`; which of them; metric).
        by_hand: Text and names as somebody types them -> example; None where nobody does.
        classes: A gold or submission row -> the classes that it names, for reports by class.
        order: Field -> its values as reports have them in order, penalties from the gravest on;
            `class` for what `classes` names.
        shown: What a report shows of a gold row and a submission row, where that is neither what
            is decided nor a class.
        solve: Example, settings -> the way to its answer, where that takes several calls.
        right: Example with its gold answer -> what answers each question of `solve` as a perfect
            model would: question -> question with its answer.
        settings: How `solve` goes about it; None for tasks of one call.
        compared_by: What the metrics compare texts by, for their tables; None: they compare none.
        by_meaning: Names of what gives cosines and of a judge -> `metrics`, `shown` and
            `compared_by` with these; None where no texts are compared.
        side: Id -> further groups of an example; see `reader.beside`.
        only: Which examples of a file are read: all, unless a run asked fewer.
        bad: What becomes of a row that is no example; see `prompts/reader.py`.
    """

    from_row: Callable[[Mapping[str, Any]], Example]
    prompt: Callable[[Example], Messages]
    schema: Callable[[Example, Labels], Schema]
    target: Callable[[Example], str]
    decode: Callable[[str, Example, Labels], Decoded]
    submission: Callable[[Example, Answer], dict[str, Any]]
    metrics: tuple[Metric, ...]
    rows: Callable[[Path], Iterator[Record]] = case_lines
    handin: HandIn = JSON_LINES
    labels: Callable[[Iterable[Example]], Labels] = no_labels
    faults: Callable[[Example, Row, Labels | None], Iterator[str]] = no_faults
    weight: Callable[[Example], float] = one
    decides: Decides | None = None
    ranks: Ranks | None = None
    fallback: str = "commonest labels"
    languages: tuple[str, ...] = ("zh",)
    slack: int | Callable[[Example], int] = 64
    peers: Callable[[Example], Iterator[tuple[str, Row, Row]]] = no_peers
    reported: Mapping[str, tuple[str, str, str]] = field(default_factory=dict)
    by_hand: Callable[[str, Sequence[str]], Example] | None = None
    classes: Callable[[Row], Iterable[str]] | None = None
    order: Mapping[str, Sequence[str]] = field(default_factory=dict)
    shown: Callable[[Row, Row | None], Iterator[Item]] | None = None
    solve: Callable[[Example, Any], Solving] | None = None
    right: Callable[[Example], Callable[[Example], Example]] | None = None
    settings: SolveSettings | None = None
    compared_by: str | None = None
    by_meaning: Callable[[str, str], Mapping[str, Any]] | None = None
    side: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    only: Callable[[Example], bool] = every
    bad: Callable[[BadRow], None] = stop

    def __post_init__(self) -> None:
        """Make every task, a new one too, read replies without their think block."""
        if not isinstance(self.decode, AfterThinking):
            object.__setattr__(self, "decode", AfterThinking(self.decode))

    @property
    def scores(self) -> tuple[str, ...]:
        """Return what the metrics are called."""
        return tuple(map(name_of, self.metrics))

    def solving(self, example: Example) -> Solving:
        """Begin on the way to an example's answer."""
        return self.solve(example, self.settings) if self.solve else once(example)

    def taught(self, example: Example) -> Iterator[Example]:
        """Yield the questions of a perfect run, with their answers: what a model is trained on.

        They come out of the very `solve` that is used later, so that training sees what use sees.
        """
        if not (self.solve and self.right):
            yield example
            return
        answer, asked = self.right(example), []

        def reply(_number: int, question: Example) -> Decoded:
            asked.append(answer(question))
            assert asked[-1].answer is not None
            return Decoded(asked[-1].answer)

        drive(self.solving(example), reply)
        yield from asked

    def gold(self, example: Example) -> Row:
        """Return what a submission row of a labelled example is scored against."""
        if example.references:
            return {"id": example.id, "references": example.references}
        assert example.answer is not None, "a test case has no gold row"
        return self.submission(example, example.answer)

    def read(self, path: Path) -> Iterator[Example]:
        """Yield the examples of a file; a row that is none, or whose id came before, is `bad`.

        Raises:
            UserError: The file cannot be read; or a row is bad, as `bad` will have it.
        """
        first: dict[str, int | str] = {}
        for place, load in self.rows(path):
            try:
                row = load()
                example = self.from_row(row)
                groups = {**example.groups, **self._groups(example, row)}
                before = first.setdefault(str(example.id), place)
                if before != place:
                    raise UserError(f"id {example.id} stands already at {before}")
            except UserError as error:
                self.bad(BadRow(path, place, str(error)))
                continue
            if self.only(example):
                yield replace(example, groups=groups)

    def _groups(self, example: Example, row: Mapping[str, Any]) -> dict[str, str]:
        """Return groups beside those the task reads: of the row's `groups`, of the side file."""
        return {**groups_of(row.get("groups") or {}), **self.side.get(str(example.id), {})}


def configured(task: Task, given: Mapping[str, Any], folder: Path | None = None) -> Task:
    """Return the task as it solves under these settings.

    Args:
        task: Any task.
        given: Settings of `solve`; what is left out has its default.
        folder: Of the run, where the settings keep what is dear to find again.

    Raises:
        UserError: There is no such setting, or the task takes one call.
    """
    if task.settings is None:
        if given:
            raise UserError("solve: this task takes one call, there is nothing to set")
        return task
    try:
        settings = type(task.settings).model_validate(dict(given))
        return replace(task, settings=settings.in_folder(folder))
    except ValidationError as error:
        raise UserError(f"solve: {first_complaint(type(task.settings), error)}") from None


def comparing(task: Task, embeddings: str, judge: str) -> Task:
    """Return the task as its metrics compare texts by these.

    Raises:
        UserError: A name means nothing, or the task compares no texts.
    """
    if (embeddings, judge) == BUILT_IN:
        return task
    if task.by_meaning is None:
        raise UserError("--embeddings, --judge: the metrics of this task compare no texts")
    return replace(task, **task.by_meaning(embeddings, judge))


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
