"""Why a field got its answer: who answered, with which confidence, and the classifier's reasons."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from panjue.eval.metric_values import item_names
from panjue.finetune.classifier.classifier import CLASSIFIER_NAME
from panjue.finetune.classifier.opinions import Advisor
from panjue.finetune.classifier.why import FieldReasons, Most, Why, reasons
from panjue.prompts.example import Decoded, Example
from panjue.prompts.task import Task
from panjue.prompts.tasks.metrics import Row, numbered, texts

VOTE = "vote"

FEATURES_READ = {
    "label": ("which label it is", "是哪个标签"),
    "score": ("score", "得分"),
    "score by the text": ("score by the whole text", "全文得分"),
    "score by the own clauses": ("score by the own clauses", "本人语句得分"),
    "above the case's mean of own clauses": (
        "score by the own clauses above the case's mean",
        "本人语句得分高出全案平均",
    ),
    "rank in the item": ("rank among the person's labels", "在本人各标签中的名次"),
    "behind the item's best": ("behind the person's best label", "与本人最高标签的差距"),
    "score 1 of the item": ("score of the person's best label", "本人最高标签的得分"),
    "score 2 of the item": ("score of the person's second label", "本人第二标签的得分"),
    "score 3 of the item": ("score of the person's third label", "本人第三标签的得分"),
    "mean of the case": ("mean score in the case", "全案平均得分"),
    "best of the case": ("best score in the case", "全案最高得分"),
    "behind the case's best": ("behind the case's best label", "与全案最高标签的差距"),
    "rank in the case": ("rank in the case", "在全案各标签中的名次"),
    "labels to expect": ("number of labels to expect", "预计标签个数"),
    "number": ("position in the list", "名单中的位置"),
    "of": ("persons in the list", "名单人数"),
    "place": ("relative position in the list", "名单中的相对位置"),
    "length": ("length of the text", "全文长度"),
    "own length": ("length of the own clauses", "本人语句长度"),
    "named": ("times named", "被提到的次数"),
    "first named": ("place of the first mention", "首次提到的位置"),
    "whole text": ("whole text", "全文"),
    "own clauses": ("own clauses", "本人语句"),
    "as usual for the charges": ("as usual for the charges", "此类罪名的通常情况"),
    "as usual for the articles": ("as usual for the articles", "此类法条的通常情况"),
    "largest amount of money": ("largest amount of money, log10", "最大金额（log10）"),
    "sum of money": ("sum of money, log10", "金额合计（log10）"),
    "amounts of money": ("amounts of money", "金额个数"),
    "largest weight": ("largest weight in g, log10", "最大重量（克，log10）"),
    "sum of weights": ("sum of weights in g, log10", "重量合计（克，log10）"),
    "weights": ("weights", "重量个数"),
    "acts": ("acts counted", "起数、次数"),
    "dates": ("dates", "日期个数"),
}
"""Feature of the trees, or what it is about -> readable name in English and Chinese. A score is the
log-odds of the linear model."""


@dataclass(frozen=True)
class FieldWhy:
    """Why one field of one item got its answer."""

    by: str
    """`model`, `classifier`, `VOTE` or the name of the task's fallback; empty if unknown."""
    confidence: float | None  # None if the run has none
    logprob: float | None = None  # the model's own, of its answer; None if it is not known
    reasons: FieldReasons | None = None  # None without a text classifier


PersonKey = tuple[str, int]
"""A name, and the number of equal names before it; `("", 0)` if answers have no persons."""


def persons(task: Task, names: Sequence[str]) -> list[PersonKey]:
    return numbered(names) if task.answer.items else [("", 0)]


def answerers(
    task: Task, asked: Example, decoded: Decoded | None, decoding: Mapping[str, Any]
) -> dict[PersonKey, dict[str, str]]:
    """Return person -> field -> who answered it: the model, or another.

    `decoded` says which fields the reply to `asked` lacks; None if that is unknown.
    """
    fallback = decoding.get("fallback", task.score.fallback)
    instead = "classifier" if fallback == CLASSIFIER_NAME else fallback
    is_of_model = not decoding or decoding.get("calls")
    by_field = dict.fromkeys(task.answer.fields, "model" if is_of_model else "classifier")
    by_field |= decoding.get("by_field", {})
    by_person = {}
    for number, person in enumerate(persons(task, asked.names)):
        by_person[person] = dict(by_field)
        for field, who in by_field.items():
            if who == "model" and decoded and decoded.is_fallback(number, field):
                by_person[person][field] = instead
    return by_person


