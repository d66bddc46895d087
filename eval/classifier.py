"""A linear text classifier beside the adapter: the probability of each label, from n-grams."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any
from zipfile import BadZipFile
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, hstack
from scipy.special import expit, softmax

from panjue.eval.second_stage import Items, SecondStage, facts, load_second_stage
from panjue.prompts.example import AnswerFields, Example
from panjue.prompts.model import CLASSIFIER, has_classifier
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump, read_json, sha256
from panjue.prompts.task import Task

CLASSIFIER_NAME = "text classifier"
"""The baseline, and the source of answers, that the classifier alone is."""

FILE_VERSION = 2
"""Of the file and of its n-grams."""

Probabilities = dict[str, float]
"""Label -> probability. Of a class they sum to 1; of a label set each stands alone."""

Hashes = NDArray[np.uint32]

PERSON = 0xE000
OTHER = 0xE001
FIRST_NAME = 0xE010
FIRST_NUMBER = 0xF000
"""Private-use characters that replace the item's own name, other names, each name, and numbers."""

NUMBER = re.compile(r"(\d[\d,]*(?:\.\d+)?)余?(万)?")
CLAUSE = re.compile(r"(?<=[。；，;\n])|(?<=,)(?!\d)")
TOKEN = re.compile(r"[^\W\d_\u4e00-\u9fff]+|[\u4e00-\u9fff\ue000-\uf8ff]")
"""A Chinese character, a word of another script, a name or a number."""

NAME_MARK = re.compile(f"[{chr(FIRST_NAME)}-{chr(FIRST_NUMBER - 1)}]")
MAX_NAMES = FIRST_NUMBER - FIRST_NAME


def magnitude(number: re.Match[str]) -> str:
    """Return one character for a number: numbers of one third of a decade have the same."""
    value = float(number[1].replace(",", ""))
    if number[2]:
        value *= 10_000
    if value <= 0:
        return chr(FIRST_NUMBER)
    thirds = round(3 * math.log10(min(value, 1e30)))
    return chr(FIRST_NUMBER + max(1, min(99, thirds + 10)))


def grams(text: str, marks: Sequence[str] = ()) -> Hashes:
    """Return the hashes of all tokens of a text, of all pairs of neighbors, and of `marks`."""
    with_magnitudes = NUMBER.sub(magnitude, text.lower())
    tokens = [token.encode() for token in TOKEN.findall(with_magnitudes)]
    single = list(map(crc32, tokens))
    # The hash of a text and more text continues the hash of the first: that of "a b" that of "a".
    with_space = [b" " + token for token in tokens[1:]]
    pairs = map(crc32, with_space, single)
    of_marks = [crc32(mark.encode()) for mark in marks]
    return np.fromiter(chain(single, pairs, of_marks), np.uint32)


def name_marks(example: Example) -> dict[str, str]:
    """Return mark -> name: the characters that replace the names of a case."""
    names = example.names[:MAX_NAMES]
    return {chr(FIRST_NAME + number): name for number, name in enumerate(names)}


def own_clauses(example: Example, items: int) -> tuple[str, list[str]]:
    """Return the text with a mark in place of each name, and the clauses that name each item."""
    marks = name_marks(example)
    text = _with_marks(example.text, marks)
    clauses: list[list[str]] = [[] for _ in range(max(items, len(marks)))]
    for clause in CLAUSE.split(text):
        for mark in marks.keys() & NAME_MARK.findall(clause):
            clauses[ord(mark) - FIRST_NAME].append(clause)
    return text, ["".join(own) for own in clauses[:items]]


def _with_marks(text: str, marks: Mapping[str, str]) -> str:
    longest_first = sorted(marks.items(), key=lambda pair: -len(pair[1]))
    for mark, name in longest_first:  # 张某甲 does not name 张某
        text = text.replace(name, mark)
    return text


def views(example: Example, items: int) -> list[tuple[Hashes, Hashes]]:
    """Return for each item of an answer the n-grams of the whole text and of its own clauses.

    All names are masked. An item's own clauses are those that name its person; its place among the
    items is a mark there. The hashes of the whole text are the same object for all items.
    """
    text, clauses = own_clauses(example, items)
    everybody = dict.fromkeys(map(ord, name_marks(example)), OTHER)
    whole = grams(text.translate(everybody))
    result = []
    for number, own in enumerate(clauses):
        masked = own.translate({**everybody, FIRST_NAME + number: PERSON})
        place = f"place {min(number, 6)}"
        of = f"of {min(items, 7)}"
        last = f"last {number == items - 1}"
        result.append((whole, grams(masked, (place, of, last))))
    return result


