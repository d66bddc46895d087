"""Metrics of dialogues: sextuples of sentences, and emotion chains of events."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from panjue.prompts.tasks.dialogue.similarity import cosine
from panjue.prompts.tasks.dialogue.submission import Sentence, events_by_holder, sentences_of
from panjue.prompts.tasks.metrics import CorpusMetric, Field, Item, Numbers, Row, texts

TEXT_FIELDS = ("opinion", "rationale", "aspect")
"""Fields that are right if the two texts mean the same."""

MIN_TEXT_COSINE = 0.8 - 1e-9  # a rounding error is allowed
"""Two texts with a higher cosine mean the same."""

MIN_EVENT_COSINE = 0.7
"""Two events with a higher cosine are the same event."""


def sextuple(gold: Row, row: Row | None) -> float:
    """Return the points of a dialogue's sentences, divided by four times their number.

    A sentence gives one point for an equal sentiment, and one each for an opinion, a rationale and
    an aspect that mean the same. If gold has none for a sentence, an empty answer gives all four
    points, and any other answer gives none. Sentences are matched by position. Gold has one
    sextuple for a sentence at most; of several predicted ones, the best counts.
    """
    golds = sentences_of(gold["chat"])
    points = 0
    for right, given in zip(golds, _sentences(row), strict=False):
        if right.sextuples:
            best = [_sextuple_points(right.sextuples[0], one) for one in given.sextuples]
            points += max(best, default=0)
        elif not given.sextuples:
            points += 4
    return points / max(1, 4 * len(golds))  # an answer that is its own gold may have no sentence


def _sentences(row: Row | None) -> list[Sentence]:
    return sentences_of(row["chat"]) if row else []


def _sextuple_points(right: Row, given: Row) -> int:
    """Return the points, 0-4, of a predicted sextuple."""
    points = int(right["sentiment"] == given["sentiment"])
    for field in TEXT_FIELDS:
        points += means_the_same(right[field], given[field])
    return points


def means_the_same(text: str, other: str) -> bool:
    """Say whether two texts of an answer are so similar that they count as equal."""
    return cosine(text, other) > MIN_TEXT_COSINE


def shown(gold: Row, row: Row | None) -> Iterator[Item]:
    """Yield every sentence with its sextuple, then every holder with its emotion chains."""
    unanswered = Sentence("", "", [])
    answers = chain(_sentences(row), repeat(unanswered))
    for right, given in zip(sentences_of(gold["chat"]), answers, strict=False):
        yield f"{right.holder}：{right.text}", _shown_fields(right.sextuples, given.sextuples)
    predicted = _events(row)
    for name, golds in _events(gold).items():
        events = predicted.get(name, [])
        is_right = holder_points(golds, events) == 1
        yield name, [Field("emotions", _emotion_lines(golds), _emotion_lines(events), is_right)]


def _events(row: Row | None) -> dict[str, list[dict[str, Any]]]:
    return events_by_holder(row["emo"]) if row else {}


def _shown_fields(right: Sequence[Row], given: Sequence[Row]) -> list[Field]:
    """Return the fields of a sentence: gold, and the best of the given sextuples."""
    gold: Row = right[0] if right else {}  # gold has at most one for a sentence
    best: Row = given[0] if given else {}
    if right and given:
        best = max(given, key=lambda one: _sextuple_points(gold, one))
    fields = []
    for name in ("sentiment", "aspect", "opinion", "rationale"):
        golds = texts(gold.get(name))
        predictions = texts(best.get(name))
        is_right = golds == predictions
        if name in TEXT_FIELDS and golds and predictions:
            is_right = means_the_same(golds[0], predictions[0])
        fields.append(Field(name, golds, predictions, is_right))
    return fields


def _emotion_lines(events: Sequence[Row]) -> list[str]:
    """Return a line for each emotion: its event, state, source and reason."""
    lines = []
    for event in events:
        for one in event["emotions"]:
            lines.append(f"{event['event']}: {one['state']} ← {one['source_id']}: {one['reason']}")
    return lines


def _event_counts(gold: Row, row: Row | None) -> list[float]:
    """Return [points of a dialogue, 1], or zeros if gold has no readable emotions."""
    golds = _events(gold)
    if not golds:
        return [0.0, 0.0]
    predicted = _events(row)
    points = 0.0
    if row:
        for name, events in golds.items():
            points += holder_points(events, predicted.get(name, []))
    return [points / len(golds), 1.0]


def holder_points(gold: Sequence[Row], predicted: Sequence[Row]) -> float:
    """Return the points of one holder, 0-1, from the events with similar names."""
    return _matched_points(gold, predicted, "event", MIN_EVENT_COSINE, _event_points)


def _event_points(right: Row, given: Row) -> float:
    """Return the points of one event, 0-1, from emotions whose reasons mean the same."""
    emotions = given["emotions"]
    return _matched_points(right["emotions"], emotions, "reason", MIN_TEXT_COSINE, _emotion_points)


def _emotion_points(right: Row, given: Row) -> float:
    """Return the points of an emotion: one half for the state, one half for the source.

    The reasons mean the same, since `_event_points` matches only such emotions.
    """
    points = int(right["state"] == given["state"])
    points += int(right["source_id"] == given["source_id"])
    return points / 2


def _matched_points(
    gold: Sequence[Row],
    predicted: Sequence[Row],
    field: str,
    min_cosine: float,
    points_of: Callable[[Row, Row], float],
) -> float:
    """Return the mean points of the gold items, matched one to one for the most points.

    Two items may be matched if the cosine of this field is above `min_cosine`. If both sides have
    no items, the points are 1; if only one has none, 0.
    """
    if not gold or not predicted:
        return float(not gold and not predicted)
    points = np.zeros((len(gold), len(predicted)))
    for i, right in enumerate(gold):
        for j, given in enumerate(predicted):
            if cosine(right[field], given[field]) > min_cosine:
                points[i, j] = points_of(right, given)
    matching = linear_sum_assignment(points, maximize=True)
    total: float = sum(points[matching].tolist())
    return total / len(gold)


def _mean(sums: Numbers) -> Numbers:
    """Return the mean points of the dialogues, from sums of `_event_counts`."""
    points = sums[..., 0]
    dialogues = sums[..., 1]
    nan = np.full_like(points, np.nan)  # the mean of no dialogues
    return np.divide(points, dialogues, out=nan, where=dialogues > 0)


DIALOGUE_METRICS = (CorpusMetric("event", 2, _event_counts, _mean), sextuple)
"""`event` is the mean over the holders in gold, then over the dialogues with readable gold
emotions. Holders that are not in gold do not count."""
