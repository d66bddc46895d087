"""The label sets of a training file, which are collected once and saved with the adapter.

`kind` is the name of a field here; see `LabelFields.kinds`.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError

from panjue.prompts.plumbing.config import first_complaint
from panjue.prompts.plumbing.decode import flatten_forms
from panjue.prompts.plumbing.errors import UserError, did_you_mean
from panjue.prompts.plumbing.files import json_text, read_json, write_json

Counts = Mapping[str, int]


@dataclass(frozen=True)
class Labels:
    """The labels of the training answers by field (for `judgment`: charges, articles, penalty)."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    counts: Mapping[str, Counts] = field(default_factory=dict)
    """Field -> label -> count; the commonest first."""
    most: Counts = field(default_factory=dict)  # field -> most labels in one answer
    pairs: Mapping[str, Counts] = field(default_factory=dict)
    """Label of the first field -> labels of the second that occur with it; the commonest first."""

    def names(self, kind: str) -> list[str]:
        """Return the labels of a field in a fixed order (by code point)."""
        return sorted(self.counts.get(kind, ()))

    @cached_property
    def normal_forms(self) -> dict[str, dict[str, str]]:
        """Return field -> normal form -> label, without forms that several labels share."""
        forms: dict[str, dict[str, str]] = {}
        for kind in self.counts:
            by_form = self._by_form(kind)
            forms[kind] = {form: same[0] for form, same in by_form.items() if len(same) == 1}
        return forms

    def look_alikes(self, kinds: Iterable[str]) -> Iterator[str]:
        """Yield a line for labels of a field that differ only in spelling."""
        for kind in kinds:
            for same in self._by_form(kind).values():
                if len(same) > 1:
                    yield f"{kind} {', '.join(map(repr, same))} look equal; keep one spelling"

    def _by_form(self, kind: str) -> dict[str, list[str]]:
        """Return normal form -> the labels of a field that have it."""
        forms: dict[str, list[str]] = {}
        for label in self.names(kind):
            forms.setdefault(normal(label), []).append(label)
        return forms

    def did_you_mean(self, kind: str, label: str) -> str:
        """Return `; did you mean 'x'?` for another spelling of a label, or for the nearest one."""
        same = snap(label, self.normal_forms.get(kind, {}))
        return f"; did you mean {same!r}?" if same else did_you_mean(label, self.counts[kind])

    def commonest(self, kind: str) -> str | None:
        """Return the label with the highest count; among equal counts, the first by code point.

        Of labels that a task's code lists, which nobody has counted, it is the first one.
        """
        return next(iter(self.counts.get(kind, ())), None)  # the commonest is first

    @property
    def were_counted(self) -> bool:
        """Say whether the labels come from answers, and not only from the task's code."""
        return any(any(counts.values()) for counts in self.counts.values())

    @property
    def sha256(self) -> str:
        """Return the hash of the file that `save` would write."""
        return hashlib.sha256(json_text(asdict(self)).encode()).hexdigest()

    def save(self, folder: Path) -> None:
        """Write the labels to labels.json in a folder."""
        write_json(folder / "labels.json", asdict(self))


LABELS = TypeAdapter(Labels)


def load_labels(path: Path) -> Labels:
    """Read a labels.json; UserError: it is not one."""
    try:
        return LABELS.validate_python(read_json(path))
    except ValidationError as error:
        problem = first_complaint(error)
        raise UserError(f"{path}: not a labels file of panjue: {problem}") from None


def collect(answers: Iterable[Mapping[str, Iterable[str]]]) -> Labels:
    """Count the labels of `answers` (each: field -> labels); pair those of the first two fields."""
    counts: dict[str, Counter[str]] = {}
    most: Counter[str] = Counter()
    pairs: dict[str, Counter[str]] = {}
    for answer in answers:
        sets = {kind: set(labels) for kind, labels in answer.items()}
        for kind, labels in sets.items():
            counts.setdefault(kind, Counter()).update(labels)
            most[kind] = max(most[kind], len(labels))
        if len(sets) >= 2:
            first, second, *_ = sets.values()
            for label in first:
                pairs.setdefault(label, Counter()).update(second)
    return _labels(counts, dict(most), pairs)


def merged_labels(several: Sequence[Labels]) -> Labels:
    """Return the labels of any of several trainings, with the sums of their counts.

    If all are equal, they are taken to be of the same cases, which then count once.
    """
    first, *others = several
    if all(other == first for other in others):
        return first
    counts: dict[str, Counter[str]] = {}
    most: dict[str, int] = {}
    pairs: dict[str, Counter[str]] = {}
    for labels in several:
        for kind, of_kind in labels.counts.items():
            counts.setdefault(kind, Counter()).update(of_kind)
        for kind, number in labels.most.items():
            most[kind] = max(number, most.get(kind, 0))
        for label, partners in labels.pairs.items():
            pairs.setdefault(label, Counter()).update(partners)
    return _labels(counts, most, pairs)


def _labels(
    counts: Mapping[str, Counter[str]], most: Counts, pairs: Mapping[str, Counter[str]]
) -> Labels:
    """Return the labels with the commonest first, and `pairs` sorted by label."""
    ranked = {kind: _ranked(counter) for kind, counter in counts.items()}
    return Labels(ranked, most, {label: _ranked(pairs[label]) for label in sorted(pairs)})


def _ranked(counter: Counter[str]) -> dict[str, int]:
    """Return label -> count; the commonest first, equal counts by code point."""
    return dict(sorted(counter.items(), key=lambda item: (-item[1], item[0])))


PUNCTUATION = re.compile(r"[\s、，,；;：:。·“”\"'()（）《》<>]+")
"""Characters in which two spellings of a label may differ, without the `.` and `-` of articles."""


def normal(label: str) -> str:
    """Return the normal form of a charge, an article or a class, equal for all its spellings.

    It has plain characters in lower case, without white space, punctuation and a final 罪.
    """
    return PUNCTUATION.sub("", flatten_forms(label)).lower().removesuffix("罪")


def snap(label: str, known: Mapping[str, str]) -> str | None:
    """Return the known label of which `label` is a spelling, or None.

    `known` has `normal(label)` -> label. Similar labels do not match: 行贿 is similar to 受贿, and
    Article 13 to Article 3.
    """
    return label if label in known.values() else known.get(normal(label))