def facts_of(example: Example, items: int, decides: AnswerFields) -> list[list[float]]:
    """Return for each item where it stands in the case, and the task's evidence about it."""
    text, clauses = own_clauses(example, items)
    marks = [chr(FIRST_NAME + i) for i in range(items)]
    return facts(text, clauses, marks, decides.evidence or (lambda _: ()))


CSR = ("data", "indices", "indptr")
"""The arrays of sparse weights."""


@dataclass(frozen=True)
class View:
    """The n-grams of one view that count."""

    kept: Hashes  # their hashes, ascending, [columns]
    idf: NDArray[np.float32]  # inverse document frequencies, [columns]

    def rows(self, texts: Sequence[Hashes]) -> csr_array:
        """Return the vectors of texts, [texts, columns]: sublinear TF-IDF, each of length 1."""
        shape = (len(texts), len(self.kept))
        if not len(self.kept):
            return csr_array(shape, dtype=np.float32)
        columns = []
        values = []
        ends = [0]
        for hashes in texts:
            distinct, counts = np.unique(hashes, return_counts=True)
            places = np.minimum(np.searchsorted(self.kept, distinct), len(self.kept) - 1)
            known = self.kept[places] == distinct
            vector = (1 + np.log(counts[known])) * self.idf[places[known]]
            vector /= max(np.linalg.norm(vector), 1e-9)
            columns.append(places[known])
            values.append(vector.astype(np.float32))
            ends.append(ends[-1] + len(vector))
        # scikit-learn takes 32-bit indices only.
        indices = np.concatenate(columns).astype(np.int32)
        starts = np.array(ends, dtype=np.int32)
        return csr_array((np.concatenate(values), indices, starts), shape=shape)


@dataclass(frozen=True)
class FieldWeights:
    """The classifier of one field of an item."""

    labels: tuple[str, ...]  # its labels, [labels]
    weights: csr_array  # [columns of all views, labels]
    bias: NDArray[np.float32]  # [labels]
    scale: float  # a score is multiplied by this to give a logit: calibration
    shift: float  # is added to each logit of a label set
    is_set: bool  # whether the field is a label set, or one class
    sizes: Sequence[float] = (0.0, 1.0, 1.0, 1.0)
    """Weights of sets of 0, 1, 2 and more labels: how often training had such sets, divided by
    their mean probability if labels were independent."""

    def about(self) -> dict[str, Any]:
        """Return the attributes that are stored as JSON."""
        return {key: value for key, value in vars(self).items() if key not in ("weights", "bias")}

    def probabilities(self, scores: NDArray[Any]) -> NDArray[np.float64]:
        """Return the probabilities of scores, [rows, labels]."""
        logits = scores.astype(np.float64) * self.scale + self.shift
        result: NDArray[np.float64] = expit(logits) if self.is_set else softmax(logits, axis=1)
        return result


