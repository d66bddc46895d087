"""A linear text classifier beside the adapter: the probability of each label, from n-grams."""

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.special import expit, softmax

from panjue.eval.second_stage import (
    PLACES,
    FieldTrees,
    Items,
    corrected_probabilities,
    load_trees,
)
from panjue.prompts.example import AnswerFields, Example
from panjue.prompts.model import CLASSIFIER, has_classifier
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump, read_json, sha256
from panjue.prompts.task import Task

CLASSIFIER_NAME = "text classifier"
"""The baseline, and the source of answers, that the classifier alone is."""

FILE_VERSION = 3
"""Of the file and of its n-grams."""

Probabilities = dict[str, float]
"""Label -> probability. Of a class they sum to 1; of a label set each stands alone."""

Hashes = NDArray[np.uint32]

PERSON = 0xE000  # private-use characters: this one replaces the item's own name
OTHER = 0xE001  # any other name
FIRST_NAME = 0xE010  # the first name of a case; the others follow
FIRST_NUMBER = 0xF000  # the number 0; see `magnitude`

NUMBER = re.compile(r"(\d[\d,]*(?:\.\d+)?)余?(万)?")
CLAUSE = re.compile(r"(?<=[。；，;\n])|(?<=,)(?!\d)")
TOKEN = re.compile(r"[^\W\d_\u4e00-\u9fff]+|[\u4e00-\u9fff\ue000-\uf8ff]")
"""A Chinese character, a word of another script, a name or a number."""


def magnitude(number: re.Match[str]) -> str:
    """Return one character for a match of `NUMBER`; numbers of a third of a decade have the same.

    There are 99 characters, from that of a thousandth and less to that of 10**30, and one for 0.
    """
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
    # crc32(b" b", crc32(b"a")) is crc32(b"a b"): the hash of a pair continues that of its first
    # token. The last token begins no pair, and `map` leaves it out.
    with_space = [b" " + token for token in tokens[1:]]
    pairs = map(crc32, with_space, single)
    of_marks = [crc32(mark.encode()) for mark in marks]
    return np.fromiter(chain(single, pairs, of_marks), np.uint32)


def name_marks(example: Example) -> dict[str, str]:
    """Return mark -> name: the characters that replace the names of a case."""
    return {chr(FIRST_NAME + number): name for number, name in enumerate(example.names)}


def own_clauses(example: Example, items: int) -> tuple[str, list[str]]:
    """Return the text with a mark in place of each name, and the clauses that name each item."""
    marks = name_marks(example)
    text = example.text
    longest_first = sorted(marks.items(), key=lambda pair: -len(pair[1]))
    for mark, name in longest_first:  # 张某甲 does not name 张某
        text = text.replace(name, mark)
    clauses: dict[str, list[str]] = defaultdict(list)
    for clause in CLAUSE.split(text):
        for mark in marks.keys() & set(clause):
            clauses[mark].append(clause)
    return text, ["".join(clauses[chr(FIRST_NAME + number)]) for number in range(items)]


def views(example: Example, items: int) -> tuple[Hashes, list[Hashes]]:
    """Return the n-grams of the whole text, and for each item those of its own clauses.

    All names are masked. An item's own clauses are those that name its person; its place among the
    items is a mark there.
    """
    text, clauses = own_clauses(example, items)
    everybody = dict.fromkeys(map(ord, name_marks(example)), OTHER)
    whole = grams(text.translate(everybody))
    of_items = []
    for number, own in enumerate(clauses):
        masked = own.translate({**everybody, FIRST_NAME + number: PERSON})
        place = f"place {min(number, 6)}"
        of = f"of {min(items, 7)}"
        last = f"last {number == items - 1}"
        of_items.append(grams(masked, (place, of, last)))
    return whole, of_items


