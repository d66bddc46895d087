"""The report of a run as one HTML page: scores, errors by class, and every case."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from dataclasses import field as dataclass_field
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from jinja2.utils import htmlsafe_json_dumps

from panjue.eval.agreement import (
    AGREEMENTS,
    NO_REPLY,
    WITHOUT_GOLD,
    compared_opinions,
    without_gold,
)
from panjue.eval.baselines import row_of_classifier
from panjue.eval.curve import Picture, picture, read_losses
from panjue.eval.field_why import (
    FEATURES_READ,
    VOTE,
    FieldWhy,
    answerers,
    field_reasons,
    for_page,
    persons,
    whys_of,
    with_reasons,
)
from panjue.eval.metric_values import item_names, metric_values, submission_rows
from panjue.eval.reliability import Confidences, mean_confidence
from panjue.eval.score import ScoreResult, score
from panjue.eval.show_scores import Remark, remarks
from panjue.eval.shown import class_fields, items_of
from panjue.finetune.classifier.classifier import CLASSIFIER_NAME
from panjue.finetune.classifier.why import Most
from panjue.prompts.example import Decoded, Example, first_reply
from panjue.prompts.names import split_at_names
from panjue.prompts.plumbing.config import scrubbed
from panjue.prompts.plumbing.files import atomic_write, flat
from panjue.prompts.plumbing.intervals import interval_text
from panjue.prompts.plumbing.ours import lies_in_ours
from panjue.prompts.plumbing.progress import duration
from panjue.prompts.plumbing.records import (
    DATA,
    ROWS,
    WEIGHTS,
    Choice,
    RunRecord,
    TrainingSummary,
    model_less_classifier,
)
from panjue.prompts.plumbing.rows import Rows
from panjue.prompts.plumbing.version import panjue_version
from panjue.prompts.task import Task
from panjue.prompts.tasks.metrics import Field, Item, Row
from panjue.serve.answers import DEMO_ANSWERED, Answered
from panjue.serve.decoding import FIRST_LABEL, decoding_of, edited

FOLDER = Path(__file__).parent / "page"
HEAD_BYTES = 4096
"""Number of first bytes of a page, which contain its title."""

MAX_CASE_BYTES = 20_000_000
"""Most bytes of cases on a page, so that browsers open it at once, and it can be sent."""

MOST_ON_PAGE = Most(words=3, sentences=1, of_classes=3, of_sets=0)

EXPLAINED_AT_ONCE = 64
"""Number of cases for which the text classifier gives reasons at once."""

JSON: dict[str, Any] = {"sort_keys": False, "ensure_ascii": False, "separators": (",", ":")}
"""How a page writes its data: fields in the task's order, and Chinese unescaped in half the
bytes."""


@dataclass(frozen=True)
class PageCase:
    """An example in the case browser of the page."""

    id: str
    groups: Mapping[str, str]
    text: list[tuple[str, int | None]]
    """Pieces of the text in order: (piece, index of the name in `items` or None)."""
    items: list[Item]  # fields are their own gold if the file has none
    opinions: list[list[tuple[Field, str]]]
    """Item -> field -> the other one's answer (the text classifier's or the model's), and the key
    of `AGREEMENTS` for the two answers, or `NO_REPLY`. Empty if the classifier made the submission,
    or if there is no classifier."""
    confidence: float | None  # mean over its fields; None if the run has no confidences
    whys: list[list[FieldWhy]]
    """Item -> decided field -> why it got its answer; empty if the task has no decided fields."""
    handled: dict[str, str]  # what shortening and decoding did: keyword -> details
    reply: list[str]  # the raw replies, one for each call


@dataclass(frozen=True)
class TrainingShown:
    """The training that answered, for the page."""

    record: RunRecord
    summary: TrainingSummary
    step: int | None
    """Step of the weights."""
    loss: float | None
    base: str
    start: str | None
    """The run from whose adapter it started."""
    picture: Picture | None
    took: str
    settings: dict[str, Any]
    """All settings without paths, by names with dots."""
    changed: dict[str, Any]
    """Settings that the command line changed."""


@dataclass(frozen=True)
class PageData:
    """Everything on the page."""

    answered: Answered
    scores: ScoreResult | None  # None if a case has no gold: only facts and answers then
    decoding: Mapping[str, Any]  # the run's decode.json, if it describes this submission
    labels: Mapping[str, tuple[str, str]]
    """Metric, field, baseline or `gold` -> its name in English and in Chinese."""
    by: tuple[str, str] | None  # who answered, if not only the model
    choice: Choice | None  # why, if held-out cases decided it
    training: TrainingShown | None  # None for an endpoint, or if it has changed since
    cases: list[PageCase]  # the first cases, up to `MAX_CASE_BYTES`
    n_cases: int  # number of all cases; the numbers are of all
    agreements: dict[str, Counter[str]]  # field -> agreement -> number of items
    classes: dict[str, dict[str, tuple[int, int, float]]]
    """Field -> class -> number of items in gold and in predictions, and F1. Classes are in the
    order of the field, or the commonest comes first."""


def write_page(opened: Answered) -> None:
    page_path = opened.folder / "report.html"
    with opened.reader.explaining():
        result = page_data(opened)
    with atomic_write(page_path, is_page) as out:
        out.write(page(result))
    print(f"written: {page_path}")
    opened.reader.skipped.show()
    if opened.changed:
        print(opened.changed)
    if len(result.cases) < result.n_cases:
        print(
            f"the page has the first {len(result.cases)} of {result.n_cases} cases, "
            f"{MAX_CASE_BYTES // 10**6} MB; scores and tables are of all"
        )
    if opened.answers.is_of_demo:
        print(DEMO_ANSWERED)
    if result.scores is None:
        print(f"{opened.test}: has cases without gold: the page has no scores")


def is_page(path: Path) -> bool:
    """Say whether a file is a page of panjue; a link may keep it outside of the run folder."""
    if lies_in_ours(path):
        return True
    if not path.is_file():
        return False
    with path.open("rb") as page:
        return b" panjue</title>" in page.read(HEAD_BYTES)


def page_data(answered: Answered) -> PageData:
    task = answered.task
    submission = task.data.submission.find(answered.folder)
    decoding = decoding_of(submission) or {}
    scores = None
    if all(example.answer is not None for example in answered.examples()):
        scores = score(answered.reader, answered.test, submission, answered)
    cases: list[PageCase] = []
    n_cases = 0
    n_bytes = 0
    agreements: dict[str, Counter[str]] = defaultdict(Counter)
    classes = {name: ClassCounts() for name in class_fields(task)}
    examples = answered.examples()

    def has_room() -> bool:
        return n_bytes <= MAX_CASE_BYTES

    for case in page_cases(
        answered,
        decoding,
        examples,
        has_gold=scores is not None,
        most=MOST_ON_PAGE,
        wants_reasons=has_room,
    ):
        n_cases += 1
        if n_bytes <= MAX_CASE_BYTES:  # all others are only counted, since there may be a million
            n_bytes += len(htmlsafe_json_dumps(case_for_page(task, case), **JSON).encode())
        if n_bytes <= MAX_CASE_BYTES:
            cases.append(case)
        if scores is None:
            continue
        for own, how in chain.from_iterable(case.opinions):
            if how != NO_REPLY:
                agreements[own.name][how] += 1
        for field in chain.from_iterable(fields for _, fields in case.items):
            if field.name in classes:
                classes[field.name].add(field)
    return PageData(
        answered=answered,
        scores=scores,
        decoding=decoding,
        labels=_labels(task, has_gold=scores is not None),
        by=_who_answered(answered, decoding),
        choice=answered.choice,
        training=_training(answered),
        cases=cases,
        n_cases=n_cases,
        agreements=agreements,
        classes={
            name: counts.table(task.score.order.get(name, ()))
            for name, counts in classes.items()
            if counts.gold or counts.predicted
        },
    )


def _who_answered(answered: Answered, decoding: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the text on who answered, in English and Chinese; None if the model did."""
    if not decoding and edited(answered.task.data.submission.find(answered.folder)):
        return (
            "The submission was changed since it was decoded, so nobody knows who answered.",
            "提交文件在解析后被改动过，无法得知由谁回答。",
        )
    if n_voters := len(answered.record.voted):
        return f"{n_voters} runs voted on the answers.", f"答案由 {n_voters} 次训练投票得出。"
    if not decoding:
        return None
    if not decoding.get("calls"):
        return "The text classifier answered, not the model.", "答案来自文本分类器，不是模型。"
    of_classifier = [name for name, who in decoding.get("by_field", {}).items() if who != "model"]
    if not of_classifier:
        return None
    titles = [answered.task.score.titles.get(name, (name, name)) for name in of_classifier]
    english = ", ".join(title for title, _ in titles)
    chinese = "、".join(title for _, title in titles)
    return f"The text classifier answered: {english}.", f"由文本分类器回答：{chinese}。"


