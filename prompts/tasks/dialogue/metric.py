"""Metrics of dialogues: sextuples by sentence, and emotion chains by event."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from panjue.prompts.tasks.dialogue.sextuples import FIELDS, emotion_faults, is_texts
from panjue.prompts.tasks.dialogue.similarity import Matching, best_pairs
from panjue.prompts.tasks.metrics import (
    CorpusMetric,
    Field,
    Item,
    Metric,
    Numbers,
    Row,
    same,
    texts,
)

TEXT_FIELDS = ("opinion", "rationale", "aspect")
"""Fields that are right if the two texts mean the same."""

MIN_TEXT_COSINE = 0.8
"""Two texts with at least this cosine mean the same."""

MIN_EVENT_COSINE = 0.7
"""The judge decides on two events with a higher cosine."""

BATCH_SIZE = 64
"""Pairs of texts per matrix of cosines."""

EPSILON = 1e-9
"""Rounding error allowed in a cosine; also the weight of cosines in points, which breaks ties."""


def metrics(matching: Matching) -> tuple[Metric, ...]:
    """Return the metrics, which compare texts by `matching`.

    `event` is the mean over gold's holders, then over the dialogues with readable gold emotions;
    holders that are not in gold do not count.
    """

    def sextuple(gold: Row, row: Row | None) -> float:
        return sextuple_points(gold, row, matching)

    return CorpusMetric("event", 2, partial(_event_counts, matching), _mean), sextuple


def sextuple_points(gold: Row, row: Row | None, matching: Matching) -> float:
    """Return the points of a dialogue's sentences, divided by four times their number.

    A sentence gives one point each for an equal sentiment and for an opinion, a rationale and an
    aspect that mean the same. If gold has no sextuple, only an empty answer gives points, all
    four. Sentences are matched by position; of several sextuples the best counts.
    """
    chat: Sequence[Row] = gold["chat"]
    predicted: Sequence[Row] = _sentences(row)[: len(chat)] if row else []
    sentences = list(zip(chat, predicted, strict=False))
    points = sum(4.0 for g, p in sentences if _is_empty(g) and _is_empty(p))
    pairs = [
        (i, g["final_model_response"][0], sextuple)
        for i, (g, p) in enumerate(sentences)
        if not _is_empty(g)
        for sextuple in p["final_model_response"]
        if any(sextuple.values())
    ]
    if pairs:
        scores = _points([(g, p) for _, g, p in pairs], matching)
        best: dict[int, float] = {}
        for (i, *_), score in zip(pairs, scores.tolist(), strict=True):
            best[i] = max(best.get(i, 0.0), score)
        points += sum(best.values())
    return points / (4 * len(chat))


def shown(matching: Matching, gold: Row, row: Row | None) -> Iterator[Item]:
    """Yield every sentence with its sextuple, then every holder with its emotion chains."""
    sentences = _sentences(row) if row else ()
    for i, sentence in enumerate(gold["chat"]):
        [sextuple] = sentence["final_model_response"] or [{}]
        candidates = sentences[i]["final_model_response"] if i < len(sentences) else []
        best = 0
        if sextuple and candidates:
            best = int(_points([(sextuple, c) for c in candidates], matching).argmax())
        predicted: Row = candidates[best] if candidates else {}
        values = {f: (texts(sextuple.get(f)), texts(predicted.get(f))) for f in FIELDS}
        fields = [same("sentiment", *values["sentiment"])] + [
            Field(field, *pair, pair[0] == pair[1] or _same_texts(pair, matching))
            for field, pair in values.items()
            if field in TEXT_FIELDS
        ]
        yield f"{sentence['holder']}：{sentence['input_sentence']}", fields
    emotions = (row["emo"] if row else None) or {}
    for name, holder in (gold["emo"] or {}).items():
        events = emotions.get(name, {"events": []})["events"]
        is_right = holder_points(holder["events"], events, matching) == 1
        yield name, [Field("emotions", chains(holder["events"]), chains(events), is_right)]


def _points(pairs: Sequence[tuple[Row, Row]], matching: Matching) -> Numbers:
    """Return the points, 0-4, of each (gold, predicted) pair of sextuples."""
    points = np.array([g["sentiment"] == p["sentiment"] for g, p in pairs], float)
    for field in TEXT_FIELDS:
        golds, predictions = [g[field] for g, _ in pairs], [p[field] for _, p in pairs]
        points += _means_same(golds, predictions, matching)
    return points


def chains(events: Sequence[Row]) -> list[str]:
    """Return a line for each emotion: its event, state, source and reason."""
    return [
        f"{event['event']}: {emotion['state']} ← {emotion['source_id']}: {emotion['reason']}"
        for event in events
        for emotion in event["emotions"]
    ]


def _sentences(row: Row) -> Sequence[Row]:
    """Return the sentences of a row; TypeError: one has no list of sextuples, objects of texts."""
    for sentence in row["chat"]:
        sextuples = sentence["final_model_response"]
        if not isinstance(sextuples, list) or not all(is_texts(s, FIELDS) for s in sextuples):
            raise TypeError("no list of sextuples")
    sentences: Sequence[Row] = row["chat"]
    return sentences


def _is_empty(sentence: Row) -> bool:
    sextuples = sentence["final_model_response"]
    return not any(value for sextuple in sextuples for value in sextuple.values())


def _means_same(texts: Sequence[str], others: Sequence[str], matching: Matching) -> Numbers:
    """Return 1 for each text that means the same as the other text at its index, else 0."""
    cosines: list[float] = []
    for start in range(0, len(texts), BATCH_SIZE):  # one matrix would be quadratic in memory
        batch = slice(start, start + BATCH_SIZE)
        cosines += np.diagonal(matching.similar(texts[batch], others[batch])).tolist()
    return np.asarray(np.array(cosines) >= MIN_TEXT_COSINE - EPSILON, dtype=np.float64)


def _same_texts(pair: tuple[Sequence[str], Sequence[str]], matching: Matching) -> bool:
    return all(pair) and bool(_means_same(*pair, matching)[0])


def _event_counts(matching: Matching, gold: Row, row: Row | None) -> list[float]:
    """Return [points of a dialogue, 1], or zeros if gold has no readable emotions."""
    if not gold["emo"]:
        return [0.0, 0.0]
    predicted: Mapping[str, Any] = (row["emo"] if row else None) or {}
    if any(emotion_faults(predicted)):
        raise TypeError("no emotions")
    nothing: Row = {"events": []}
    points = [
        holder_points(holder["events"], predicted.get(name, nothing)["events"], matching)
        for name, holder in gold["emo"].items()
    ]
    return [sum(points) / len(points) if row else 0.0, 1.0]


def holder_points(gold: Sequence[Row], predicted: Sequence[Row], matching: Matching) -> float:
    """Return the points of one holder, 0-1: each gold event has the same weight.

    Events are matched one to one with the maximum of points. Two events may be matched if their
    names are similar and the judge agrees.
    """
    if not gold or not predicted:
        return float(not gold and not predicted)
    gold_names, names = [e["event"] for e in gold], [e["event"] for e in predicted]
    cosines = matching.similar(gold_names, names)
    points = np.full(cosines.shape, -1.0)
    for i, j in np.argwhere(cosines > MIN_EVENT_COSINE).tolist():
        if matching.judge(gold_names[i], names[j]):
            points[i, j] = chain_points(gold[i]["emotions"], predicted[j]["emotions"], matching)
    return _best_sum(points, cosines) / len(gold)


def chain_points(gold: Sequence[Row], predicted: Sequence[Row], matching: Matching) -> float:
    """Return the points of one event, 0-1: each gold emotion has the same weight.

    Emotions are matched one to one with the maximum of points. Two emotions may be matched if
    their reasons mean the same: one point each for state and source, of two per gold emotion.
    """
    if not gold or not predicted:
        return float(not gold and not predicted)
    cosines = matching.similar([e["reason"] for e in gold], [e["reason"] for e in predicted])
    points = np.full(cosines.shape, -1.0)
    for i, j in np.argwhere(cosines >= MIN_TEXT_COSINE - EPSILON).tolist():
        points[i, j] = sum(gold[i][key] == predicted[j][key] for key in ("state", "source_id"))
    return _best_sum(points, cosines) / (2 * len(gold))


def _best_sum(points: Numbers, cosines: Numbers) -> float:
    """Return the points of the best matching; pairs below 0 are not allowed."""
    allowed = points >= 0
    weights = np.where(allowed, points + EPSILON * cosines, 0.0)
    return float(sum(points[i, j] for i, j in best_pairs(weights) if allowed[i, j]))


def _mean(sums: Numbers) -> Numbers:
    nan = np.full_like(sums[..., 0], np.nan)  # the mean of no dialogues
    return np.divide(sums[..., 0], sums[..., 1], out=nan, where=sums[..., 1] > 0)
