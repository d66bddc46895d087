"""The report of a run as one HTML page: scores, errors by class, and every case."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from jinja2.utils import htmlsafe_json_dumps

from panjue.eval.agreement import AGREEMENTS, NO_REPLY, WITHOUT_GOLD, used_replies
from panjue.eval.cases_shown import CaseShown, cases_shown
from panjue.eval.curve import picture, read_losses
from panjue.eval.field_why import FEATURES_READ, for_page
from panjue.eval.score import ScoreResult, score
from panjue.eval.show_scores import Remark, remarks
from panjue.eval.shown import class_fields
from panjue.finetune.classifier.classifier import CLASSIFIER_NAME
from panjue.finetune.classifier.why import Most
from panjue.prompts.plumbing.config import scrubbed
from panjue.prompts.plumbing.files import atomic_write, flat
from panjue.prompts.plumbing.intervals import interval_text
from panjue.prompts.plumbing.ours import lies_in_ours
from panjue.prompts.plumbing.progress import duration
from panjue.prompts.plumbing.records import (
    DATA,
    ROWS,
    WEIGHTS,
    TrainingSummary,
    model_less_classifier,
)
from panjue.prompts.plumbing.version import panjue_version
from panjue.prompts.task import Task
from panjue.prompts.tasks.metrics import Field
from panjue.serve.answers import DEMO_ANSWERED, Answered
from panjue.serve.decoding import FIRST_LABEL, decoding_of, edited

PAGE_FILES = Path(__file__).parent / "page"
HEAD_BYTES = 4096
"""Number of first bytes of a page, which contain its title."""

MAX_CASE_BYTES = 20_000_000
"""Most bytes of cases on a page, so that browsers open it at once, and it can be sent."""

MOST_ON_PAGE = Most(words=3, sentences=1, of_classes=3, of_sets=0)

JSON: dict[str, Any] = {"sort_keys": False, "ensure_ascii": False, "separators": (",", ":")}
"""How a page writes its data: fields in the task's order, and Chinese unescaped in half the
bytes."""


@dataclass(frozen=True)
class PageData:
    """Everything on the page."""

    answered: Answered
    scores: ScoreResult | None  # None if a case has no gold: only facts and answers then
    decoding: Mapping[str, Any]  # the run's decode.json, if it describes this submission
    labels: Mapping[str, tuple[str, str]]
    """Metric, field, baseline or `gold` -> its name in English and in Chinese."""
    by: tuple[str, str] | None  # who answered, if not only the model
    training: dict[str, Any] | None  # None for an endpoint, or if it has changed since
    cases: list[CaseShown]  # the first cases, up to `MAX_CASE_BYTES`
    n_cases: int  # number of all cases; the numbers are of all
    agreements: dict[str, Counter[str]]  # field -> result -> number of items
    classes: dict[str, dict[str, tuple[int, int, float]]]
    """Field -> class -> number of items in gold and in predictions, and F1. Classes are in the
    order of the field, or the commonest comes first."""


def write_page(opened: Answered) -> None:
    """Write `report.html` into the folder of the answers, and print what a reader should know."""
    page_path = opened.folder / "report.html"
    with opened.reader.explaining():  # an error in it also says which rows were skipped
        result = page_data(opened)
    with atomic_write(page_path, may_be_replaced) as out:
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


def may_be_replaced(path: Path) -> bool:
    """Say whether a page may replace a file: it lies in a folder of panjue, or is a page itself."""
    if lies_in_ours(path):
        return True
    if not path.is_file():
        return False
    with path.open("rb") as page:
        return b" panjue</title>" in page.read(HEAD_BYTES)


def page_data(answered: Answered) -> PageData:
    """Score the answers and look at every case; keep as many first cases as fit on the page."""
    task = answered.task
    submission = task.data.submission.find(answered.folder)
    decoding = decoding_of(submission) or {}
    scores = None
    if all(example.answer is not None for example in answered.examples()):
        scores = score(answered.reader, answered.test, submission, answered)
    has_gold = scores is not None
    cases: list[CaseShown] = []
    n_cases = 0
    n_bytes = 0
    agreements: dict[str, Counter[str]] = defaultdict(Counter)
    classes = {name: ClassCounts() for name in class_fields(task)}

    def has_room() -> bool:
        """Say whether all cases so far fit. After the first that does not, none is kept."""
        return n_bytes <= MAX_CASE_BYTES

    for case in cases_shown(
        answered,
        decoding,
        answered.examples(),
        has_gold=has_gold,
        most=MOST_ON_PAGE,
        wants_reasons=has_room,  # reasons take time, and only cases on the page need them
    ):
        n_cases += 1
        if has_room():
            n_bytes += len(htmlsafe_json_dumps(case_for_page(task, case), **JSON).encode())
            if has_room():  # also with this case
                cases.append(case)
        if not has_gold:
            continue
        for field, result in chain.from_iterable(case.opinions):
            if result != NO_REPLY:
                agreements[field.name][result] += 1
        for field in chain.from_iterable(fields for _, fields in case.items):
            if field.name in classes:
                classes[field.name].add(field)
    return PageData(
        answered=answered,
        scores=scores,
        decoding=decoding,
        labels=_labels(task, has_gold=has_gold),
        by=_who_answered(answered, decoding),
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
    if not used_replies(decoding):
        return "The text classifier answered, not the model.", "答案来自文本分类器，不是模型。"
    of_classifier = [name for name, who in decoding.get("by_field", {}).items() if who != "model"]
    if not of_classifier:
        return None
    titles = [answered.task.score.titles.get(name, (name, name)) for name in of_classifier]
    english = ", ".join(title for title, _ in titles)
    chinese = "、".join(title for _, title in titles)
    return f"The text classifier answered: {english}.", f"由文本分类器回答：{chinese}。"


def _training(answered: Answered) -> dict[str, Any] | None:
    """Return what the page says of the training whose adapter answered.

    None if none did, or if the training has changed since. `scrubbed` leaves only the last part of
    an absolute path.
    """
    trained = answered.trained
    if trained is None or answered.changed or not answered.record.is_of_adapter:
        return None
    record = trained.record
    summary = TrainingSummary.read(trained.run) or TrainingSummary()
    step = trained.step(summary)
    training_losses, held_out_losses = read_losses(trained.run)
    settings = record.part(WEIGHTS, ROWS, DATA)
    if record.adopted:  # the steps of its training are not known
        settings = {**record.part(ROWS, DATA), "lora": record.lora}
    return {
        "record": record,
        "summary": summary,
        "step": step,  # that of the weights
        "loss": dict(held_out_losses).get(step) if step else None,
        "base": scrubbed(record.base),
        "start": scrubbed(record.from_run),  # the run from whose adapter it started
        "picture": picture(training_losses, held_out_losses, step),
        "took": duration(summary.seconds or 0),
        "settings": dict(flat(scrubbed(settings))),  # by names with dots
        "changed": scrubbed(summary.changed),  # settings that the command line changed
    }


def _labels(task: Task, *, has_gold: bool) -> dict[str, tuple[str, str]]:
    """Return key -> its name on the page in English and Chinese, for `PageData.labels`.

    A key is a metric, a field or a baseline of the task, or a word of the page such as `gold`. The
    task's own titles come last, since they replace others.
    """
    labels = {name: (name, chinese) for name, chinese in AGREEMENTS.items()}
    labels["gold"] = ("gold", "标准答案")
    labels[NO_REPLY] = (NO_REPLY, "模型未答")
    labels[CLASSIFIER_NAME] = ("text classifier", "文本分类器")
    labels[FIRST_LABEL] = (FIRST_LABEL, "标签表里的第一个")
    if not has_gold:
        labels |= WITHOUT_GOLD
    return {**labels, **task.score.titles}


class ClassCounts:
    """Counts of the items with each class of a field: in gold, in predictions, in both."""

    def __init__(self) -> None:
        self.gold = Counter[str]()
        self.predicted = Counter[str]()
        self.both = Counter[str]()

    def add(self, field: Field) -> None:
        """Count the classes of one item in this field."""
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


def case_for_page(task: Task, case: CaseShown) -> dict[str, Any]:
    """Return the data of a case for the page, with the short form of its `whys`."""
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
        style=(PAGE_FILES / "report.css").read_text("utf-8"),
        script=(PAGE_FILES / "report.js").read_text("utf-8"),
        data=data,
        version=panjue_version(),
    )


@cache
def _template() -> Template:
    """Return the page's template; text of cases in it is escaped."""
    environment = Environment(
        loader=FileSystemLoader(PAGE_FILES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = JSON
    return environment.get_template("report.html")