def answered_labels(task: Task, row: Row) -> dict[PersonKey, dict[str, list[str]]]:
    """Return person -> field -> labels of a submission row, in the classifier's form."""
    if not task.answer.items and task.score.classes:
        [field] = task.answer.fields
        labels = [label for label in task.score.classes(row) if label != task.answer.nothing]
        return {("", 0): {field: labels}}
    by_person = {}
    in_row = persons(task, item_names(task, row))
    for person, item in zip(in_row, task.answer.items_of(row), strict=True):
        labels_of = {}
        for field in task.answer.fields:
            value = item.get(field)
            order = task.answer.order.get(field, ())
            if isinstance(value, int) and 0 <= value < len(order):
                value = order[value]
            labels_of[field] = texts(value)
        by_person[person] = labels_of
    return by_person


def field_reasons(
    task: Task,
    examples: Sequence[Example],
    rows: Sequence[Row | None],
    advisor: Advisor,
    most: Most,
) -> list[dict[PersonKey, dict[str, FieldReasons]]]:
    """Return for each example: person -> field -> the classifier's reasons, also for the answer.

    The persons are those of the example; the answer is in its row of the submission.
    """
    nothing: dict[str, list[str]] = {field: [] for field in task.answer.fields}
    answered = []
    for example, row in zip(examples, rows, strict=True):
        by_person = answered_labels(task, row) if row else {}
        asked = persons(task, example.names)
        answered.append([by_person.get(person, nothing) for person in asked])
    found = reasons(advisor.classifier, examples, answered, most)
    by_example = []
    for example, of_items in zip(examples, found, strict=True):
        by_example.append(dict(zip(persons(task, example.names), of_items, strict=True)))
    return by_example


def label_read(task: Task, field: str, label: str) -> str:
    """Return the readable form of a label of a field."""
    return task.score.readable.get(field, str)(label)


def whys_of(
    task: Task,
    names: Sequence[str],
    by: Mapping[PersonKey, Mapping[str, str]],
    confidences: Mapping[PersonKey, Mapping[str, float]],
    logprobs: Mapping[PersonKey, Mapping[str, float | None]],
) -> list[list[FieldWhy]]:
    """Return for each item of these names, and for each decided field, why it got its answer."""
    whys = []
    for person in persons(task, names):
        of_item = []
        for field in task.answer.fields:
            who = by.get(person, {}).get(field, "")
            sure = confidences.get(person, {}).get(field)
            of_item.append(FieldWhy(who, sure, logprobs.get(person, {}).get(field)))
        whys.append(of_item)
    return whys


def with_reasons(
    task: Task,
    names: Sequence[str],
    whys: Sequence[Sequence[FieldWhy]],
    found: Mapping[PersonKey, Mapping[str, FieldReasons]],
) -> list[list[FieldWhy]]:
    """Return `whys_of` the items of these names, together with the classifier's reasons."""
    if not whys:  # no answer was handed in
        return []
    of_items = []
    for person, of_item in zip(persons(task, names), whys, strict=True):
        of_fields = found.get(person, {})
        fields = zip(task.answer.fields, of_item, strict=True)
        of_items.append([replace(why, reasons=of_fields.get(field)) for field, why in fields])
    return of_items


def for_page(task: Task, whys: Sequence[Sequence[FieldWhy]]) -> list[list[list[Any]]]:
    """Return the data for a page: item -> field -> who, confidence, likeliest labels, reasons.

    A reason is about one label: its probability, the score of the linear model, what the trees add
    or null, how far the text is known, words and sentences; for a class also features.
    """
    items = []
    for of_item in whys:
        fields = []
        for field, why in zip(task.answer.fields, of_item, strict=True):
            likeliest: list[Any] = []
            labels: list[Any] = []
            if why.reasons:
                for label, chance in why.reasons.likeliest:
                    likeliest.append([label_read(task, field, label), round(chance, 3)])
                labels = [_reason_for_page(task, field, one) for one in why.reasons.answered]
            sure = None if why.confidence is None else round(why.confidence, 2)
            fields.append([why.by, sure, likeliest, labels])
        items.append(fields)
    return items


def _reason_for_page(task: Task, field: str, why: Why) -> list[Any]:
    features = []
    for one in why.trees.features if why.trees else ():
        features.append([one.name, one.about, round(one.value, 2), round(one.contribution, 2)])
    return [
        label_read(task, field, why.label),
        round(why.probability, 3),
        round(why.score, 2),
        round(why.trees.given, 2) if why.trees else None,
        round(why.known, 2),
        [[word.text, round(word.contribution, 2)] for word in why.words],
        [[one.start, one.end, round(one.contribution, 2)] for one in why.sentences],
        features,
    ]