def facts(
    example: Example, items: int, evidence: Callable[[str], Sequence[float]]
) -> list[list[float]]:
    """Return for each item its `PLACES`, and the evidence about the case and about itself."""
    text, clauses = own_clauses(example, items)
    length = max(1, len(text))
    of_case = evidence(text)
    rows = []
    for number, own in enumerate(clauses):
        mark = chr(FIRST_NAME + number)
        places = {
            "number": number,
            "of": items,
            "place": number / max(1, items - 1),
            "length": length,
            "own length": len(own),
            "named": text.count(mark),
            "first named": text.find(mark) / length,
        }
        in_order = [places[name] for name in PLACES]
        rows.append([*in_order, *of_case, *evidence(own)])
    return rows


@dataclass(frozen=True)
class View:
    """The n-grams of one view that count."""

    kept: Hashes  # their hashes, ascending, [columns]
    idf: NDArray[np.float32]  # inverse document frequencies, [columns]

    def rows(self, texts: Sequence[Hashes]) -> csr_array:
        """Return the vectors of texts, [texts, columns]: sublinear TF-IDF, each of length 1."""
        columns = []
        values = []
        ends = [0]
        for hashes in texts:
            distinct, counts = np.unique(hashes, return_counts=True)
            places = np.searchsorted(self.kept, distinct)
            is_kept = np.searchsorted(self.kept, distinct, side="right") > places
            places = places[is_kept]
            vector = (1 + np.log(counts[is_kept])) * self.idf[places]
            vector /= max(float(np.linalg.norm(vector)), 1e-9)
            columns.append(places)
            values.append(vector.astype(np.float32))
            ends.append(ends[-1] + len(vector))
        # scikit-learn takes 32-bit indices only.
        indices = np.concatenate(columns).astype(np.int32)
        starts = np.array(ends, dtype=np.int32)
        shape = (len(texts), len(self.kept))
        return csr_array((np.concatenate(values), indices, starts), shape=shape)


@dataclass(frozen=True)
class LabelField:
    """The labels of a field, and how their scores become probabilities."""

    labels: Sequence[str]
    is_set: bool  # whether the field is a label set, or one class
    scale: float  # a score is multiplied by this to give a logit: calibration
    shift: float  # is added to each logit of a label set
    sizes: Sequence[float] = (0.0, 1.0, 1.0, 1.0)
    """Weights of sets of 0, 1, 2 and more labels: how often training had such sets, divided by
    their mean probability if labels were independent."""

    def probabilities(self, scores: NDArray[Any]) -> NDArray[np.float64]:
        """Return the probabilities of scores, [rows, labels]."""
        logits = scores.astype(np.float64) * self.scale + self.shift
        result: NDArray[np.float64] = expit(logits) if self.is_set else softmax(logits, axis=1)
        return result

    def by_label(self, probabilities: NDArray[Any]) -> Probabilities:
        """Return label -> probability, of [labels]; labels of probability 0 are left out."""
        possible = np.flatnonzero(probabilities)
        return {self.labels[number]: float(probabilities[number]) for number in possible}


