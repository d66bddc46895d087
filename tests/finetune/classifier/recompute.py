"""The words and numbers of `classifier.why`, again from the stored file: with loops, without it.

It reads the arrays and LightGBM's own texts, and imports nothing of `panjue.finetune`.
"""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import lightgbm
import numpy as np

from panjue.prompts.example import Example
from panjue.prompts.names import places_in_plain
from panjue.prompts.plain import plain_text
from panjue.prompts.shorten import split_sentences

NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?余?万?")
TOKEN = re.compile(r"[^\W\d_\u4e00-\u9fff]+|[\u4e00-\u9fff\ue000-\uf8ff]")
OWN, OTHER, FIRST_NAME = "\ue000", "\ue001", 0xE010
CANDIDATES = 8
TINY = 1e-9


def of_size(found: re.Match[str]) -> str:
    """Return the character that stands for all numbers of about this size."""
    value = float(found[0].rstrip("余万").replace(",", ""))
    value *= 10_000 if found[0].endswith("万") else 1
    if value <= 0:
        return chr(0xF000)
    thirds = round(3 * math.log10(min(value, 1e30)))
    return chr(0xF000 + max(1, min(99, thirds + 10)))


Character = tuple[str, int]
"""A character of a text, and the number of its sentence."""


def grams_of(text: Sequence[Character], names: int, own: int) -> list[tuple[str, int]]:
    """Return the tokens and pairs of neighbors of a text, each with the number of its sentence."""
    masked = ""
    for one, _ in text:
        number = ord(one) - FIRST_NAME
        masked += (OWN if number == own else OTHER) if 0 <= number < names else one
    lowered = masked.lower()
    assert len(lowered) == len(text), "one character becomes two"
    tokens = []
    for found in re.finditer(f"{NUMBER.pattern}|{TOKEN.pattern}", lowered):
        tokens.append((NUMBER.sub(of_size, found[0]), text[found.start()][1]))
    assert [token for token, _ in tokens] == TOKEN.findall(NUMBER.sub(of_size, lowered))
    pairs = [(f"{one} {other}", number) for (one, number), (other, _) in pairwise(tokens)]
    return [*tokens, *pairs]


@dataclass
class Stored:
    """A stored classifier: arrays, and what is written about them."""

    arrays: dict[str, Any]
    about: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> "Stored":
        with np.load(path, allow_pickle=False) as archive:
            arrays = dict(archive)
        return cls(arrays, json.loads(arrays["about"].tobytes()))

    @property
    def labels(self) -> list[tuple[str, str]]:
        """Return field and label of each column of the weights."""
        fields = self.about["fields"].items()
        return [(name, label) for name, field in fields for label in field["labels"]]

    def vector(self, view: int, grams: Counter[str]) -> list[tuple[int, np.float32, str]]:
        """Return column, value and n-gram of those that count; the vector has length 1."""
        column_of = {int(hashed): n for n, hashed in enumerate(self.arrays[f"{view}.kept"])}
        found = {}
        for gram, count in grams.items():
            column = column_of.get(crc32(gram.encode()))
            if column is not None:
                inverse = float(self.arrays[f"{view}.idf"][column])
                found[column] = ((1 + math.log(count)) * inverse, gram)
        length = math.sqrt(sum(value * value for value, _ in found.values()))
        return [(n, np.float32(value / length), gram) for n, (value, gram) in sorted(found.items())]

    def weights(self, view: int, column: int) -> dict[int, np.float32]:
        start, end = self.arrays[f"{view}.indptr"][column : column + 2]
        labels = self.arrays[f"{view}.indices"][start:end].tolist()
        return dict(zip(labels, self.arrays[f"{view}.data"][start:end], strict=True))