def _training(answered: Answered) -> TrainingShown | None:
    """Return what is known about the training that answered; None without one, or if it is gone."""
    trained = answered.trained
    if trained is None or answered.changed or not answered.record.is_of_adapter:
        return None
    record = trained.record
    summary = TrainingSummary.read(trained.run) or TrainingSummary()
    step = trained.step(summary)
    losses = read_losses(trained.run)
    settings = record.part(WEIGHTS, ROWS, DATA)
    if record.adopted:  # the steps of its training are not known
        settings = {**record.part(ROWS, DATA), "lora": record.lora}
    return TrainingShown(
        record=record,
        summary=summary,
        step=step,
        loss=dict(losses.held_out).get(step) if step else None,
        base=scrubbed(record.base),
        start=scrubbed(record.from_run),
        picture=picture(losses, step),
        took=duration(summary.seconds or 0),
        settings=dict(flat(scrubbed(settings))),
        changed=scrubbed(summary.changed),
    )


def _labels(task: Task, *, has_gold: bool) -> dict[str, tuple[str, str]]:
    labels = {name: (name, chinese) for name, chinese in AGREEMENTS.items()}
    labels["gold"] = ("gold", "标准答案")
    labels[NO_REPLY] = (NO_REPLY, "模型未答")
    labels[CLASSIFIER_NAME] = ("text classifier", "文本分类器")
    labels[FIRST_LABEL] = (FIRST_LABEL, "标签表里的第一个")
    if not has_gold:
        labels |= WITHOUT_GOLD
    return {**labels, **task.score.titles}


