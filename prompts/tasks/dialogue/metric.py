"""Scores of dialogues: sextuples sentence by sentence, and chains of emotions event by event."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from panjue.prompts.tasks.dialogue.matching import Matching
from panjue.prompts.tasks.dialogue.sextuples import FIELDS, emotion_faults, is_texts
from panjue.prompts.tasks.dialogue.similarity import best_pairs
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

ALIKE = ("opinion", "rationale", "aspect")
"""Fields that are right where they are alike enough."""

SAME_TEXT = 0.8
"""Cosine from which two texts mean the same."""

SAME_EVENT = 0.7
"""Cosine above which the judge is asked whether two events are one."""

AT_ONCE = 64
"""Pairs of texts that are compared in one table."""

SURE = 1e-9
"""What a cosine may lack by rounding, and what it adds to points so that ties are broken by it."""


def metrics(matching: Matching) -> tuple[Metric, ...]:
    """Return the metrics, as they compare texts by `matching`.

    `event` is the mean over gold's holders, then over the dialogues whose gold emotions can be
    read; holders that gold does not have count for nothing.
    """

    def sextuple(gold: Row, row: Row | None) -> float:
        return sextuple_points(gold, row, matching)

    return CorpusMetric("event", 2, partial(_event_counts, matching), _mean), sextuple


def sextuple_points(gold: Row, row: Row | None, matching: Matching) -> float:
    """Return the points of a dialogue's sentences over four times their number.

    A sentence gives one point each for an equal sentiment and for an opinion, a rationale and an
    aspect that mean the same. Where gold has no sextuple only an empty answer gives points, all
    four. Sentences are the same by their position; of several sextuples the best counts.
    """
    chat: Sequence[Row] = gold["chat"]
    told: Sequence[Row] = _sentences(row)[: len(chat)] if row else []
    points = sum(4.0 for want, got in zip(chat, told, strict=False) if _none(want) and _none(got))
    pairs = [
        (i, want["final_model_response"][0], one)
        for i, (want, got) in enumerate(zip(chat, told, strict=False))
        if not _none(want)
        for one in got["final_model_response"]
        if any(one.values())
    ]
    if pairs:
        right = _points([(want, one) for _, want, one in pairs], matching)
        best: dict[int, float] = {}
        for (i, *_), value in zip(pairs, right.tolist(), strict=True):
            best[i] = max(best.get(i, 0.0), value)
        points += sum(best.values())
    return points / (4 * len(chat))


def shown(matching: Matching, gold: Row, row: Row | None) -> Iterator[Item]:
    """Yield every sentence with its sextuple, then every holder with its chains of emotions."""
    told = _sentences(row) if row else ()
    for place, want in enumerate(gold["chat"]):
        [one] = want["final_model_response"] or [{}]
        found = told[place]["final_model_response"] if place < len(told) else []
        best = int(_points([(one, of) for of in found], matching).argmax()) if one and found else 0
        other: Row = found[best] if found else {}
        values = {field: (texts(one.get(field)), texts(other.get(field))) for field in FIELDS}
        fields = [same("sentiment", *values["sentiment"])] + [
            Field(
                field, *pair, pair[0] == pair[1] or (all(pair) and bool(_alike(*pair, matching)[0]))
            )
            for field, pair in values.items()
            if field in ALIKE
        ]
        yield f"{want['holder']}：{want['input_sentence']}", fields
    emotions = (row["emo"] if row else None) or {}
    for name, holder in (gold["emo"] or {}).items():
        found = emotions.get(name, {"events": []})["events"]
        right = holder_points(holder["events"], found, matching) == 1
        yield name, [Field("emotions", chains(holder["events"]), chains(found), right)]


def _points(pairs: Sequence[tuple[Row, Row]], matching: Matching) -> Numbers:
    """Return the points of each sextuple beside its gold one, 0-4."""
    right = np.array([want["sentiment"] == told["sentiment"] for want, told in pairs], float)
    for field in ALIKE:
        wanted, found = [want[field] for want, _ in pairs], [told[field] for _, told in pairs]
        right += _alike(wanted, found, matching)
    return right


def chains(events: Sequence[Row]) -> list[str]:
    """Return a line for each emotion: its event, state, source and reason."""
    return [
        f"{event['event']}: {one['state']} ← {one['source_id']}: {one['reason']}"
        for event in events
        for one in event["emotions"]
    ]


def _sentences(row: Row) -> Sequence[Row]:
    """Return the sentences of a submission row.

    Raises:
        TypeError: One has no list of sextuples, or a sextuple is no object of texts.
    """
    for one in row["chat"]:
        listed = one["final_model_response"]
        if not isinstance(listed, list) or not all(is_texts(told, FIELDS) for told in listed):
            raise TypeError("no list of sextuples")
    sentences: Sequence[Row] = row["chat"]
    return sentences


def _none(sentence: Row) -> bool:
    return not any(value for one in sentence["final_model_response"] for value in one.values())


def _alike(texts: Sequence[str], others: Sequence[str], matching: Matching) -> Numbers:
    """Say of each text whether it means the same as the other one in its place."""
    found: list[float] = []
    for start in range(0, len(texts), AT_ONCE):  # a table of all by all would grow with its square
        some = slice(start, start + AT_ONCE)
        found += np.diagonal(matching.similar(texts[some], others[some])).tolist()
    return np.asarray(np.array(found) >= SAME_TEXT - SURE, dtype=np.float64)


def _same_texts(pair: tuple[Sequence[str], Sequence[str]], matching: Matching) -> bool:
    return all(pair) and bool(_alike(*pair, matching)[0])


def _event_counts(matching: Matching, gold: Row, row: Row | None) -> list[float]:
    """Return the points of a dialogue and 1, or nothing where gold has none or none readable."""
    if not gold["emo"]:
        return [0.0, 0.0]
    told: Mapping[str, Any] = (row["emo"] if row else None) or {}
    if any(emotion_faults(told)):
        raise TypeError("no emotions")
    points = [
        holder_points(one["events"], told[name]["events"] if name in told else [], matching)
        for name, one in gold["emo"].items()
    ]
    return [sum(points) / len(points) if row else 0.0, 1.0]


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
    nothing = np.full_like(sums[..., 0], np.nan)  # of no dialogue is there anything to score
    return np.divide(sums[..., 0], sums[..., 1], out=nothing, where=sums[..., 1] > 0)
