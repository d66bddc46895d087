"""The report of a run as one HTML page: scores, errors by class, and every case."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, count, product
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from panjue.eval.agreement import AGREEMENTS, NO_REPLY, WITHOUT_GOLD, compared_opinions
from panjue.eval.answers import AnsweredFile, check_complete, open_answers
from panjue.eval.calibration import mean_confidence
from panjue.eval.classifier import CLASSIFIER_NAME
from panjue.eval.decoding import decoding_of
from panjue.eval.fairness import MIN_EXAMPLES, Attribute, by_attribute
from panjue.eval.opinions import EMPTY_REPLY
from panjue.eval.score import ScoreResult, remarks, score
from panjue.eval.shown import class_fields, items_of, own_gold, split_at_names
from panjue.eval.values import metric_values, submission_rows
from panjue.prompts.example import Decoded, Example, call_key, first_reply
from panjue.prompts.model import is_demo
from panjue.prompts.plumbing.files import atomic_write
from panjue.prompts.plumbing.rows import Rows
from panjue.prompts.reader import protect_inputs
from panjue.prompts.task import Task
from panjue.prompts.tasks.metrics import Field, Item

FOLDER = Path(__file__).parent / "page"

MAX_SHOWN_PAIRS = 15
"""Confused pairs of classes of a field that are shown."""


@dataclass(frozen=True)
class PageCase:
    """One example in the page's case browser.

    Attributes:
        text: Its pieces in order: (piece, index in `items` of the name that it is, or None).
        items: With fields as their own gold where the file has none.
        classes: Field -> its gold and predicted classes, for the filters.
        wrong: Fields that are wrong in at least one item.
        opinions: Item -> field -> the text classifier's answer, and which of `AGREEMENTS` it has
            with the model's, or `NO_REPLY`; empty if the run has no classifier, or if that made the
            submission.
        confidence: Mean over its judgments; None if the run has no confidences.
        handled: What `shorten` and decoding did, one keyword each; `notes` has the details.
        reply: The raw replies, one per call.
    """

    id: str
    groups: Mapping[str, str]
    text: list[tuple[str, int | None]]
    items: list[Item]
    classes: dict[str, list[str]]
    wrong: list[str]
    opinions: list[list[tuple[Field, str]]]
    confidence: float | None
    handled: list[str]
    notes: list[str]
    reply: list[str]


@dataclass
class PageData:
    """Everything on the page.

    Attributes:
        scores: None if a case has no gold; then the page shows facts and answers alone.
        labels: Metric, field or baseline -> what it is called, in English and in Chinese.
        parts: Metric -> its weight in the headline metric, if that is a weighted sum.
        demo: The demo's training answered.
        agreements: Field -> how many of its items have which agreement.
        skipped: A line on the bad rows of that file that were skipped, if any.
        classes: Field -> class -> how many items have it in gold and in predictions, and its F1;
            in the field's order or the commonest first.
        groups: Attribute -> the headline metric of its groups.
        pairs: Field -> (missed gold class, wrongly predicted class, number of items), the
            commonest.
        decoding: The run's decode.json, if it describes this submission.
    """

    name: str
    task: str
    scores: ScoreResult | None = None
    by_classifier: bool = False
    labels: dict[str, tuple[str, str]] = field(default_factory=dict)
    parts: Mapping[str, float] = field(default_factory=dict)
    demo: bool = False
    agreements: dict[str, Counter[str]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    cases: list[PageCase] = field(default_factory=list)
    classes: dict[str, dict[str, tuple[int, int, float]]] = field(default_factory=dict)
    pairs: dict[str, list[tuple[str, str, int]]] = field(default_factory=dict)
    decoding: Mapping[str, Any] = field(default_factory=dict)
    groups: dict[str, Attribute] = field(default_factory=dict)

    def label(self, name: str) -> tuple[str, str]:
        """Return what a metric, field or baseline is called, in English and in Chinese."""
        return self.labels.get(name, (name, name))


@dataclass
class ClassCounts:
    """How many items have each value of a field: in gold, in predictions, in both."""

    gold: Counter[str] = field(default_factory=Counter)
    predicted: Counter[str] = field(default_factory=Counter)
    both: Counter[str] = field(default_factory=Counter)

    def add(self, gold: Sequence[str], predicted: Sequence[str]) -> None:
        self.gold.update(gold)
        self.predicted.update(predicted)
        self.both.update(set(gold) & set(predicted))

    def of(self, value: str) -> tuple[int, int, float]:
        """Return how many items have a value in gold and in predictions, and its F1."""
        gold = self.gold[value]
        predicted = self.predicted[value]
        return gold, predicted, 2 * self.both[value] / (gold + predicted)

    def values(self, order: Sequence[str]) -> list[str]:
        """Return the values that occur: those of `order` in it, then the commonest first."""
        totals = self.gold + self.predicted
        values = [value for value in order if value in totals]
        for value, _ in totals.most_common():
            if value not in values:
                values.append(value)
        return values


def write_page(run: Path, gold: Path | None) -> None:
    opened = open_answers(run, gold)
    if gold:
        check_complete(opened)
    page_path = opened.folder / "report.html"
    with protect_inputs(opened.reader.skipped):
        result = page_data(opened)
    with atomic_write(page_path) as out:
        out.write(page(result))
    print(f"written: {page_path}")
    for line in result.skipped:
        print(line)
    if result.scores is None:
        print(f"{opened.test}: has cases without gold: the page has no scores")


def page_data(answered: AnsweredFile) -> PageData:
    task = answered.task
    record = answered.record
    submission = task.data.submission.find(answered.folder)
    result = PageData(answered.name, record.task)
    result.by_classifier = record.answered_by == "classifier"
    result.labels = {name: (name, chinese) for name, chinese in AGREEMENTS.items()}
    result.labels[NO_REPLY] = (NO_REPLY, "模型未答")
    if all(example.answer is not None for example in answered.examples()):
        result.scores = score(answered.reader, answered.test, submission)
    else:
        result.labels |= WITHOUT_GOLD
    result.labels |= {CLASSIFIER_NAME: ("text classifier", "文本分类器"), **task.score.titles}
    result.parts = task.score.parts
    trained = None if record.endpoint else answered.answers.trained
    result.demo = trained is not None and is_demo(trained)
    result.decoding = decoding_of(submission) or {}
    result.cases = list(_cases(answered, submission, result))
    if answered.reader.skipped.rows:
        result.skipped = [str(answered.reader.skipped)]
    if result.scores:
        for attribute in result.scores.groups:
            result.groups[attribute] = by_attribute(result.scores.values, attribute)
        _count_agreements(result)
        _count_classes(task, result)
    return result


def _cases(answered: AnsweredFile, submission: Path, result: PageData) -> Iterator[PageCase]:
    task = answered.task
    rows = submission_rows(task, submission)
    path = answered.folder / "confidence.jsonl"
    confidences = Rows(path) if result.decoding and path.exists() else None
    completions = None if result.by_classifier else answered.rows()
    advisor = None if result.by_classifier else answered.advisor()
    fallback = result.decoding.get("fallback", task.score.fallback)
    shown_fields = list(chain(*class_fields(task)))
    for example in answered.examples():
        row = rows.get(example.id)
        gold = task.gold(example) if result.scores else row and own_gold(row)
        if gold and not result.scores:
            metric_values(task, gold, row, f"{rows.path}: id {example.id}")  # refuses a broken row
        items = list(items_of(task, gold, row)) if gold else []
        fields = list(chain.from_iterable(of_item for _, of_item in items))
        calls = list(_calls(completions, example))
        decoded = None
        if calls and result.decoding and not task.solve:
            decoded = task.ask.decode(first_reply(calls[0]), example, answered.labels)
        opinions = []
        if advisor and gold:
            judged = advisor.opinions(example, calls[0] if calls else EMPTY_REPLY)
            answer = advisor.alone(example, judged)
            own = list(items_of(task, gold, task.data.write(example, answer)))
            opinions = list(compared_opinions(task, example, items, own, decoded))
        notes = dict(_handled(calls, decoded, fallback))
        confidence = confidences.get(example.id) if confidences else None
        yield PageCase(
            id=str(example.id),
            groups=example.groups,
            text=split_at_names(example.text, [name for name, _ in items]),
            items=items,
            classes={name: _values(fields, name) for name in shown_fields},
            wrong=_wrong(fields),
            opinions=opinions,
            confidence=mean_confidence(confidence) if confidence else None,
            handled=list(notes),
            notes=list(notes.values()),
            reply=[row.get("refused") or first_reply(row) for row in calls],
        )


def _calls(completions: Rows | None, example: Example) -> Iterator[dict[str, Any]]:
    """Yield the completion rows of an example: its only one, or one per call in order."""
    if completions is None:
        return
    row = completions.get(call_key({"id": example.id}))
    if row:
        yield row
        return
    for call in count():
        row = completions.get(call_key({"id": example.id, "call": call}))
        if row is None:
            return
        yield row


def _wrong(fields: Sequence[Field]) -> list[str]:
    """Return the names of the fields that are wrong anywhere, in the order of the fields."""
    names = dict.fromkeys(field.name for field in fields)
    wrong = {field.name for field in fields if not field.correct}
    return [name for name in names if name in wrong]


def _values(fields: Sequence[Field], name: str) -> list[str]:
    values: list[str] = []
    for of in fields:
        if of.name == name:
            values += [*of.gold, *of.predicted]
    return list(dict.fromkeys(values))


def _handled(
    rows: Sequence[dict[str, Any]], decoded: Decoded | None, fallback: str
) -> Iterator[tuple[str, str]]:
    """Yield what happened to an example's calls: (keyword, details).

    `decoded` is the reply, if there is one and the submission is of it; `fallback` answers what is
    unreadable.
    """
    asked = []
    refusals = []
    for row in rows:
        if row.get("refused") is None:
            asked.append(row)
        else:
            refusals.append(row["refused"])
    if refusals:
        yield "not asked", f"could not be asked: {refusals[0]}"
    dropped = sum(row["dropped_sentences"] for row in asked)
    if dropped:
        yield "shortened", f"shortened to fit by {dropped} sentences"
    cut = sum(row["finish"][0] == "length" for row in asked)
    if cut:
        yield "cut", f"{cut} replies cut by length"
    if not asked or decoded is None:
        return
    if not decoded.readable:
        yield "unreadable", f"the reply was unreadable, its answer: {fallback}"
    elif decoded.repairs:
        yield "repaired", "repaired: " + "; ".join(decoded.repairs)


def _count_agreements(result: PageData) -> None:
    """Count how often model and classifier agree, and who is right."""
    for case in result.cases:
        for own, how in chain.from_iterable(case.opinions):
            if how != NO_REPLY:
                result.agreements.setdefault(own.name, Counter()).update([how])


def _all_fields(cases: Sequence[PageCase]) -> Iterator[Field]:
    for case in cases:
        for _, fields in case.items:
            yield from fields


def _count_classes(task: Task, result: PageData) -> None:
    """Count the classes of every field, and those that are confused, over the cases."""
    sets, single = class_fields(task)
    counts = {name: ClassCounts() for name in (*sets, *single)}
    pairs = {name: Counter[tuple[str, str]]() for name in (*sets[:1], *single)}
    for of in _all_fields(result.cases):
        if of.name in counts:
            counts[of.name].add(of.gold, of.predicted)
        if of.name in pairs:
            pairs[of.name].update(_confused(of))
    for name, found in pairs.items():
        commonest = found.most_common(MAX_SHOWN_PAIRS)
        if commonest:
            result.pairs[name] = [(gold, told, times) for (gold, told), times in commonest]
    for name, of_values in counts.items():
        values = of_values.values(task.score.order.get(name, ()))
        if values:
            result.classes[name] = {value: of_values.of(value) for value in values}


def _confused(of: Field) -> Iterator[tuple[str, str]]:
    """Return the pairs of a missed gold class and a wrongly predicted one."""
    missed = sorted(set(of.gold) - set(of.predicted))
    added = sorted(set(of.predicted) - set(of.gold))
    return product(missed, added)


def page(result: PageData) -> str:
    """Return the page: tables, and the case browser with its data."""
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}  # fields in the task's order
    return environment.get_template("report.html").render(
        report=result,
        scores=result.scores,
        remarks=[*(remarks(result.scores) if result.scores else ()), *result.skipped],
        agreements=AGREEMENTS,
        min_examples=MIN_EXAMPLES,
        style=(FOLDER / "report.css").read_text("utf-8"),
        script=(FOLDER / "report.js").read_text("utf-8"),
        cases=[asdict(case) for case in result.cases],
    )
