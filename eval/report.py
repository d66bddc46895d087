"""One page on a run: how it scores, where it errs, and every case to look at."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count, product
from typing import Any

from panjue.eval.answers import Run
from panjue.eval.calibration import of_example
from panjue.eval.decide import decision_sha256, is_fitted_on
from panjue.eval.fields import items_of
from panjue.eval.score import Scores, decoding_of, score
from panjue.prompts.example import Decide, Example, Solve, call_key, first_reply
from panjue.prompts.fit import names_in, split_sentences
from panjue.prompts.plumbing.files import read_lines, sha256
from panjue.prompts.plumbing.rows import Rows
from panjue.prompts.task import Task
from panjue.prompts.tasks.metrics import Field, Item

CONFUSED = 15
"""Pairs of classes that are shown."""

NOTHING = "-"
"""The predicted value of an item that is not answered."""


@dataclass(frozen=True)
class Case:
    """One example as the browser shows it.

    Attributes:
        text: Its parts in order: (sentence, places in `items` of those it names).
        classes: Field -> its classes, in gold or predicted: what it is found by.
        wrong: Fields that are not right somewhere.
        confidence: Mean over its judgments; None where the run has none.
        handled: What `fit` and decoding did, in general words, and `notes` exactly.
        reply: The raw replies, one for each call.
    """

    id: str
    groups: Mapping[str, str]
    text: list[tuple[str, list[int]]]
    items: list[Item]
    classes: dict[str, list[str]]
    wrong: list[str]
    confidence: float | None
    handled: list[str]
    notes: list[str]
    reply: list[str]


@dataclass(frozen=True)
class OfClass:
    """How one class fares: items that have it in gold, items it is predicted for, F1."""

    gold: int
    predicted: int
    f1: float


@dataclass
class Report:
    """Everything on the page.

    Attributes:
        classes: Field -> class -> how it fares, in the field's order or the commonest first.
        confusion: Field -> (gold value, predicted value) -> items.
        orders: Field -> the values of its confusion in order.
        pairs: (gold class that was missed, class predicted in its place, items).
        curve: Rows of the training's log.
        decoding: What decoding met, if decode.json is about this very submission.
        tested: On which file, and how it was answered.
        skipped: What was passed over in that file, if anything.
    """

    name: str
    task: str
    scores: Scores
    tested: str = ""
    skipped: list[str] = field(default_factory=list)
    cases: list[Case] = field(default_factory=list)
    classes: dict[str, dict[str, OfClass]] = field(default_factory=dict)
    confusion: dict[str, Counter[tuple[str, str]]] = field(default_factory=dict)
    orders: dict[str, list[str]] = field(default_factory=dict)
    pairs: list[tuple[str, str, int]] = field(default_factory=list)
    pairs_in_all: int = 0
    curve: list[dict[str, float]] = field(default_factory=list)
    decoding: Mapping[str, Any] = field(default_factory=dict)


def report(run: Run) -> Report:
    """Gather the report of a run.

    Raises:
        UserError: The run is not finished, or the cases have no answers to compare with.
    """
    place = run.task.data.submission.find(run.folder)
    found = Report(run.folder.name, str(run.provenance["task"]), score(run.reader, run.test, place))
    found.decoding = decoding_of(place) or {}
    found.tested = _tested(run, found.decoding)
    found.cases = list(
        _cases(run, run.task.data.submission.index(place), decided=bool(found.decoding))
    )
    found.skipped = [str(run.reader.skipped)] if run.reader.skipped.rows else []
    _count(run.task, found)
    log = run.trained.parent / "log.jsonl" if run.is_of_adapter else None
    if log and log.exists():
        found.curve = [row for _, row in read_lines(log)]
    return found


def _tested(run: Run, decoding: Mapping[str, Any]) -> str:
    """Say on which file a run is reported, by its hash, and how it was answered."""
    part = "the held-out tenth of " if run.held_out else ""
    sampled = run.provenance.get("sampling", {}).get("temperature")
    decided, fit = bool(decoding.get("decided")), decoding.get("decision_sha256")
    how = "decided from several replies" if decided else "sampled" if sampled else "greedy"
    if fit and fit == decision_sha256(run.trained) and is_fitted_on(run.trained, run.provenance):
        how += " in the way that was fitted to these very examples"
    return f"{part}{run.test.name} (SHA-256 {sha256(run.test)}), {how}"


def _calls(completions: Rows, example: Example) -> Iterator[dict[str, Any]]:
    """Yield the rows of an example: its only one, or those of its calls in their order."""
    if only := completions.get(call_key({"id": example.id})):
        yield only
        return
    for call in count():
        if (row := completions.get(call_key({"id": example.id, "call": call}))) is None:
            return
        yield row


def _cases(run: Run, rows: Rows, *, decided: bool) -> Iterator[Case]:
    place = run.folder / "confidence.jsonl"
    confidences = Rows(place) if decided and place.exists() else None
    completions = run.rows()
    names = [name for of in _fields_of_classes(run.task) for name in of]
    for example in run.examples():
        answered = list(_calls(completions, example))
        row, sure = rows.get(example.id), confidences.get(example.id) if confidences else None
        items = list(items_of(run.task, run.task.gold(example), row))
        fields = [one for _, of in items for one in of]
        notes = dict(_handled(run, example, answered, decided=decided))
        yield Case(
            id=str(example.id),
            groups=example.groups,
            text=marked(example, [name for name, _ in items]),
            items=items,
            classes={name: _values(one for one in fields if one.name == name) for name in names},
            wrong=sorted({one.name for one in fields if not one.right}),
            confidence=of_example(sure) if sure else None,
            handled=list(notes),
            notes=list(notes.values()),
            reply=[row.get("refused") or first_reply(row) for row in answered],
        )


def _values(fields: Iterator[Field]) -> list[str]:
    return list(dict.fromkeys(value for one in fields for value in (*one.gold, *one.told)))


def _handled(
    run: Run, example: Example, rows: Sequence[dict[str, Any]], *, decided: bool
) -> Iterator[tuple[str, str]]:
    """Yield what happened to an example's calls: in a word, and exactly."""
    refusals = [str(row["refused"]) for row in rows if row.get("refused") is not None]
    asked = [row for row in rows if row.get("refused") is None]
    if refusals:
        yield "not asked", f"could not be asked: {refusals[0]}"
    if dropped := sum(row["dropped_sentences"] for row in asked):
        yield "shortened", f"shortened to fit by {dropped} sentences"
    if cut := sum(row["finish"][0] == "length" for row in asked):
        yield "cut", f"{cut} replies cut by length"
    if asked and decided and not isinstance(run.task.answer, Solve):
        decoded = run.task.ask.decode(first_reply(asked[0]), example, run.labels)
        if not decoded.readable:
            yield "unreadable", f"the reply was unreadable, its answer: {run.task.score.fallback}"
        elif decoded.repairs:
            yield "repaired", "repaired: " + "; ".join(decoded.repairs)


