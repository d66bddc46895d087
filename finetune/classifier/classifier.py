"""A text classifier beside the adapter: the probability of each label, from n-grams.

Two views of a text have n-grams: the whole text of a case, and the clauses that name the person an
item of the answer is about. The first stage scores them with linear models. For some tasks, trees
correct the scores: the second stage. How far a text is known, from 0 to 1, depends on the share of
its n-grams that have a weight from training.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csc_array, csr_array

from panjue.finetune.classifier.features import (
    Array,
    MarkedCase,
    View,
    facts,
    how_known,
    marked,
    views,
)
from panjue.finetune.classifier.grams import Hashes
from panjue.finetune.classifier.label_sets import LabelField, Probabilities
from panjue.finetune.classifier.trees import FieldTrees, Items, corrected_probabilities, load_trees
from panjue.prompts.example import Example, LabelFields
from panjue.prompts.model import CLASSIFIER
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump, sha256
from panjue.prompts.plumbing.version import panjue_version
from panjue.prompts.task import Task

CLASSIFIER_NAME = "text classifier"
"""Name of the classifier as a baseline, and as the one who answered."""

FILE_VERSION = 3
"""Version of the file format and of the n-grams in it."""

CSR = ("data", "indices", "indptr")
"""Names of the arrays that store sparse weights."""


class Seen(NamedTuple):
    """What the classifier sees of cases."""

    cases: Sequence[MarkedCase]
    hashes: tuple[list[Hashes], list[Hashes]]  # of the n-grams of each case, of each item
    rows: tuple[csr_array, csr_array]  # their TF-IDF vectors, [cases, columns], [items, columns]
    items: Items
    known: Array  # how far the text of each item is known, [items]


@dataclass(frozen=True)
class Classifier:
    """A classifier for the fields of a task that have labels."""

    label_fields: LabelFields
    views: Sequence[View]  # of the whole text, of the own clauses
    weights: Sequence[csr_array]  # of each view, [columns, labels of all fields]
    bias: NDArray[np.float32]  # [labels of all fields]
    fields: Mapping[str, LabelField]
    second: Mapping[str, FieldTrees] = field(default_factory=dict)
    """The second stage of the fields that have one, label sets first."""
    usual_share: float = 0.0
    """Share of a usual text's n-grams that have a weight; 0 counts all texts as known."""

    @cached_property
    def weights_by_label(self) -> list[csc_array]:
        """Return the weights of each view, stored by label, so that those of one are read fast."""
        return [csc_array(of_view) for of_view in self.weights]

    def probabilities(self, example: Example) -> list[dict[str, Probabilities]]:
        """Return, for every item of the answer, field -> label -> probability."""
        [of_items] = self.predict([example])
        return of_items

    def predict(self, examples: Sequence[Example]) -> list[list[dict[str, Probabilities]]]:
        """Return `probabilities` of each example; far faster than one by one."""
        if not examples:
            return []
        seen = self.look_at(examples)
        of_items = self.by_both_stages(seen.items)
        # The less of a text is known, the nearer its probabilities come to training's frequencies.
        for name, of_field in self.fields.items():
            of_items[name] = of_field.as_far_as_known(of_items[name], seen.known)
        by_item = iter(self.by_item(of_items))
        return [list(islice(by_item, size)) for size in seen.items.sizes.tolist()]

    def look_at(self, examples: Sequence[Example]) -> Seen:
        """Return the n-grams, first-stage scores and facts of one or more examples.

        Also return how far the text of each item is known. It is fully known if the share of its
        n-grams that have a weight is at least that of a usual training text.
        """
        sizes = [len(example.names) if self.label_fields.items else 1 for example in examples]
        cases = list(map(marked, examples, sizes))
        whole, own = views(cases)
        rows_of_cases, shares_with_weight = self.views[0].rows_and_shares(whole)
        rows_of_own, _ = self.views[1].rows_and_shares(own)
        facts_of_items: list[list[float]] = []
        if self.second:  # the first stage reads no facts
            assert self.label_fields.evidence, "there was evidence in training"
            for case in cases:
                facts_of_items += facts(case, self.label_fields.evidence)
        return Seen(
            cases=cases,
            hashes=(whole, own),
            rows=(rows_of_cases, rows_of_own),
            items=Items(
                sizes=np.array(sizes),
                scores=self._scores(rows_of_cases, rows_of_own, np.array(sizes)),
                facts=np.array(facts_of_items, float),
            ),
            known=np.repeat(how_known(shares_with_weight, self.usual_share), sizes),
        )

    def by_both_stages(self, items: Items) -> dict[str, Array]:
        """Return field -> probabilities, [items, labels], as if all texts were fully known.

        Fields without a second stage have those of the first.
        """
        of_items: dict[str, Array] = {}
        for name, of_field in self.fields.items():
            if name not in self.second:
                score = items.scores[name].sum(axis=0)  # of both views, [items, labels]
                of_items[name] = of_field.probabilities(score)
        return of_items | corrected_probabilities(self.second, items)

    def by_item(self, of_items: Mapping[str, NDArray[Any]]) -> list[dict[str, Probabilities]]:
        """Convert field -> [items, labels] to, for each item, field -> label -> probability."""
        columns = [of_field.by_label(of_items[name]) for name, of_field in self.fields.items()]
        rows = zip(*columns, strict=True)
        return [dict(zip(self.fields, row, strict=True)) for row in rows]

    def _scores(
        self, of_cases: csr_array, of_own: csr_array, sizes: Array
    ) -> dict[str, NDArray[np.float32]]:
        """Return field -> scores of all items of the cases by each view, [views, items, labels]."""
        whole = (of_cases @ self.weights[0]).toarray() + self.bias
        own = (of_own @ self.weights[1]).toarray()
        of_all_fields = np.stack([np.repeat(whole, sizes, axis=0), own])
        # One matrix has the columns of all fields.
        ends = np.cumsum([len(of_field.labels) for of_field in self.fields.values()])
        of_each_field = np.split(of_all_fields, ends[:-1], axis=2)
        return dict(zip(self.fields, of_each_field, strict=True))

    def save(self, path: Path) -> None:
        """Write the classifier to one file of arrays without pickles; one of the arrays is JSON."""
        about = {
            "version": FILE_VERSION,
            "panjue": panjue_version(),
            "fields": {name: asdict(of_field) for name, of_field in self.fields.items()},
            "second": {name: trees.dump() for name, trees in self.second.items()},
            "usual_share": self.usual_share,
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


def load_classifier(trained: Path, digest: str, task: Task) -> Classifier:
    """Load the classifier beside an adapter or model; its file must have this hash."""
    path = trained / CLASSIFIER
    if not path.exists() or sha256(path) != digest:
        raise UserError(
            f"{path}: is missing, or is not what the training wrote; restore it, or train again"
        )
    return read_classifier(path, task.answer)


def read_classifier(path: Path, label_fields: LabelFields) -> Classifier:
    """Read what `Classifier.save` wrote; UserError if that was another version or task."""
    with np.load(path, allow_pickle=False) as archive:
        arrays = dict(archive)
    about = json.loads(arrays["about"].tobytes())
    if about["version"] != FILE_VERSION or list(about["fields"]) != list(label_fields.fields):
        raise UserError(f"{path}: is no classifier of this version of panjue; train again")
    bias = arrays["bias"]
    read_views = []
    weights = []
    for number in range(2):  # the whole text, the own clauses
        view = View(arrays[f"{number}.kept"], arrays[f"{number}.idf"])
        parts = tuple(arrays[f"{number}.{part}"] for part in CSR)
        read_views.append(view)
        weights.append(csr_array(parts, shape=(len(view.kept), len(bias))))
    fields = {name: LabelField(**known) for name, known in about["fields"].items()}
    second = {name: load_trees(known) for name, known in about["second"].items()}
    usual_share = about.get("usual_share", 0.0)  # version 0.4 wrote none
    return Classifier(label_fields, read_views, weights, bias, fields, second, usual_share)
