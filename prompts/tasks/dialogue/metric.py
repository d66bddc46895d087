"""Metrics of dialogues: sextuples by sentence, and emotion chains by event."""

from collections.abc import Iterator, Sequence
from itertools import chain, repeat

import numpy as np

from panjue.prompts.tasks.dialogue.sextuples import SEXTUPLE, emotion_faults, is_texts
from panjue.prompts.tasks.dialogue.similarity import best_pairs, cosine, table
from panjue.prompts.tasks.metrics import CorpusMetric, Field, Item, Numbers, Row, texts

TEXT_FIELDS = ("opinion", "rationale", "aspect")
"""Fields that are right if the two texts mean the same."""

MIN_TEXT_COSINE = 0.8
"""Two texts with at least this cosine mean the same."""

MIN_EVENT_COSINE = 0.7
"""Two events with a higher cosine are the same event."""

EPSILON = 1e-9
"""Rounding error allowed in a cosine; also the weight of cosines in points, which breaks ties."""

NOTHING: Row = {"events": []}


def sextuple(gold: Row, row: Row | None) -> float:
    """Return the points of a dialogue's sentences, divided by four times their number.

    A sentence gives one point each for an equal sentiment and for an opinion, a rationale and an
    aspect that mean the same. If gold has no sextuple, only an empty answer gives points, all
    four. Sentences are matched by position; of several sextuples the best counts.
    """
    answers = _sextuples(row)[: len(gold["chat"])]
    points = 0
    for right, given in zip(_sextuples(gold), answers, strict=False):
        if right:
            points += max((_points(right[0], one) for one in given), default=0)
        elif not given:
            points += 4
    return points / (4 * len(gold["chat"]))


def _sextuples(row: Row | None) -> list[list[Row]]:
    """Return the sextuples of each sentence that are not empty.

    TypeError: a sentence has no list of sextuples, objects of texts.
    """
    sentences = []
    for sentence in row["chat"] if row else ():
        sextuples = sentence["final_model_response"]
        if not isinstance(sextuples, list) or not all(is_texts(s, SEXTUPLE) for s in sextuples):
            raise TypeError("no list of sextuples")
        sentences.append([sextuple for sextuple in sextuples if any(sextuple.values())])
    return sentences


def _points(right: Row, given: Row) -> int:
    """Return the points, 0-4, of a predicted sextuple."""
    points = int(right["sentiment"] == given["sentiment"])
    for field in TEXT_FIELDS:
        points += means_the_same(right[field], given[field])
    return points


def means_the_same(text: str, other: str) -> bool:
    return cosine(text, other) >= MIN_TEXT_COSINE - EPSILON


def shown(gold: Row, row: Row | None) -> Iterator[Item]:
    """Yield every sentence with its sextuple, then every holder with its emotion chains."""
    yield from _shown_sentences(gold, row)
    yield from _shown_holders(gold, row)


def _shown_sentences(gold: Row, row: Row | None) -> Iterator[Item]:
    answers = chain(_sextuples(row), repeat([]))
    for sentence, right in zip(gold["chat"], _sextuples(gold), strict=True):
        given = next(answers)
        title = f"{sentence['holder']}：{sentence['input_sentence']}"
        yield title, _shown_fields(right, given)


def _shown_holders(gold: Row, row: Row | None) -> Iterator[Item]:
    emotions = (row["emo"] if row else None) or {}
    for name, holder in (gold["emo"] or {}).items():
        golds = holder["events"]
        events = emotions.get(name, NOTHING)["events"]
        is_right = holder_points(golds, events) == 1
        yield name, [Field("emotions", chains(golds), chains(events), is_right)]


