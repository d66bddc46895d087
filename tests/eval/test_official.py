"""The official scorers agree: written anew from their definitions, and where they are present.

`PANJUE_OFFICIAL` names a folder with clones of the organisers' repositories.
"""

import math
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.metrics import accuracy_score, f1_score

from panjue.eval.values import MetricValues, metric_values, summarize
from panjue.prompts.example import Example
from panjue.prompts.task import load_task
from panjue.prompts.tasks.reading.task import leave_one_out

Row = dict[str, Any]
Case = tuple[Example, Row, Row]
"""Example, gold row, row of the submission."""

CLASSES = {"severity": (6, False), "scotus": (14, False), "fscs": (2, False), "ecthr": (10, True)}
"""Task of FairLex -> the number of its classes, and whether an answer is a set of them."""


def official(repository: str) -> Path:
    """Return the organisers' repository of this name; skip where it is absent."""
    folder = Path(os.environ.get("PANJUE_OFFICIAL", "/nowhere"), repository)
    if not folder.is_dir():
        pytest.skip(f"no {folder}: PANJUE_OFFICIAL names no folder with it")
    return folder


def judgments(draw: random.Random) -> list[Case]:
    def labels() -> list[str]:
        return draw.sample("abcde", draw.choice([0, 1, 1, 2, 3]))

    def judgment(name: str) -> Row:
        penalty = draw.choice([0, 1, 13, 14])
        return {"name": name, "charges": labels(), "articles": labels(), "penalty": penalty}

    cases = []
    for number in range(draw.randint(1, 4)):
        names = [f"甲{i}" for i in range(draw.choice([1, 1, 2, 3, 7]))]
        gold, told = ({"judgments": [judgment(name) for name in names]} for _ in range(2))
        cases.append((Example(number, "事", names=tuple(names)), gold, told))
    return cases


def judgment_scores(cases: Sequence[Case]) -> dict[str, float]:
    """CMDL: means over defendants, cases weighted by log2 of their number."""
    means, weights = [], []
    for _, gold, told in cases:
        rows = []
        for right, given in zip(gold["judgments"], told["judgments"], strict=True):
            values = []
            for field in ("charges", "articles"):
                hits = len({*right[field]} & {*given[field]})
                precision = hits / max(1, len(given[field]))
                recall = hits / max(1, len(right[field]))
                f1 = 2 * precision * recall / max(precision + recall, 1e-9)
                values += [precision, recall, f1]
            same = float(right["penalty"] == given["penalty"])
            rows.append([*values, same, 0.3 * values[2] + 0.3 * values[5] + 0.4 * same])
        means.append(np.mean(rows, axis=0))
        weights.append(math.log2(len(rows)))
    total = np.average(means, axis=0, weights=weights if any(weights) else None)
    return dict(zip(load_task("judgment").score.names, total.tolist(), strict=True))


def answers(draw: random.Random) -> list[Case]:
    def text() -> str:
        return "".join(draw.choices("甲乙丙Ab1 ，。《", k=draw.randint(0, 6)))

    cases = []
    for number in range(draw.randint(1, 4)):
        references = tuple(text() for _ in range(draw.randint(1, 4)))
        example = Example(number, "事", references=leave_one_out(references))
        told = {"id": number, "answer": draw.choice([text(), *references])}
        cases.append((example, {"references": example.references, "all": references}, told))
    return cases


def token_f1(gold: Sequence[str], told: Sequence[str]) -> float:
    same = (Counter(gold) & Counter(told)).total()
    if not gold or not told:
        return float(gold == told)
    if not same:
        return 0.0
    precision, recall = same / len(told), same / len(gold)
    return 2 * precision * recall / (precision + recall)