def marked(example: Example, names: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Return the sentences of a text, each with the places of the `names` that stand in it."""
    places = {name: place for place, name in enumerate(names) if name}
    return [
        (sentence, sorted(places[name] for name in names_in(sentence, list(places))))
        for sentence in split_sentences(example.text)
    ]


def _count(task: Task, found: Report) -> None:
    """Count classes, confusions and confused pairs over the cases."""
    sets, single = _fields_of_classes(task)
    fields = [one for case in found.cases for _, of in case.items for one in of]
    if not task.answer.fields and all(len(one.gold) == 1 >= len(one.told) for one in fields):
        single = sets
    gold, told, right = (defaultdict[str, Counter[str]](Counter) for _ in range(3))
    pairs = Counter[tuple[str, str]]()
    for one in fields:
        if one.name in (*sets, *single):
            gold[one.name].update(one.gold)
            told[one.name].update(one.told)
            right[one.name].update(set(one.gold) & set(one.told))
        if one.name in sets[:1]:
            missed, instead = set(one.gold) - set(one.told), set(one.told) - set(one.gold)
            pairs.update(product(sorted(missed), sorted(instead)))
        if one.name in single:
            pair = (one.gold[0], one.told[0] if one.told else NOTHING)
            found.confusion.setdefault(one.name, Counter()).update([pair])
    found.pairs = [(a, b, count) for (a, b), count in pairs.most_common(CONFUSED)]
    found.pairs_in_all = len(pairs)
    for name in gold:
        met = Counter(gold[name]) + told[name]
        order = [one for one in task.score.order.get(name, ()) if one in met]
        order += [one for one, _ in met.most_common() if one not in order]
        found.classes[name] = {
            one: OfClass(gold[name][one], told[name][one], 2 * right[name][one] / met[one])
            for one in order
        }
        is_unanswered = any(pair[1] == NOTHING for pair in found.confusion.get(name, ()))
        found.orders[name] = [*order, NOTHING] if is_unanswered else order


def _fields_of_classes(task: Task) -> tuple[Sequence[str], Sequence[str]]:
    """Return the fields that are sets of classes, and those that are known to have one each."""
    if isinstance(task.answer, Decide):
        return task.answer.sets, task.answer.classes
    return (("class",) if task.score.classes else ()), ()


def browsed(case: Case) -> dict[str, Any]:
    """Return a case as the page's script takes it."""
    return {**asdict(case), "items": [[name, [asdict(f) for f in of]] for name, of in case.items]}