def _shown_fields(right: list[Row], given: list[Row]) -> list[Field]:
    """Return the fields of a sentence: gold and the best of the given sextuples."""
    gold: Row = right[0] if right else {}
    best: Row = given[0] if given else {}
    if right and given:
        best = max(given, key=lambda one: _points(gold, one))
    fields = []
    for name in ("sentiment", "aspect", "opinion", "rationale"):
        golds = texts(gold.get(name))
        predictions = texts(best.get(name))
        is_right = golds == predictions
        if name in TEXT_FIELDS and golds and predictions:
            is_right = means_the_same(golds[0], predictions[0])
        fields.append(Field(name, golds, predictions, is_right))
    return fields


def chains(events: Sequence[Row]) -> list[str]:
    """Return a line for each emotion: its event, state, source and reason."""
    lines = []
    for event in events:
        for one in event["emotions"]:
            lines.append(f"{event['event']}: {one['state']} ← {one['source_id']}: {one['reason']}")
    return lines


def _event_counts(gold: Row, row: Row | None) -> list[float]:
    """Return [points of a dialogue, 1], or zeros if gold has no readable emotions."""
    if not gold["emo"]:
        return [0.0, 0.0]
    if not row:
        return [0.0, 1.0]
    predicted: Row = row["emo"] or {}
    if any(emotion_faults(predicted)):
        raise TypeError("no emotions")
    points = 0.0
    for name, holder in gold["emo"].items():
        events = predicted.get(name, NOTHING)["events"]
        points += holder_points(holder["events"], events)
    return [points / len(gold["emo"]), 1.0]


def holder_points(gold: Sequence[Row], predicted: Sequence[Row]) -> float:
    """Return the points of one holder, 0-1: each gold event has the same weight.

    Events are matched one to one with the maximum of points. Two events may be matched if their
    names are similar.
    """
    if not gold or not predicted:
        return float(not gold and not predicted)
    golds = [event["event"] for event in gold]
    names = [event["event"] for event in predicted]
    cosines = table(golds, names)
    points = np.full(cosines.shape, -1.0)
    for i, j in np.argwhere(cosines > MIN_EVENT_COSINE).tolist():
        points[i, j] = chain_points(gold[i]["emotions"], predicted[j]["emotions"])
    return _best_sum(points, cosines) / len(gold)


def chain_points(gold: Sequence[Row], predicted: Sequence[Row]) -> float:
    """Return the points of one event, 0-1: each gold emotion has the same weight.

    Emotions are matched one to one with the maximum of points. Two emotions may be matched if
    their reasons mean the same: one point each for state and source, of two per gold emotion.
    """
    if not gold or not predicted:
        return float(not gold and not predicted)
    golds = [emotion["reason"] for emotion in gold]
    reasons = [emotion["reason"] for emotion in predicted]
    cosines = table(golds, reasons)
    points = np.full(cosines.shape, -1.0)
    for i, j in np.argwhere(cosines >= MIN_TEXT_COSINE - EPSILON).tolist():
        points[i, j] = _emotion_points(gold[i], predicted[j])
    return _best_sum(points, cosines) / (2 * len(gold))


def _emotion_points(right: Row, given: Row) -> int:
    """Return the points, 0-2, of a predicted emotion whose reason is right."""
    points = int(right["state"] == given["state"])
    points += int(right["source_id"] == given["source_id"])
    return points


def _best_sum(points: Numbers, cosines: Numbers) -> float:
    """Return the points of the best matching; pairs below 0 are not allowed."""
    weights = np.where(points >= 0, points + EPSILON * cosines, 0.0)
    total = 0.0
    for pair in best_pairs(weights):
        total += max(float(points[pair]), 0.0)
    return total


def _mean(sums: Numbers) -> Numbers:
    points = sums[..., 0]
    dialogues = sums[..., 1]
    nan = np.full_like(points, np.nan)  # the mean of no dialogues
    return np.divide(points, dialogues, out=nan, where=dialogues > 0)


DIALOGUE_METRICS = (CorpusMetric("event", 2, _event_counts, _mean), sextuple)
"""`event` is the mean over gold's holders, then over the dialogues with readable gold emotions;
holders that are not in gold do not count."""