@dataclass
class Recomputed:
    """Of one item: what its n-grams contribute to each label, by whole text and own clauses."""

    contributions: list[list[dict[str, float]]]  # [2, labels]
    sentences: list[list[tuple[str, int]]]
    """The n-grams of both texts as they stand there, each with the number of its sentence."""
    scores: Any  # [2, labels]
    known: float

    def words(self, label: int) -> dict[str, float]:
        """Return n-gram -> contribution by both texts."""
        sums: dict[str, float] = defaultdict(float)
        for of_view in self.contributions:
            for gram, contribution in of_view[label].items():
                sums[gram] += contribution
        return sums

    def by_sentence(self, label: int) -> dict[int, float]:
        sums: dict[int, float] = defaultdict(float)
        for of_view, found in zip(self.contributions, self.sentences, strict=True):
            times = Counter(gram for gram, _ in found)
            for gram, sentence in found:
                sums[sentence] += of_view[label].get(gram, 0) / times[gram]
        return sums


def clauses(text: list[Character], mark: str) -> list[Character]:
    """Return the clauses of a text that have a character."""
    plain = "".join(one for one, _ in text)
    ends = [found.end() for found in re.finditer(r"[。；，;\n]|,(?!\d)", plain)]
    found: list[Character] = []
    for start, end in pairwise([0, *ends, len(text)]):
        if mark in plain[start:end]:
            found += text[start:end]
    return found


def marked(example: Example) -> list[Character]:
    """Return the characters of a case, one for each name; its plain text is its text."""
    assert plain_text(example.text).text == example.text
    sentence_of: list[int] = []
    for number, sentence in enumerate(split_sentences(example.text, None, example.names)):
        sentence_of += [number] * len(sentence)
    text: list[Character] = []
    last = 0
    for start, end, number in places_in_plain(example.text, example.names):
        text += zip(example.text[last:start], sentence_of[last:start], strict=True)
        text.append((chr(FIRST_NAME + number), sentence_of[start]))
        last = end
    text += zip(example.text[last:], sentence_of[last:], strict=True)
    return text


def linear(stored: Stored, example: Example, items: int) -> tuple[list[Recomputed], str, list[str]]:
    """Return the linear model's part of each item; the marked text; the own clauses."""
    text = marked(example)
    names = len(example.names)
    n_labels = len(stored.labels)
    result = []
    all_own = []
    for item in range(items):
        person = example.names.index(example.names[item]) if item < names else item
        own = clauses(text, chr(FIRST_NAME + person))
        all_own.append("".join(one for one, _ in own))
        marks = [f"place {min(item, 6)}", f"of {min(items, 7)}", f"last {item == items - 1}"]
        found = [grams_of(text, names, -1), grams_of(own, names, person)]
        counts = [Counter(gram for gram, _ in of_view) for of_view in found]
        counts[1].update(marks)
        contributions: list[list[dict[str, float]]] = []
        scores = np.zeros((2, n_labels), np.float32)
        for view, grams in enumerate(counts):
            of_view: list[dict[str, float]] = [defaultdict(float) for _ in range(n_labels)]
            vector = stored.vector(view, grams)
            for column, value, gram in vector:  # ascending and in float32, as scipy sums
                for label, weight in stored.weights(view, column).items():
                    of_view[label][gram] += float(value) * float(weight)
                    scores[view, label] += value * weight
            contributions.append(of_view)
            if view == 0:
                share = len(vector) / max(1, len(grams))
        scores[0] += stored.arrays["bias"]
        usual = stored.about["usual_share"]
        known = min(1, share / usual) if usual else 1.0
        result.append(Recomputed(contributions, found, scores, known))
    return result, "".join(one for one, _ in text), all_own


def expit(x: Any) -> Any:
    return 1 / (1 + np.exp(-np.asarray(x, float)))


def calibrated(logit: Any, scale: float, shift: float) -> Any:
    return np.clip(expit(np.asarray(logit, float) * scale + shift), TINY, 1 - TINY)


@dataclass
class OfField:
    """Of the items of one field: their probabilities, and what the trees contribute."""

    before: Any  # [items, labels], before they are drawn to the frequencies
    after: Any
    trees: dict[tuple[int, int], tuple[float | None, Any, Any]]
    """Item and label -> the logit that is corrected, the contributions with the average last, the
    values of the features."""