def page_cases(
    answered: Answered,
    decoding: Mapping[str, Any],
    examples: Iterable[Example],
    *,
    has_gold: bool,
    most: Most,
    wants_reasons: Callable[[], bool] = lambda: True,
) -> Iterator[PageCase]:
    """Yield examples of the answered file with all that is known about their answers.

    No case has reasons while `wants_reasons` returns False.
    """
    task = answered.task
    classifier = answered.advisor
    cases = map(_Cases(answered, decoding, has_gold=has_gold).of, examples)
    while batch := list(islice(cases, EXPLAINED_AT_ONCE)):
        if not (classifier and wants_reasons()):
            yield from (case for case, _, _ in batch)
            continue
        of_examples = [example for _, example, _ in batch]
        rows = [row for _, _, row in batch]
        found = field_reasons(task, of_examples, rows, classifier, most)
        for (case, _, _), of_case in zip(batch, found, strict=True):
            names = [name for name, _ in case.items]
            yield replace(case, whys=with_reasons(task, names, case.whys, of_case))


class _Cases:
    """Finds all that is known about an example and its answer, but for reasons."""

    def __init__(self, answered: Answered, decoding: Mapping[str, Any], *, has_gold: bool) -> None:
        self._answered = answered
        self._decoding = decoding
        self._has_gold = has_gold
        self._rows = submission_rows(answered.task, answered.folder)
        path = answered.folder / "confidence.jsonl"
        self._confidences = None
        if decoding and path.exists():
            self._confidences = Confidences(answered.task, path)
        self._is_vote = bool(answered.record.voted)
        self._is_edited = not decoding and bool(edited(self._rows.path))
        was_asked = not decoding or bool(decoding.get("calls"))
        by_model = was_asked and not (self._is_vote or self._is_edited)
        self._completions = answered.rows() if by_model else None
        self._advisor = answered.advisor if by_model else None

    def of(self, example: Example) -> tuple[PageCase, Example, Row | None]:
        """Return an example for the page, with itself and its submission row."""
        task = self._answered.task
        row = self._rows.get(example.id)
        gold = self._gold(example, row)
        items = list(items_of(task, gold, row)) if gold else []
        calls = _calls(self._answered, self._completions, example) if self._completions else []
        # Gold may list other persons than those about whom the model was asked.
        asked = replace(example, names=tuple(item_names(task, row or {})) or example.names)
        decoded = None
        if calls and self._decoding and not task.solve:  # of several replies, none is the answer
            decoded = task.ask.decode(first_reply(calls[0]), asked, self._answered.labels)
        opinions = self._opinions(example, asked, gold, items, calls, decoded)
        confidence = self._confidences.of(example, row) if self._confidences and row else None
        fallback = self._decoding.get("fallback", task.score.fallback)
        case = PageCase(
            id=str(example.id),
            groups=example.groups,
            text=split_at_names(example.text, [name for name, _ in items]),
            items=items,
            opinions=opinions,
            confidence=mean_confidence(confidence) if confidence else None,
            whys=self._whys(asked, row, items, decoded, confidence),
            handled=dict(_what_happened(calls, decoded, fallback)),
            reply=[call.get("refused") or first_reply(call) for call in calls],
        )
        return case, example, row

    def _gold(self, example: Example, row: Row | None) -> Row | None:
        """Return the gold row. Without gold, it is the answer itself, so that it can be shown."""
        task = self._answered.task
        if self._has_gold:
            return task.gold(example)
        if row is None:
            return None
        gold = task.as_gold(row)
        place = f"{self._rows.path}: id {example.id}"
        metric_values(task, gold, row, place)  # raises if the metric cannot read it
        return gold

    def _opinions(
        self,
        example: Example,
        asked: Example,
        gold: Row | None,
        items: list[Item],
        calls: Sequence[Mapping[str, Any]],
        decoded: Decoded | None,
    ) -> list[list[tuple[Field, str]]]:
        """Return what the other one, text classifier or model, answers; see `PageCase.opinions`."""
        if self._advisor is None or gold is None:
            return []
        task = self._answered.task
        by_field = self._decoding.get("by_field", {})
        reply = calls[0] if calls and self._answered.is_answered_file else None
        classifier_row = row_of_classifier(task, self._advisor, example, reply)
        classifier_items = list(items_of(task, gold, classifier_row))
        model_items = items
        if decoded and "classifier" in by_field.values():
            of_model = task.data.write(asked, decoded.answer)
            model_items = list(items_of(task, gold, of_model))
        opinions = compared_opinions(task, asked, model_items, classifier_items, decoded, by_field)
        return list(opinions if self._has_gold else map(without_gold, opinions))

    def _whys(
        self,
        asked: Example,
        row: Row | None,
        items: list[Item],
        decoded: Decoded | None,
        confidence: Sequence[Mapping[str, float]] | None,
    ) -> list[list[FieldWhy]]:
        """Return who answered each decided field of each item, and how surely."""
        task = self._answered.task
        if not (row and task.answer.fields):
            return []
        by = answerers(task, asked, decoded, self._decoding)
        if self._is_vote:
            by = {person: dict.fromkeys(task.answer.fields, VOTE) for person in by}
        if self._is_edited:
            by = {}
        in_row = persons(task, item_names(task, row))
        sure = dict(zip(in_row, confidence, strict=True)) if confidence else {}
        return whys_of(task, [name for name, _ in items], by, sure)


