"""The official metric of CMDL: F1 of charges and articles, accuracy of penalties."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from panjue.prompts.tasks.metrics import Row


def charge_precision(gold: Row, predicted: Row | None) -> float:
    """Precision of the charges, mean over the case's defendants."""
    return _over_defendants(gold, predicted, lambda g, p: precision(g["charges"], p["charges"]))


def charge_recall(gold: Row, predicted: Row | None) -> float:
    """Recall of the charges, mean over the case's defendants."""
    return _over_defendants(gold, predicted, lambda g, p: recall(g["charges"], p["charges"]))


def charge_f1(gold: Row, predicted: Row | None) -> float:
    """F1 of the charges, mean over the case's defendants."""
    return _over_defendants(gold, predicted, lambda g, p: f1(g["charges"], p["charges"]))


def article_precision(gold: Row, predicted: Row | None) -> float:
    """Precision of the articles, mean over the case's defendants."""
    return _over_defendants(gold, predicted, lambda g, p: precision(g["articles"], p["articles"]))


def article_recall(gold: Row, predicted: Row | None) -> float:
    """Recall of the articles, mean over the case's defendants."""
    return _over_defendants(gold, predicted, lambda g, p: recall(g["articles"], p["articles"]))


def article_f1(gold: Row, predicted: Row | None) -> float:
    """F1 of the articles, mean over the case's defendants."""
    return _over_defendants(gold, predicted, lambda g, p: f1(g["articles"], p["articles"]))


def penalty_accuracy(gold: Row, predicted: Row | None) -> float:
    """Share of the case's defendants whose penalty class is right."""
    return _over_defendants(gold, predicted, lambda g, p: float(_same_class(g, p)))


def _same_class(gold: Row, predicted: Row) -> bool:
    # False == 0 in Python, and class 0 is death.
    return type(predicted["penalty"]) is not bool and gold["penalty"] == predicted["penalty"]


def final(gold: Row, predicted: Row | None) -> float:
    """0.3 charge F1 + 0.3 article F1 + 0.4 penalty accuracy: what the contest ranks by."""
    return (
        0.3 * charge_f1(gold, predicted)
        + 0.3 * article_f1(gold, predicted)
        + 0.4 * penalty_accuracy(gold, predicted)
    )


def precision(gold: Sequence[str], predicted: Sequence[str]) -> float:
    """Share of the predicted labels that are gold; 0 where nothing is predicted."""
    wanted, given = _as_written(gold), _as_written(predicted)
    return len(wanted & given) / len(given) if given else 0.0


def recall(gold: Sequence[str], predicted: Sequence[str]) -> float:
    """Share of the gold labels that are predicted; 0 where nothing is gold."""
    wanted, given = _as_written(gold), _as_written(predicted)
    return len(wanted & given) / len(wanted) if wanted else 0.0


def f1(gold: Sequence[str], predicted: Sequence[str]) -> float:
    """Harmonic mean of precision and recall; 0 where either is, so 0 where both sets are empty.

    The official code clamps the denominators instead of asking which sets are empty; two empty
    sets therefore score 0 there, and here.
    """
    wanted, given = _as_written(gold), _as_written(predicted)
    return 2 * len(wanted & given) / (len(wanted) + len(given)) if wanted or given else 0.0


def _as_written(labels: Sequence[str | int]) -> set[str]:
    """Return labels as texts: some files have articles as numbers, 264 for "264"."""
    return {str(label) if isinstance(label, int) else label for label in labels}


NO_JUDGMENT: dict[str, Any] = {"charges": (), "articles": (), "penalty": None}


def _over_defendants(gold: Row, predicted: Row | None, score: Callable[[Row, Row], float]) -> float:
    """Mean over the gold defendants, matched by name.

    The official code matches by position and breaks where names or their number differ. Decided
    here: a defendant without a judgment scores 0, of several judgments the first counts, and a
    judgment of somebody who is no defendant changes nothing.
    """
    given = dict(reversed(list(_by_name(predicted))))
    defendants = gold["judgments"]
    return sum(score(j, given.get(j["name"], NO_JUDGMENT)) for j in defendants) / len(defendants)


def _by_name(row: Row | None) -> Iterator[tuple[str, Row]]:
    for judgment in () if row is None else row["judgments"]:
        yield judgment["name"], judgment