def view_scores(
    rows: Sequence[csr_array], weights: Sequence[csr_array], bias: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return the scores by each view, [views, items, labels], whose sum has the bias."""
    of_whole, of_own = rows
    whole = (of_whole @ weights[0]).toarray() + bias
    own = (of_own @ weights[1]).toarray()
    of_each_item = np.broadcast_to(whole, own.shape)  # the whole text may be one row
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


CSR = ("data", "indices", "indptr")
"""The arrays of sparse weights."""


@dataclass(frozen=True)
class Classifier:
    """A classifier for the fields that a task decides."""

    decides: AnswerFields
    views: Sequence[View]  # of the whole text, of the own clauses
    weights: Sequence[csr_array]  # of each view, [columns, labels of all fields]
    bias: NDArray[np.float32]  # [labels of all fields]
    fields: Mapping[str, LabelField]
    second: Mapping[str, FieldTrees] = field(default_factory=dict)
    """The second stage of the fields that have one, label sets first."""

    def probabilities(self, example: Example) -> list[dict[str, Probabilities]]:
        """Return, for every item of the answer, field -> label -> probability."""
        count = len(example.names) if self.decides.items else 1
        scores = self.scores(example, count)
        of_items: dict[str, NDArray[Any]] = {}
        for name, of_field in self.fields.items():
            of_items[name] = of_field.probabilities(scores[name].sum(0))
        if self.second:
            assert self.decides.evidence, "there was evidence in training"
            about = np.array(facts(example, count, self.decides.evidence), float)
            items = Items(np.array([count]), scores, about)
            of_items |= corrected_probabilities(self.second, items)
        return [self.item_probabilities(of_items, i) for i in range(count)]

    def item_probabilities(
        self, of_items: Mapping[str, NDArray[Any]], number: int
    ) -> dict[str, Probabilities]:
        """Return field -> label -> probability of one item, of field -> [items, labels]."""
        fields = self.fields.items()
        return {name: of_field.by_label(of_items[name][number]) for name, of_field in fields}

    def scores(self, example: Example, items: int) -> dict[str, NDArray[np.float32]]:
        """Return field -> scores of the items of a case by each view, [views, items, labels]."""
        whole, own = views(example, items)
        rows = (self.views[0].rows([whole]), self.views[1].rows(own))
        of_all_fields = view_scores(rows, self.weights, self.bias)
        # The columns of the fields stand side by side.
        ends = np.cumsum([len(of_field.labels) for of_field in self.fields.values()])
        of_each_field = np.split(of_all_fields, ends[:-1], axis=2)
        return dict(zip(self.fields, of_each_field, strict=True))

    def save(self, path: Path) -> None:
        """Write the classifier to one file of arrays, one of them JSON, without pickles."""
        about = {
            "version": FILE_VERSION,
            "fields": {name: asdict(of_field) for name, of_field in self.fields.items()},
            "second": {name: trees.dump() for name, trees in self.second.items()},
        }
        arrays: dict[str, Any] = {
            "about": np.frombuffer(dump(about).encode(), np.uint8),
            "bias": self.bias,
        }
        for number, view in enumerate(self.views):
            arrays[f"{number}.kept"] = view.kept
            arrays[f"{number}.idf"] = view.idf
            for part in CSR:
                arrays[f"{number}.{part}"] = getattr(self.weights[number], part)
        np.savez_compressed(path, allow_pickle=False, **arrays)


def load_classifier(trained: Path, task: Task) -> Classifier | None:
    """Return the classifier of an adapter or model; None if its training made none."""
    if not has_classifier(trained):
        return None
    path = trained / CLASSIFIER
    digest = read_json(trained / "manifest.json")["classifier_sha256"]
    if not path.exists() or sha256(path) != digest:
        raise UserError(
            f"{path}: is missing, or is not what the training wrote; restore it, or train again"
        )
    return read_classifier(path, task.answer)


def read_classifier(path: Path, decides: AnswerFields) -> Classifier:
    with np.load(path, allow_pickle=False) as archive:
        arrays = dict(archive)
    about = json.loads(arrays["about"].tobytes())
    if about["version"] != FILE_VERSION or list(about["fields"]) != list(decides.fields):
        raise UserError(f"{path}: is no classifier of this version of panjue; train again")
    bias = arrays["bias"]
    read_views = []
    weights = []
    for number in range(2):
        view = View(arrays[f"{number}.kept"], arrays[f"{number}.idf"])
        parts = tuple(arrays[f"{number}.{part}"] for part in CSR)
        read_views.append(view)
        weights.append(csr_array(parts, shape=(len(view.kept), len(bias))))
    fields = {name: LabelField(**known) for name, known in about["fields"].items()}
    second = {name: load_trees(known) for name, known in about["second"].items()}
    return Classifier(decides, read_views, weights, bias, fields, second)