def view_scores(
    rows: Sequence[csr_array], weights: Sequence[csr_array], bias: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return the scores by each view, [views, items, labels], whose sum has the bias."""
    whole, own = [(r @ w).toarray() for r, w in zip(rows, weights, strict=True)]
    of_each_item = np.broadcast_to(whole + bias, own.shape)  # the whole text may be one row
    return np.stack([of_each_item, own])


MAX_SIZE = 3
"""Sets of at least so many labels count as of one size."""


def size_chances(probabilities: Iterable[float]) -> list[float]:
    """Return the chances of sets of 0, 1, 2 and more labels, of independent labels."""
    none = 1.0
    one = 0.0
    two = 0.0
    more = 0.0
    for p in probabilities:
        # Largest size first: each line needs the old values of the sizes below it.
        more = more + two * p
        two = two * (1 - p) + one * p
        one = one * (1 - p) + none * p
        none = none * (1 - p)
    return [none, one, two, more]


@dataclass(frozen=True)
class Classifier:
    """A classifier for the fields that a task decides."""

    decides: AnswerFields
    views: tuple[View, View]
    fields: Mapping[str, FieldWeights]
    second: SecondStage | None = None

    def probabilities(self, example: Example) -> list[dict[str, Probabilities]]:
        """Return, for every item of the answer, field -> label -> probability."""
        count = len(example.names) if self.decides.items else 1
        scores = self.scores(views(example, count))
        found: dict[str, NDArray[Any]] = {}
        for name, field in self.fields.items():
            found[name] = field.probabilities(scores[name].sum(0))
        if self.second:
            about = np.array(facts_of(example, count, self.decides), float)
            items = Items(np.array([count]), scores, about)
            found |= self.second.probabilities(items)
        return [self.item_probabilities(found, i) for i in range(count)]

    def item_probabilities(
        self, found: Mapping[str, NDArray[Any]], item: int
    ) -> dict[str, Probabilities]:
        """Return field -> label -> probability of one row of `found`: field -> [items, labels].

        Labels without a chance are left out, unless all are.
        """
        probabilities = {}
        for name, field in self.fields.items():
            row = found[name][item]
            places = np.flatnonzero(row if row.any() else row == 0).tolist()
            labels = [field.labels[place] for place in places]
            probabilities[name] = dict(zip(labels, row[places].tolist(), strict=True))
        return probabilities

    def scores(self, texts: Sequence[tuple[Hashes, Hashes]]) -> dict[str, NDArray[np.float32]]:
        """Return field -> scores of the items of one case by each view, [views, items, labels]."""
        whole, own = zip(*texts, strict=True)
        whole_view, own_view = self.views
        rows = (whole_view.rows(whole[:1]), own_view.rows(own))
        bias = np.concatenate([field.bias for field in self.fields.values()])
        of_all_fields = view_scores(rows, self._weights, bias)
        scores = {}
        start = 0
        for name, field in self.fields.items():
            end = start + len(field.labels)
            scores[name] = of_all_fields[:, :, start:end]
            start = end
        return scores

    @cached_property
    def _weights(self) -> list[csr_array]:
        """The weights of all fields side by side, by view: to slice them takes milliseconds."""
        weights = [field.weights for field in self.fields.values()]
        every = csr_array(hstack(weights, format="csr"))
        first = len(self.views[0].kept)
        return [every[:first], every[first:]]

    def save(self, path: Path) -> None:
        """Write the classifier to one file of numbers and JSON, without pickles."""
        fields = {name: field.about() for name, field in self.fields.items()}
        second = self.second.dump() if self.second else None
        text = dump({"version": FILE_VERSION, "fields": fields, "second": second})
        about = np.frombuffer(text.encode(), np.uint8)
        np.savez_compressed(path, allow_pickle=False, about=about, **self._arrays())

    def _arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays by their names in the file."""
        arrays: dict[str, NDArray[Any]] = {}
        for i, view in enumerate(self.views):
            arrays[f"{i}.kept"] = view.kept
            arrays[f"{i}.idf"] = view.idf
        for name, field in self.fields.items():
            for key in CSR:
                arrays[f"{name}.{key}"] = getattr(field.weights, key)
            arrays[f"{name}.bias"] = field.bias
        return arrays


def load_classifier(trained: Path, task: Task) -> Classifier | None:
    """Return the classifier of an adapter or model; None if its training made none."""
    if not has_classifier(trained) or not task.answer.fields:
        return None
    path = trained / CLASSIFIER
    digest = read_json(trained / "manifest.json")["classifier_sha256"]
    if not path.exists() or sha256(path) != digest:
        problem = "is not what the training wrote" if path.exists() else "is missing"
        raise UserError(f"{path}: {problem}; restore it, or train again")
    return read_classifier(path, task)


def read_classifier(path: Path, task: Task) -> Classifier:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return _read(dict(arrays), task.answer)
    except (OSError, ValueError, KeyError, TypeError, BadZipFile):
        problem = "is no classifier of this version of panjue"
        raise UserError(f"{path}: {problem}; train again") from None


def _read(arrays: Mapping[str, NDArray[Any]], decides: AnswerFields) -> Classifier:
    about = json.loads(arrays["about"].tobytes())
    if about["version"] != FILE_VERSION or list(about["fields"]) != list(decides.fields):
        raise ValueError
    whole = View(arrays["0.kept"], arrays["0.idf"])
    own = View(arrays["1.kept"], arrays["1.idf"])
    columns = len(whole.kept) + len(own.kept)
    fields = {}
    for name, known in about["fields"].items():
        labels = tuple(known.pop("labels"))
        parts = tuple(arrays[f"{name}.{key}"] for key in CSR)
        weights = csr_array(parts, shape=(columns, len(labels)))
        bias = arrays[f"{name}.bias"]
        fields[name] = FieldWeights(labels, weights, bias, **known)
    second = None
    if about["second"]:
        second = load_second_stage(about["second"])
    return Classifier(decides, (whole, own), fields, second)
