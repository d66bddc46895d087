"""A linear text classifier beside the adapter: the probability of each label, from n-grams."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from zipfile import BadZipFile
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, hstack
from scipy.special import expit, softmax

from panjue.prompts.example import Example, First
from panjue.prompts.model import CLASSIFIER, has_classifier
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump, read_json, sha256
from panjue.prompts.task import Task

CLASSIFIER_NAME = "text classifier"
"""The baseline, and the source of answers, that the classifier alone is."""

FILE_VERSION = 1
"""Of the file and of its n-grams."""

Opinion = dict[str, float]
"""Label -> probability. Of a class they sum to 1; of a label set each stands alone."""

Hashes = NDArray[np.uint32]

PERSON, OTHER, FIRST_NAME, FIRST_NUMBER = 0xE000, 0xE001, 0xE010, 0xF000
"""Private-use characters that replace the item's own name, other names, and numbers."""

NUMBER = re.compile(r"(\d[\d,]*(?:\.\d+)?)余?(万)?")
CLAUSE = re.compile(r"(?<=[。；，;\n])|(?<=,)(?!\d)")
TOKEN = re.compile(r"[^\W\d_\u4e00-\u9fff]+|[\u4e00-\u9fff\ue000-\uf8ff]")
"""A Chinese character, a word of another script, a name or a number."""

NAME = re.compile(f"[{chr(FIRST_NAME)}-{chr(FIRST_NUMBER - 1)}]")
MAX_NAMES = FIRST_NUMBER - FIRST_NAME


def magnitude(number: re.Match[str]) -> str:
    """Return one character for a number: numbers of one third of a decade have the same."""
    value = min(float(number[1].replace(",", "")) * (10_000 if number[2] else 1), 1e30)
    return chr(
        FIRST_NUMBER + (0 if value <= 0 else max(1, min(99, round(3 * math.log10(value)) + 10)))
    )


def grams(text: str, marks: Sequence[str] = ()) -> Hashes:
    """Return the hashes of all tokens of a text, of all pairs of neighbors, and of `marks`."""
    tokens = TOKEN.findall(NUMBER.sub(magnitude, text.lower()))
    pairs = (f"{a} {b}" for a, b in pairwise(tokens))
    return np.fromiter((crc32(g.encode()) for g in (*tokens, *pairs, *marks)), np.uint32)


def views(example: Example, items: int) -> list[tuple[Hashes, Hashes]]:
    """Return for each item of an answer the n-grams of the whole text and of its own clauses.

    All names are masked. An item's own clauses are those that name its person; its place among the
    items is a mark there. The hashes of the whole text are the same object for all items.
    """
    names = example.names[:MAX_NAMES]
    text = example.text
    for i in sorted(range(len(names)), key=lambda i: -len(names[i])):  # 张某甲 does not name 张某
        text = text.replace(names[i], chr(FIRST_NAME + i))
    everybody = {FIRST_NAME + i: OTHER for i in range(len(names))}
    clauses: list[list[str]] = [[] for _ in range(max(items, len(names)))]
    for clause in CLAUSE.split(text):
        for mark in set(NAME.findall(clause)):
            if ord(mark) - FIRST_NAME < len(names):
                clauses[ord(mark) - FIRST_NAME].append(clause)
    whole, result = grams(text.translate(everybody)), []
    for i in range(items):
        masked = "".join(clauses[i]).translate({**everybody, FIRST_NAME + i: PERSON})
        marks = (f"place {min(i, 6)}", f"of {min(items, 7)}", f"last {i == items - 1}")
        result.append((whole, grams(masked, marks)))
    return result


CSR = ("data", "indices", "indptr")
"""The arrays of sparse weights."""


@dataclass(frozen=True)
class View:
    """The n-grams of one view that count.

    Attributes:
        kept: Their hashes, ascending, [columns].
        idf: Inverse document frequencies, [columns].
    """

    kept: Hashes
    idf: NDArray[np.float32]

    def rows(self, texts: Sequence[Hashes]) -> csr_array:
        """Return the vectors of texts, [texts, columns]: sublinear TF-IDF, each of length 1."""
        shape = (len(texts), len(self.kept))
        if not len(self.kept):
            return csr_array(shape, dtype=np.float32)
        columns, values, ends = [], [], [0]
        for hashes in texts:
            distinct, counts = np.unique(hashes, return_counts=True)
            places = np.minimum(np.searchsorted(self.kept, distinct), len(self.kept) - 1)
            known = self.kept[places] == distinct
            vector = (1 + np.log(counts[known])) * self.idf[places[known]]
            columns.append(places[known])
            values.append((vector / max(np.linalg.norm(vector), 1e-9)).astype(np.float32))
            ends.append(ends[-1] + len(vector))
        # scikit-learn takes 32-bit indices only.
        places, starts = np.concatenate(columns).astype(np.int32), np.array(ends, dtype=np.int32)
        return csr_array((np.concatenate(values), places, starts), shape=shape)