def _calls(answered: Answered, completions: Rows, example: Example) -> list[dict[str, Any]]:
    """Return the completion rows of an example: its only row, or one for each call in order."""
    if not answered.task.solve:
        row = answered.row_if_any(completions, {"id": example.id})
        return [row] if row else []
    calls: list[dict[str, Any]] = []
    while row := answered.row_if_any(completions, {"id": example.id, "call": len(calls)}):
        calls.append(row)
    return calls


def _what_happened(
    calls: Sequence[Mapping[str, Any]], decoded: Decoded | None, fallback: str
) -> Iterator[tuple[str, str]]:
    """Yield what happened to the calls of an example: (keyword, details).

    `decoded` is the decoded reply; None if there is none, or if several make the answer. `fallback`
    answers what is unreadable.
    """
    refusals = [call["refused"] for call in calls if call.get("refused") is not None]
    asked = [call for call in calls if call.get("refused") is None]
    if refusals:
        yield "not asked", f"could not be asked: {refusals[0]}"
    dropped = sum(call["dropped_sentences"] for call in asked)
    if dropped:
        yield "shortened", f"shortened to fit by {dropped} sentences"
    cut = sum(call["finish"][0] == "length" for call in asked)
    if cut:
        yield "cut", f"{cut} replies cut by length"
    filtered = sum(call["finish"][0] == "content_filter" for call in asked)
    if filtered:
        yield "content filter", f"{filtered} replies ended by a content filter"
    if not asked or decoded is None:
        return
    if not decoded.readable:
        yield "unreadable", f"the reply was unreadable, its answer: {fallback}"
    elif decoded.repairs:
        yield "repaired", "repaired: " + "; ".join(decoded.repairs)


