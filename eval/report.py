"""One page on a run: how it scores, where it errs, and every case to look at."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from panjue.eval.answers import Run
from panjue.eval.calibration import of_example
from panjue.eval.score import Scores, score
from panjue.prompts.errors import UserError
from panjue.prompts.files import Rows, dump, read_json, read_lines
from panjue.prompts.fit import names_in, split_sentences
from panjue.prompts.task import Example, Row, Task

CONFUSED = 15
"""Pairs of classes that are shown."""

NOTHING = "-"
"""The told value of an item that is not answered."""


@dataclass(frozen=True)
class Field:
    """One field of an answer, gold and told, as texts in order."""

    name: str
    gold: list[str]
    told: list[str]

    @property
    def is_right(self) -> bool:
        """Say whether both have the same values, in whatever order."""
        return sorted(self.gold) == sorted(self.told)


@dataclass(frozen=True)
class Case:
    """One example as the browser shows it.

    Attributes:
        text: Its parts in order: (sentence, places in `items` of those it names).
        items: (who or what is answered, its fields).
        wrong: Fields that are not right somewhere.
        confidence: Mean over its judgments; None where the run has none.
        reply: The raw replies, one for each call.
    """

    id: str
    groups: Mapping[str, str]
    text: list[tuple[str, list[int]]]
    items: list[tuple[str, list[Field]]]
    classes: list[str]
    wrong: list[str]
    confidence: float | None
    reply: list[str]


@dataclass
class Report:
    """Everything on the page.

    Attributes:
        by_class: Class -> (items that have it in gold, F1 over items).
        confusion: Field -> gold value -> told value -> items; both in the field's own order.
        orders: Field -> its values in order.
        pairs: (gold class that was missed, class told in its place) -> items.
        curve: Rows of the training's log.
        decoding: What decoding met, as decode.json has it.
    """

    name: str
    task: str
    scores: Scores
    cases: list[Case] = field(default_factory=list)
    by_class: dict[str, tuple[int, float]] = field(default_factory=dict)
    confusion: dict[str, Counter[tuple[str, str]]] = field(default_factory=dict)
    orders: dict[str, list[str]] = field(default_factory=dict)
    pairs: list[tuple[str, str, int]] = field(default_factory=list)
    curve: list[dict[str, float]] = field(default_factory=list)
    decoding: Mapping[str, Any] = field(default_factory=dict)


def report(run: Run, gold: Path | None = None) -> Report:
    """Gather the report of a run, on the file it answered unless `gold` is another.

    Raises:
        UserError: The run is not finished, or the cases have no answers to compare with.
    """
    folder = run.folder
    place = run.task.handin.find(folder)
    found = Report(folder.name, str(run.made["task"]), score(run.task, gold or run.test, folder))
    found.cases = list(_cases(run, gold or run.test, run.task.handin.index(place)))
    _count(run.task, found)
    log = run.trained.parent / "log.jsonl" if run.made["trained"] else folder / "log.jsonl"
    if log.exists():
        found.curve = [row for _, row in read_lines(log)]
    decoding = folder / "decode.json"
    found.decoding = read_json(decoding) if decoding.exists() else {}
    return found


def _cases(run: Run, gold: Path, rows: Rows) -> Iterator[Case]:
    place = run.folder / "confidence.jsonl"
    confidences = Rows(place) if place.exists() else None
    replies = _replies(run)
    for example in run.task.read(gold):
        if example.answer is None:
            raise UserError(f"{gold}: id {example.id} has no gold answer; say --gold FILE")
        row = rows.get(example.id)
        sure = confidences.get(example.id) if confidences else None
        right = run.task.gold(example)
        items = list(items_of(run.task, right, row))
        names = [name for name, _ in items]
        yield Case(
            id=str(example.id),
            groups=example.groups,
            text=coloured(example, names),
            items=items,
            classes=list(dict.fromkeys(map(str, run.task.classes(right))))
            if run.task.classes
            else [],
            wrong=sorted({one.name for _, of in items for one in of if not one.is_right}),
            confidence=of_example(sure) if sure else None,
            reply=replies.get(str(example.id), []),
        )


def _replies(run: Run) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for _, row in read_lines(run.folder / "completions.jsonl"):
        found[str(row["id"])].append(row["texts"][0] if "texts" in row else row["refused"])
    return found


def items_of(task: Task, gold: Row, row: Row | None) -> Iterator[tuple[str, list[Field]]]:
    """Yield what is judged, each with its fields: the items of a decided answer, else the row."""
    if task.decides is None:
        keys = [key for key in dict.fromkeys([*gold, *(row or {})]) if key != "id"]
        yield "", [Field(key, _texts(gold.get(key)), _texts((row or {}).get(key))) for key in keys]
        return
    told = {one["name"]: one for one in row[task.decides.items]} if row else {}
    for one in gold[task.decides.items]:
        mine = told.get(one["name"], {})
        yield (
            str(one["name"]),
            [
                Field(name, _named(task, name, one[name]), _named(task, name, mine.get(name)))
                for name in task.decides.fields
            ],
        )


def _named(task: Task, name: str, value: Any) -> list[str]:
    """Return the texts of a value; a number of the hand-in by what it stands for."""
    assert task.decides
    order = task.decides.order.get(name)
    if order and isinstance(value, int) and 0 <= value < len(order):
        return [order[value]]
    return _texts(value)


def _texts(value: Any) -> list[str]:
    if value is None:
        return []
    listed = value if isinstance(value, list | tuple) else [value]
    return [one if isinstance(one, str) else dump(one) for one in listed]


def coloured(example: Example, names: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Return the sentences of a text, each with the places of the `names` that stand in it."""
    places = {name: place for place, name in enumerate(names) if name}
    return [
        (sentence, sorted(places[name] for name in names_in(sentence, list(places))))
        for sentence in split_sentences(example.text)
    ]


def _count(task: Task, found: Report) -> None:
    """Count classes, confusions and confused pairs over the cases."""
    if task.decides is None:
        return
    sets = task.decides.sets[:1]
    right, gold, told = Counter[str](), Counter[str](), Counter[str]()
    pairs = Counter[tuple[str, str]]()
    for fields in (of for case in found.cases for _, of in case.items):
        for one in fields:
            if one.name in sets:
                gold.update(one.gold)
                told.update(one.told)
                right.update(set(one.gold) & set(one.told))
                missed, instead = set(one.gold) - set(one.told), set(one.told) - set(one.gold)
                pairs.update(product(sorted(missed), sorted(instead)))
            elif one.name in task.decides.classes:
                pair = (one.gold[0], one.told[0] if one.told else NOTHING)
                found.confusion.setdefault(one.name, Counter()).update([pair])
    found.by_class = {
        name: (count, 2 * right[name] / (count + told[name])) for name, count in gold.most_common()
    }
    found.pairs = [(a, b, count) for (a, b), count in pairs.most_common(CONFUSED)]
    for name, cells in found.confusion.items():
        met = {value for pair in cells for value in pair}
        order = list(task.decides.order.get(name, ()))
        found.orders[name] = [*order, *sorted(met.difference(order))]


def browsed(case: Case) -> dict[str, Any]:
    """Return a case as the page's script takes it."""
    return {**asdict(case), "items": [[name, [asdict(f) for f in of]] for name, of in case.items]}
