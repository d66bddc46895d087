"""Scores of dialogues: sextuples sentence by sentence, and chains of emotions event by event."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from panjue.eval.matching import Matching, current
from panjue.eval.means import Numbers, Pooled
from panjue.prompts.similarity import best_pairs
from panjue.prompts.task import Row

ALIKE = ("opinion", "rationale", "aspect")
"""Fields that are right where they are alike enough."""

SAME_TEXT = 0.8
"""Cosine from which two texts mean the same."""

SAME_EVENT = 0.7
"""Cosine above which the judge is asked whether two events are one."""

SURE = 1e-9
"""What a cosine may lack by rounding, and what it adds to points so that ties are broken by it."""


def sextuple(gold: Row, row: Row | None) -> float:
    """Return the points of a dialogue's sentences over four times their number.

    A sentence gives one point each for an equal sentiment and for an opinion, a rationale and an
    aspect that mean the same. Where gold has no sextuple only an empty answer gives points, all
    four. Sentences are the same by their position; of several sextuples the best counts.
    """
    chat: Sequence[Row] = gold["chat"]
    told: Sequence[Row] = row["chat"][: len(chat)] if row else []
    points = sum(4.0 for want, got in zip(chat, told, strict=False) if _none(want) and _none(got))
    pairs = [
        (i, want["final_model_response"][0], one)
        for i, (want, got) in enumerate(zip(chat, told, strict=False))
        if not _none(want)
        for one in got["final_model_response"]
        if any(one.values())
    ]
    if pairs:
        right = np.array([want["sentiment"] == one["sentiment"] for _, want, one in pairs], float)
        for field in ALIKE:
            right += _alike([w[field] for _, w, _ in pairs], [one[field] for *_, one in pairs])
        best: dict[int, float] = {}
        for (i, *_), value in zip(pairs, right.tolist(), strict=True):
            best[i] = max(best.get(i, 0.0), value)
        points += sum(best.values())
    return points / (4 * len(chat))


def _none(sentence: Row) -> bool:
    return not any(value for one in sentence["final_model_response"] for value in one.values())


def _alike(texts: Sequence[str], others: Sequence[str]) -> Numbers:
    """Say of each text whether it means the same as the other one in its place."""
    table = current().similar(texts, others)
    return np.asarray(np.diagonal(table) >= SAME_TEXT - SURE, dtype=np.float64)


def _event_counts(gold: Row, row: Row | None) -> list[float]:
    """Return the points of a dialogue and 1, or nothing where gold could not be read."""
    if gold["emo"] is None:
        return [0.0, 0.0]
    told: Mapping[str, Any] = (row["emo"] if row else None) or {}
    points = [
        holder_points(one["events"], told[name]["events"] if name in told else [], current())
        for name, one in gold["emo"].items()
    ]
    if row is None or not points:
        return [0.0, 1.0]
    return [sum(points) / len(points), 1.0]


def holder_points(gold: Sequence[Row], told: Sequence[Row], matching: Matching) -> float:
    """Return the points of one holder, 0-1: each gold event weighs the same.

    Events are matched one to one so that the points are most; two may be matched where their names
    are alike enough and the judge agrees.
    """
    if not gold:
        return 0.0 if told else 1.0
    if not told:
        return 0.0
    names, others = [e["event"] for e in gold], [e["event"] for e in told]
    alike = matching.similar(names, others)
    points = np.full(alike.shape, -1.0)
    for i, j in np.argwhere(alike > SAME_EVENT).tolist():
        if matching.judge(names[i], others[j]):
            points[i, j] = chain_points(gold[i]["emotions"], told[j]["emotions"], matching)
    return _matched(points, alike) / len(gold)


def chain_points(gold: Sequence[Row], told: Sequence[Row], matching: Matching) -> float:
    """Return the points of one event, 0-1: each gold emotion weighs the same.

    Emotions are matched one to one so that the points are most; two may be matched where their
    reasons mean the same. One point each for state and source, over two for each gold emotion.
    """
    if not gold:
        return 0.0 if told else 1.0
    if not told:
        return 0.0
    alike = matching.similar([e["reason"] for e in gold], [e["reason"] for e in told])
    points = np.full(alike.shape, -1.0)
    for i, j in np.argwhere(alike >= SAME_TEXT - SURE).tolist():
        same = [gold[i][key] == told[j][key] for key in ("state", "source_id")]
        points[i, j] = sum(same)
    return _matched(points, alike) / (2 * len(gold))


def _matched(points: Numbers, alike: Numbers) -> float:
    """Return the points of the best matching; below 0 stand pairs that are none."""
    allowed = points >= 0
    worth = np.where(allowed, points + SURE * alike, 0.0)
    return float(sum(points[i, j] for i, j in best_pairs(worth) if allowed[i, j]))


def _mean(sums: Numbers) -> Numbers:
    return np.divide(
        sums[..., 0], sums[..., 1], out=np.zeros_like(sums[..., 0]), where=sums[..., 1] > 0
    )


event = Pooled(2, _event_counts, _mean)
"""Mean over gold's holders, then over the dialogues whose gold emotions can be read; holders that
gold does not have count for nothing."""