def recompute(
    stored: Stored,
    example: Example,
    items: int,
    evidence: Callable[[str], Sequence[float]] | None,
) -> tuple[list[Recomputed], dict[str, OfField]]:
    """Return the linear model's part of each item, and each field's probabilities and trees."""
    of_items, text, own = linear(stored, example, items)
    facts = []
    if stored.about["second"]:
        assert evidence
        facts = [facts_of(example, text, own, item, evidence) for item in range(items)]
    fields: dict[str, OfField] = {}
    start = 0
    for name, field in stored.about["fields"].items():
        columns = slice(start, start + len(field["labels"]))
        start = columns.stop
        scores = np.stack([one.scores[:, columns] for one in of_items], axis=1)
        second = stored.about["second"].get(name)
        trees: dict[tuple[int, int], tuple[float | None, Any, Any]] = {}
        if second is None:
            logits = scores.sum(0).astype(float)
            if field["is_set"]:
                before = calibrated(logits, field["scale"], field["shift"])
            else:
                odds = np.exp(logits * field["scale"] + field["shift"])
                before = np.maximum(odds / odds.sum(1, keepdims=True), TINY)
        elif second["start"]:
            before, trees = of_set(second, scores, facts)
        else:
            before, trees = of_class(second, scores, facts, fields)
        known = np.array([one.known for one in of_items])[:, None]
        frequencies = np.array(field["frequencies"])
        after = known * before + (1 - known) * frequencies
        fields[name] = OfField(before, after, trees)
    return of_items, fields


def facts_of(example: Example, text: str, own: list[str], item: int, evidence: Any) -> list[float]:
    names = example.names
    mark = chr(FIRST_NAME + (names.index(names[item]) if item < len(names) else item))
    length = max(1, len(text))
    count = len(own)
    place = [item, count, item / max(1, count - 1), length, len(own[item]), text.count(mark)]
    return [*place, text.find(mark) / length, *evidence(text), *evidence(own[item])]


def of_set(second: dict[str, Any], scores: Any, facts: list[list[float]]) -> tuple[Any, Any]:
    trees = lightgbm.Booster(model_str=second["trees"])
    whole, own = scores
    score = whole + own
    mean, mean_of_own, best = score.sum(0) / len(score), own.sum(0) / len(own), score.max(0)
    by_mean = sorted(range(len(mean)), key=lambda label: -mean[label])
    before = np.zeros(score.shape)
    given = {}
    for item, of_item in enumerate(score):
        order = sorted(range(len(of_item)), key=lambda label: -of_item[label])[:CANDIDATES]
        best_three = [of_item[label] for label in order[:3]]
        for rank, label in enumerate(order):
            row = [
                *(label, of_item[label], whole[item, label], own[item, label]),
                *(own[item, label] - mean_of_own[label], rank, best_three[0] - of_item[label]),
                *best_three,
                *(mean[label], best[label], best.max() - best[label], by_mean.index(label)),
                *(expit_of_single(of_item), *facts[item][:7]),
            ]
            values = np.array(row, float)
            [contributions] = trees.predict(values[None], pred_contrib=True)
            scale, shift = second["start"]
            logit = float(of_item[label]) * scale + shift
            given[item, label] = (logit, contributions, values)
            [raw] = trees.predict(values[None], raw_score=True)
            before[item, label] = calibrated(logit + raw, *second["finish"])
    return before, given


def expit_of_single(scores: Any) -> Any:
    from scipy.special import expit as of_single  # in single precision, as the trees were fitted

    return of_single(scores).sum()


def of_class(
    second: dict[str, Any], scores: Any, facts: list[list[float]], sets: dict[str, OfField]
) -> tuple[Any, Any]:
    trees = lightgbm.Booster(model_str=second["trees"])
    score = scores.sum(0)
    before = np.zeros(score.shape)
    given = {}
    for item, of_item in enumerate(score):
        row = [*of_item]
        for other, table in second["classes"].items():
            chances = sets[other].before[item]
            row += [*(chances @ np.array(table) / max(chances.sum(), 1e-9))]
        values = np.array([*row, *facts[item]], float)
        [probabilities] = trees.predict(values[None])
        before[item] = np.maximum(probabilities, TINY)
        [contributions] = trees.predict(values[None], pred_contrib=True)
        by_class = contributions.reshape(len(of_item), -1)
        for label in range(len(of_item)):
            given[item, label] = (None, by_class[label], values)
    return before, given