def reading_scores(cases: Sequence[Case]) -> dict[str, float]:
    """CJRC: each reference is left out once; the best of the others, characters as a multiset."""

    def characters(text: str) -> list[str]:
        return list(re.sub("[ ，。《]", "", text.lower()))

    sums = {"f1": 0.0, "em": 0.0}
    for _, gold, told in cases:
        golds, answer = [characters(text) for text in gold["all"]], characters(told["answer"])
        left = [golds[:i] + golds[i + 1 :] for i in range(len(golds))] if golds[1:] else [golds]
        sums["f1"] += fmean([max(token_f1(g, answer) for g in of) for of in left])
        sums["em"] += fmean([any(g == answer for g in of) for of in left])
    return {name: value / len(cases) for name, value in sums.items()}


def places(draw: random.Random) -> list[Case]:
    def text() -> str:
        words = draw.choices(["The", "sea", "a", "red", "SEA,", "-", "11"], k=draw.randint(1, 4))
        return " ".join(words)

    cases = []
    for number in range(draw.randint(1, 4)):
        gold = tuple(text() for _ in range(draw.randint(1, 3)))
        told = {"id": number, "ret": [text() for _ in range(draw.randint(1, 5))]}
        cases.append((Example(number, "x", references=(gold,)), {"references": (gold,)}, told))
    return cases


def cloze_scores(cases: Sequence[Case]) -> dict[str, float]:
    """KCT: the best pair by F1 of words without punctuation and articles."""

    def words(text: str) -> list[str]:
        return [w for w in re.sub(r"[^\w\s]", "", text.lower()).split() if w not in {"a", "the"}]

    best = [
        max(token_f1(words(g), words(t)) for g in gold["references"][0] for t in told["ret"])
        for _, gold, told in cases
    ]
    return {"f1": float(np.mean(best))}


def classes(name: str) -> Callable[[random.Random], list[Case]]:
    size, several = CLASSES[name]
    words = load_task(name).score.order["class"]

    def drawn(draw: random.Random) -> list[Case]:
        def row(number: int) -> Row:
            if several:
                chosen = sorted(draw.sample(range(size), draw.choice([0, 0, 1, 2])))
                return {"id": number, "labels": chosen}
            label = draw.choice([0, 1, size - 1, draw.randrange(size)])
            return {"id": number, "label": words[label] if name == "scotus" else label}

        numbers = range(draw.randint(1, 8))
        return [(Example(n, "text"), row(n), row(n)) for n in numbers]

    return drawn


def fairlex_scores(name: str) -> Callable[[Sequence[Case]], dict[str, float]]:
    size, several = CLASSES[name]

    def column(rows: Iterable[Row]) -> NDArray[Any]:
        if not several:
            return np.array([row["label"] for row in rows])
        # FairLex adds a column for "no article is violated", in gold and in predictions.
        chosen = [row["labels"] or [size] for row in rows]
        return np.array([np.isin(range(size + 1), labels) for labels in chosen])

    def scores(cases: Sequence[Case]) -> dict[str, float]:
        gold = column(right for _, right, _ in cases)
        told = column(given for _, _, given in cases)
        # wilds, with one class per example: the classes that occur in gold.
        labels = None if several else np.unique(gold)
        f1 = f1_score(gold, told, labels=labels, average="macro", zero_division=0)
        return {"accuracy": float(accuracy_score(gold, told)), "macro_f1": float(f1)}

    return scores


SCORERS: dict[str, tuple[Callable[[random.Random], list[Case]], Any]] = {
    "judgment": (judgments, judgment_scores),
    "reading": (answers, reading_scores),
    "cloze": (places, cloze_scores),
    **{name: (classes(name), fairlex_scores(name)) for name in CLASSES},
}


@pytest.mark.parametrize("name", SCORERS)
def test_the_official_scorer_gives_the_same(name: str, request: pytest.FixtureRequest) -> None:
    task, (make, official) = load_task(name), SCORERS[name]
    largest = 0.0
    for seed in range(10_000 if request.config.getoption("--torture") else 200):
        cases = make(random.Random(seed))
        values = MetricValues(task)
        for example, gold, told in cases:
            values.add(example, metric_values(task, gold, told, "here"))
        found, expected = summarize(values, resamples=0).mean, official(cases)
        assert found.keys() == expected.keys()
        largest = max(largest, *(abs(found[key] - expected[key]) for key in found))
    assert largest <= 1e-9
