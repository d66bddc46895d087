"""The official metric of CMDL: F1 of charges and articles, accuracy of penalties."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.tasks.metrics import Row, by_name


def label_precision(gold: Sequence[str], predicted: Sequence[str]) -> float:
    """Share of the predicted labels that are gold; 0 if nothing is predicted."""
    correct = len({*gold} & {*predicted})
    return correct / len({*predicted}) if predicted else 0.0


def label_recall(gold: Sequence[str], predicted: Sequence[str]) -> float:
    """Share of the gold labels that are predicted; 0 if there is no gold label."""
    return label_precision(predicted, gold)


def label_f1(gold: Sequence[str], predicted: Sequence[str]) -> float:
    """Harmonic mean of precision and recall; two empty sets score 0, as in the official code."""
    correct = len({*gold} & {*predicted})
    labels = len({*gold}) + len({*predicted})
    return 2 * correct / labels if labels else 0.0


def _label_metric(name: str, field: str, score: Callable[..., float]) -> Callable[..., float]:
    """Return the metric `name`: the mean of a score of label sets over the case's defendants."""

    def metric(gold: Row, predicted: Row | None) -> float:
        return _over_defendants(gold, predicted, lambda own, given: score(own[field], given[field]))

    metric.__name__ = name
    return metric


charge_precision = _label_metric("charge_precision", "charges", label_precision)
charge_recall = _label_metric("charge_recall", "charges", label_recall)
charge_f1 = _label_metric("charge_f1", "charges", label_f1)
article_precision = _label_metric("article_precision", "articles", label_precision)
article_recall = _label_metric("article_recall", "articles", label_recall)
article_f1 = _label_metric("article_f1", "articles", label_f1)


def penalty_accuracy(gold: Row, predicted: Row | None) -> float:
    """Share of the case's defendants with the correct penalty class."""
    return _over_defendants(gold, predicted, _same_class)


def _same_class(gold: Row, predicted: Row) -> float:
    """Return 1 if the penalty classes are equal, else 0."""
    # Only whole numbers are classes. In Python False == 0, which is death, and 11.0 == 11.
    is_class = type(predicted["penalty"]) is int
    return float(is_class and gold["penalty"] == predicted["penalty"])


def final(gold: Row, predicted: Row | None) -> float:
    """Score by which the contest ranks: 0.3 charge F1 + 0.3 article F1 + 0.4 penalty accuracy."""
    return (
        0.3 * charge_f1(gold, predicted)
        + 0.3 * article_f1(gold, predicted)
        + 0.4 * penalty_accuracy(gold, predicted)
    )


METRICS = (
    charge_precision,
    charge_recall,
    charge_f1,
    article_precision,
    article_recall,
    article_f1,
    penalty_accuracy,
    final,
)

FINAL_PARTS = {"charge_f1": 0.3, "article_f1": 0.3, "penalty_accuracy": 0.4}
"""Metric -> its weight in `final`."""

TITLES = {
    "charge_precision": ("charge precision", "罪名精确率"),
    "charge_recall": ("charge recall", "罪名召回率"),
    "charge_f1": ("charge F1", "罪名 F1"),
    "article_precision": ("article precision", "法条精确率"),
    "article_recall": ("article recall", "法条召回率"),
    "article_f1": ("article F1", "法条 F1"),
    "penalty_accuracy": ("penalty accuracy", "刑罚准确率"),
    "final": ("final score", "总分"),
    "charges": ("charges", "罪名"),
    "articles": ("articles", "法条"),
    "penalty": ("penalty", "刑罚"),
    "defendants": ("defendants", "被告人数"),
    "gold": ("gold", "原判"),
    "commonest labels": ("always the commonest labels", "始终预测最常见的标签"),
}
"""Names of these metrics, and of the fields of an answer, on the report page."""


NO_JUDGMENT: dict[str, Any] = {"charges": (), "articles": (), "penalty": None}


def _over_defendants(gold: Row, predicted: Row | None, score: Callable[[Row, Row], float]) -> float:
    """Mean over the gold defendants, who are matched by name, and by order if names are equal.

    The official code matches by position, and fails if names or their number differ. Here, a
    defendant without a judgment scores 0. If there are several, the first one counts. Judgments of
    other persons are ignored.
    """
    scores = []
    given = predicted["judgments"] if predicted is not None else []
    for judgment, answer in _matched(gold["judgments"], given):
        scores.append(score(judgment, answer))
    if not scores:
        raise UserError("judgments: nobody is judged")
    return sum(scores) / len(scores)


def _matched(golds: Sequence[Row], given: Sequence[Row]) -> Iterable[tuple[Row, Row]]:
    """Return each gold judgment with the predicted one of the same person, or `NO_JUDGMENT`."""
    if [judgment["name"] for judgment in golds] == [judgment.get("name") for judgment in given]:
        return zip(golds, given, strict=True)  # the usual case, in a tenth of the time
    answers = by_name(given)
    return [(gold, answers.get(name, NO_JUDGMENT)) for name, gold in by_name(golds).items()]