@dataclass(frozen=True)
class ClassCounts:
    """Counts of the items with each class of a field: in gold, in predictions, in both."""

    gold: Counter[str] = dataclass_field(default_factory=Counter)
    predicted: Counter[str] = dataclass_field(default_factory=Counter)
    both: Counter[str] = dataclass_field(default_factory=Counter)

    def add(self, field: Field) -> None:
        self.gold.update(field.gold)
        self.predicted.update(field.predicted)
        self.both.update(set(field.gold) & set(field.predicted))

    def table(self, order: Sequence[str]) -> dict[str, tuple[int, int, float]]:
        """Return class -> items in gold, in predictions, F1; by `order`, or the commonest first."""
        totals = self.gold + self.predicted
        ordered = [value for value in order if value in totals]
        commonest = [value for value, _ in totals.most_common()]
        of_value = {}
        for value in dict.fromkeys(ordered + commonest):
            f1 = 2 * self.both[value] / totals[value]
            of_value[value] = (self.gold[value], self.predicted[value], f1)
        return of_value


def case_for_page(task: Task, case: PageCase) -> dict[str, Any]:
    """Return the data of a case for the page."""
    return {**asdict(replace(case, whys=[])), "whys": for_page(task, case.whys)}


def page(result: PageData) -> str:
    """Return the page with tables, and with the case browser and its data."""
    answered = result.answered
    lines = list(remarks(result.scores, result.labels)) if result.scores else []
    skipped = answered.reader.skipped
    if skipped.rows:
        lines.append(Remark(str(skipped), "跳过了无效行，见 skipped-test.jsonl。"))
    by_field = result.decoding.get("by_field", {})
    data = {
        "cases": [case_for_page(answered.task, case) for case in result.cases],
        "features": FEATURES_READ,
        "labels": result.labels,
        "classFields": class_fields(answered.task),
        "hasGold": result.scores is not None,
        "answeredBy": [by_field.get(name, "model") for name in answered.task.answer.fields],
    }
    return _template().render(
        report=result,
        answered=answered,
        scores=result.scores,
        demo=answered.answers.is_of_demo,
        remarks=lines,
        agreements=AGREEMENTS,
        model_less_classifier=model_less_classifier,
        interval_text=interval_text,
        style=(FOLDER / "report.css").read_text("utf-8"),
        script=(FOLDER / "report.js").read_text("utf-8"),
        data=data,
        version=panjue_version(),
    )


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = JSON
    return environment.get_template("report.html")
