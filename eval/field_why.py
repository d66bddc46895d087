"""Why a field got its answer: who answered, with which confidence, and the classifier's reasons."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from panjue.eval.shown import labels_in
from panjue.finetune.classifier.opinions import Advisor
from panjue.finetune.classifier.why import FieldReasons, Most, Why, reasons
from panjue.prompts.example import Example
from panjue.prompts.task import Task
from panjue.prompts.tasks.metrics import Row, by_name, numbered

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

    by: str  # `model`, `classifier`, `VOTE` or the name of the task's fallback; empty if unknown
    confidence: float | None  # None if the run has none
    logprob: float | None = None  # the model's own, of its answer; None if it is not known
    reasons: FieldReasons | None = None  # None without a text classifier


PersonKey = tuple[str, int]
"""A name, and the number of equal names before it, which tells namesakes apart."""

PersonReasons = Mapping[PersonKey, Mapping[str, FieldReasons]]
"""Person -> field -> the text classifier's likeliest labels and its reasons."""


def persons(task: Task, names: Sequence[str]) -> list[PersonKey]:
    """Return the keys of the items of an answer: `["张某", "张某"] -> [("张某", 0), ("张某", 1)]`.

    The answer of a task without persons is one item without a name.
    """
    return numbered(names) if task.answer.items else [("", 0)]


def answered_labels(task: Task, row: Row) -> dict[PersonKey, dict[str, list[str]]]:
    """Return person -> field -> labels of a submission row, named as the classifier names them.

    A task without persons may write its labels as numbers: `{"id": 1, "label": 0}`. Its
    `Score.classes` returns them in words. For an empty set, it returns the name `nothing` of the
    empty set, which is left out.
    """
    if not task.answer.items and task.score.classes:
        [field] = task.answer.fields
        labels = [label for label in task.score.classes(row) if label != task.answer.nothing]
        return {("", 0): {field: labels}}
    items = task.answer.items_of(row)
    of_person = by_name(items) if task.answer.items else {("", 0): items[0]}
    answered = {}
    for person, item in of_person.items():
        answered[person] = {name: labels_in(task, name, item) for name in task.answer.fields}
    return answered


def field_reasons(
    task: Task,
    examples: Sequence[Example],
    rows: Sequence[Row | None],
    advisor: Advisor,
    most: Most,
) -> list[PersonReasons]:
    """Return for each example what the classifier says of each person of the example.

    There are reasons for the labels in the example's row of the submission, if it has one. For each
    label, `most` limits the number of words, sentences and features of the trees.
    """
    nothing: dict[str, list[str]] = {field: [] for field in task.answer.fields}
    persons_of = [persons(task, example.names) for example in examples]
    answered = []
    for of_example, row in zip(persons_of, rows, strict=True):
        by_person = answered_labels(task, row) if row else {}
        answered.append([by_person.get(person, nothing) for person in of_example])
    found = reasons(advisor.classifier, examples, answered, most)
    by_example: list[PersonReasons] = []
    for of_example, of_items in zip(persons_of, found, strict=True):
        by_example.append(dict(zip(of_example, of_items, strict=True)))
    return by_example


def label_read(task: Task, field: str, label: str) -> str:
    """Return a label of a field in the form that people read; most labels stay as they are."""
    return task.score.readable.get(field, str)(label)


def for_page(task: Task, whys: Sequence[Sequence[FieldWhy]]) -> list[list[list[Any]]]:
    """Return the data for a page: item -> field -> who answered, confidence, likeliest, reasons.

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
            confidence = None if why.confidence is None else round(why.confidence, 2)
            fields.append([why.by, confidence, likeliest, labels])
        items.append(fields)
    return items


def _reason_for_page(task: Task, field: str, why: Why) -> list[Any]:
    """Return the data of one reason, in the order that `reasonLines` of report.js unpacks."""
    features = []
    for one in why.trees.features if why.trees else ():
        features.append([one.name, one.about, round(one.value, 2), round(one.contribution, 2)])
    return [
        label_read(task, field, why.label),
        round(why.probability, 3),
        round(why.score, 2),
        round(why.trees.given, 2) if why.trees else None,  # what they add; of a class, their score
        round(why.known, 2),  # how far the text is known, 0 to 1
        [[word.text, round(word.contribution, 2)] for word in why.words],
        [[one.start, one.end, round(one.contribution, 2)] for one in why.sentences],
        features,
    ]