@dataclass(frozen=True)
class FieldWeights:
    """The classifier of one field of an item.

    Attributes:
        labels: Its labels, [labels].
        weights: [columns of all views, labels].
        bias: [labels].
        scale: A score is multiplied by this to give a logit: calibration.
        shift: Is added to each logit of a label set.
        is_set: Whether the field is a label set, or one class.
        may_be_empty: Whether training had the empty set.
    """

    labels: tuple[str, ...]
    weights: csr_array
    bias: NDArray[np.float32]
    scale: float
    shift: float
    is_set: bool
    may_be_empty: bool

    def about(self) -> dict[str, Any]:
        """Return the attributes that are stored as JSON."""
        return {key: value for key, value in vars(self).items() if key not in ("weights", "bias")}

    def opinions(self, rows: csr_array) -> list[Opinion]:
        """Return the probabilities of the labels for each row of features."""
        scores = np.asarray((rows @ self.weights).todense()) + self.bias
        return [
            dict(zip(self.labels, map(float, row), strict=True))
            for row in self.probabilities(scores)
        ]

    def probabilities(self, scores: NDArray[Any]) -> NDArray[np.float64]:
        """Return the probabilities of scores, [rows, labels]."""
        logits = scores.astype(np.float64) * self.scale + self.shift
        result: NDArray[np.float64] = expit(logits) if self.is_set else softmax(logits, axis=1)
        return result


@dataclass(frozen=True)
class Classifier:
    """A classifier for the fields that a task decides."""

    decides: First
    views: tuple[View, ...]
    fields: Mapping[str, FieldWeights]

    def opinions(self, example: Example) -> list[dict[str, Opinion]]:
        """Return, for every item of the answer, field -> the probabilities of its labels."""
        items = len(example.names) if self.decides.items else 1
        texts = views(example, items)
        rows = self.rows(texts)
        by_field = {name: field.opinions(rows) for name, field in self.fields.items()}
        return [{name: by_field[name][i] for name in by_field} for i in range(items)]

    def rows(self, texts: Sequence[tuple[Hashes, ...]]) -> csr_array:
        """Return the features of items, [items, columns of all views]."""
        parts = (
            view.rows(part) for view, part in zip(self.views, zip(*texts, strict=True), strict=True)
        )
        return csr_array(hstack(list(parts), format="csr"))

    def save(self, path: Path) -> None:
        """Write the classifier to one file of numbers and JSON, without pickles."""
        about = {name: field.about() for name, field in self.fields.items()}
        text = dump({"version": FILE_VERSION, "fields": about}).encode()
        arrays: dict[str, NDArray[Any]] = {"about": np.frombuffer(text, np.uint8)}
        for i, view in enumerate(self.views):
            arrays |= {f"{i}.{key}": value for key, value in vars(view).items()}
        for name, field in self.fields.items():
            arrays |= {f"{name}.{key}": getattr(field.weights, key) for key in CSR}
            arrays[f"{name}.bias"] = field.bias
        np.savez_compressed(path, allow_pickle=False, **arrays)


def load_classifier(trained: Path, task: Task) -> Classifier | None:
    """Return the classifier of an adapter or model; None if its training made none."""
    if not has_classifier(trained) or not task.answer.fields:
        return None
    path, digest = trained / CLASSIFIER, read_json(trained / "manifest.json")["classifier_sha256"]
    if not path.exists() or sha256(path) != digest:
        problem = "is not what the training wrote" if path.exists() else "is missing"
        raise UserError(f"{path}: {problem}; restore it, or train again")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return _read(dict(arrays), task.answer)
    except (OSError, ValueError, KeyError, TypeError, BadZipFile):
        raise UserError(
            f"{path}: is no classifier of this version of panjue; train again"
        ) from None


def _read(arrays: Mapping[str, NDArray[Any]], decides: First) -> Classifier:
    about = json.loads(arrays["about"].tobytes())
    if about["version"] != FILE_VERSION or list(about["fields"]) != list(decides.fields):
        raise ValueError
    used = tuple(View(arrays[f"{i}.kept"], arrays[f"{i}.idf"]) for i in range(2))
    columns, fields = sum(len(view.kept) for view in used), {}
    for name, known in about["fields"].items():
        parts = tuple(arrays[f"{name}.{key}"] for key in CSR)
        weights = csr_array(parts, shape=(columns, len(known["labels"])))
        known["labels"] = tuple(known["labels"])
        fields[name] = FieldWeights(weights=weights, bias=arrays[f"{name}.bias"], **known)
    return Classifier(decides, used, fields)
