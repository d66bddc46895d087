"""One metric by groups: how far apart they are, and three things that may explain it (FairLex).

Chalkidis et al., "FairLex: A Multilingual Benchmark for Evaluating Fairness in Legal Text
Processing", ACL 2022.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from panjue.eval.calibration import calibration
from panjue.eval.group_measures import (
    Attribute,
    Classes,
    Group,
    divergence,
    frequency,
    widest,
    worst_class,
)
from panjue.eval.means import ScoreTable, gold_rows, metric_values, plain, summarize
from panjue.eval.score import certainty_of, decoding_of
from panjue.prompts.example import UNKNOWN, Example
from panjue.prompts.labels import Labels, load_labels
from panjue.prompts.plumbing.errors import UserError, did_you_mean
from panjue.prompts.plumbing.files import generation, read_json, sha256
from panjue.prompts.reader import Reader, is_held_out, side_groups
from panjue.prompts.task import Task
from panjue.prompts.tasks.metrics import Row

FREQUENCY = "class_frequency"
"""The attribute that every task with classes has: how often training saw an example's rarest."""

FEWEST = 5
"""Gold examples of a class in a group below which its recall there says nothing."""


@dataclass(frozen=True)
class Report:
    """Everything that `panjue fairness` prints.

    Attributes:
        cross: Groups of the first two attributes -> (examples, metric) of those in both.
        missing: Examples without a row, scored as unanswered; `extra_rows` rows are of no example.
        train: The training file; None where it is not known, or no longer what it was.
        compared_by: What texts were compared by, where the metric compares any.
    """

    task: str
    metric: str
    total: float
    examples: int
    min_n: int
    attributes: dict[str, Attribute]
    missing: int
    extra_rows: int
    train: str | None
    compared_by: str | None = None
    cross: dict[str, dict[str, tuple[int, float]]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON has it: what there is nothing to score for is null."""
        found: dict[str, Any] = plain(asdict(self))
        return found


def report(  # noqa: PLR0913  # what the command line offers
    name: str,
    reader: Reader,
    gold: Path,
    submission: Path,
    by: Sequence[str],
    *,
    train: Path | None = None,
    train_groups: Path | None = None,
    metric: str | None = None,
    min_n: int = 20,
) -> Report:
    """Score `submission` by the groups of every attribute in `by`.

    Args:
        name: The task's.
        reader: Of the task, with the side file of further groups if there is one.
        gold: The labelled file.
        submission: The answers, or the run folder that has them.
        by: Attributes.
        train: The training file; by default what the run folder says, if it is still that.
        train_groups: The side file of the training file: ids may be of another kind there.
        metric: One of the task's; by default its headline.
        min_n: Groups of fewer examples are flagged.

    Raises:
        UserError: A file is missing or broken, or nobody has heard of an attribute or the metric.
    """
    task = reader.task
    submission = task.data.submission.find(submission)
    shown = metric or task.score.names[-1]
    if shown not in task.score.names:
        raise UserError(f"--metric: no {shown!r} in {name}{did_you_mean(shown, task.score.names)}")
    if not by or len(set(by)) < len(by):
        raise UserError("--by: name one attribute or more, each once")
    labels = _labels(submission.parent) if FREQUENCY in by else None
    table = _Table(reader, gold, submission, labels, shown)
    known = list(table.columns.groups)
    for attribute in by:
        if attribute not in known:
            there = f"there are {', '.join(known) or 'none'}; add others in a side file"
            hint = did_you_mean(attribute, known)
            raise UserError(f"--by: no example has {attribute!r}{hint} ({there}: --groups FILE)")
    trained_on = Training(train, held_out=False) if train else training(submission.parent)
    trained = _trained_on(replace(reader, side=side_groups(train_groups)), trained_on, by, labels)
    return Report(
        task=name,
        metric=shown,
        total=table.value(np.ones(len(table.gold), dtype=bool)),
        examples=len(table.gold),
        min_n=min_n,
        attributes={
            attribute: _attribute(table, attribute, trained.get(attribute), min_n)
            for attribute in by
        },
        missing=table.missing,
        extra_rows=table.extra_rows,
        train=str(trained_on.path) if trained_on else None,
        compared_by=task.score.compared_by,
        cross=_cross(table, by[0], by[1]) if len(by) > 1 else {},
    )


class _Table:
    """What a report is made of, a row per example."""

    def __init__(
        self, reader: Reader, gold: Path, submission: Path, labels: Labels | None, metric: str
    ) -> None:
        """Read gold and submission; with `labels`, how frequent classes are is an attribute."""
        task = reader.task
        rows = task.data.submission.index(submission)
        self.columns, self.metric = ScoreTable(task), metric
        self.gold: list[Classes] = []
        self.told: list[Classes] = []
        self.confidences: list[list[tuple[str, float, bool]]] = []
        self.missing = 0
        is_of_this = decoding_of(submission) is not None
        certainty = certainty_of(task, submission.parent) if is_of_this else None
        for example, right in gold_rows(reader, gold):
            row = rows.get(example.id)
            self.missing += row is None
            values = metric_values(task, right, row, f"{submission}: id {example.id}")
            found = _classes(task, right)
            groups = _groups(example, found, labels)
            self.columns.add(replace(example, groups=groups), task.score.weight(example), values)
            self.gold.append(found)
            self.told.append(_classes(task, row) if row is not None else frozenset())
            self.confidences.append(certainty.add(example, right, row) if certainty else [])
        if not self.gold:
            raise UserError(f"{gold}: has no examples")
        self.extra_rows = len(rows) - len(self.gold) + self.missing

    def groups(self, attribute: str) -> NDArray[np.str_]:
        """Return the group of every example."""
        return np.array(self.columns.groups[attribute])

    def value(self, mask: NDArray[np.bool_]) -> float:
        """Return the metric over some examples."""
        return summarize(self.columns, resamples=0, mask=mask).mean[self.metric]

    def error(self, members: NDArray[np.int64]) -> float | None:
        """Return the calibration error of some examples, the mean over the decided fields."""
        of_fields: dict[str, list[tuple[float, bool]]] = defaultdict(list)
        for name, sure, right in (noted for i in members for noted in self.confidences[i]):
            of_fields[name].append((sure, right))
        found = [calibration(*zip(*pairs, strict=True)).error for pairs in of_fields.values()]
        return float(np.mean(found)) if found else None


def _classes(task: Task, row: Row) -> Classes:
    return frozenset(task.score.classes(row)) if task.score.classes else frozenset()


def _groups(example: Example, classes: Classes, labels: Labels | None) -> dict[str, str]:
    """Return an example's groups, with the band of its rarest class where `labels` are given."""
    of_class = {FREQUENCY: frequency(classes, labels)} if labels and classes else {}
    return {**example.groups, **of_class}


def _labels(run: Path) -> Labels:
    place = run / "labels.json"
    if not place.exists():
        raise UserError(f"--by: {FREQUENCY} is counted in {place}, which is not there")
    return load_labels(place)


@dataclass(frozen=True)
class Training:
    """The file that was trained on; with `held_out`, less the tenth of it that was not."""

    path: Path
    held_out: bool


def training(run: Path) -> Training | None:
    """Return what the run's adapter was trained on, if that file is still there as it was."""
    made_at = Path(generation(run).get("trained") or "nowhere") / "manifest.json"
    made = read_json(made_at) if made_at.exists() else {}
    train = Path(made.get("train", "nowhere"))
    if not train.exists() or sha256(train) != made.get("train_sha256"):
        return None
    return Training(train, held_out=not made.get("dev_sha256"))


@dataclass
class Trained:
    """What training had of one attribute: group -> its examples, and their classes."""

    sizes: Counter[str] = field(default_factory=Counter)
    classes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))


def _trained_on(
    reader: Reader, trained_on: Training | None, by: Sequence[str], labels: Labels | None
) -> dict[str, Trained]:
    """Return attribute -> what training had of its groups; nothing where that is not known."""
    found: dict[str, Trained] = defaultdict(Trained)
    for example in reader.read(trained_on.path) if trained_on else ():
        if example.answer is None or (trained_on and trained_on.held_out and is_held_out(example)):
            continue
        classes = _classes(reader.task, reader.task.gold(example))
        groups = _groups(example, classes, labels)
        for attribute in by:
            group = groups.get(attribute, UNKNOWN)
            found[attribute].sizes[group] += 1
            found[attribute].classes[group].update(classes)
    return found


def _attribute(table: _Table, attribute: str, trained: Trained | None, min_n: int) -> Attribute:
    of_example = table.groups(attribute)
    names = [name for name, _ in Counter(of_example.tolist()).most_common() if name != UNKNOWN]
    support = {name for names in table.gold for name in names}
    if trained:
        support |= {name for counts in trained.classes.values() for name in counts}
    groups = {
        name: _group(table, name, of_example == name, trained, sorted(support), min_n)
        for name in names
    }
    counted = {
        name: group
        for name, group in groups.items()
        if not group.flagged and not math.isnan(group.value)
    }
    values = [group.value for group in counted.values()]
    recall_class, recall_gap = widest(list(counted.values()))
    several = len(values) > 1
    return Attribute(
        mean=float(np.mean(values)) if values else None,
        disparity=float(np.std(values)) if several else None,
        worst=min(values, default=None),
        worst_group=min(counted, key=lambda name: counted[name].value, default=None),
        gap=max(values) - min(values) if several else None,
        recall_gap=recall_gap,
        recall_class=recall_class,
        unknown=int((of_example == UNKNOWN).sum()),
        absent=sorted(trained.sizes.keys() - set(names) - {UNKNOWN}) if trained else [],
        groups=groups,
    )


def _group(  # all it is made of
    table: _Table,
    name: str,
    mask: NDArray[np.bool_],
    trained: Trained | None,
    support: Sequence[str],
    min_n: int,
) -> Group:
    summary = summarize(table.columns, mask=mask)
    low, high = summary.interval[table.metric]
    members = np.flatnonzero(mask)
    gold, told = [table.gold[i] for i in members], [table.told[i] for i in members]
    counts = Counter(one for names in gold for one in names)
    right = Counter(one for a, b in zip(gold, told, strict=True) for one in a & b)
    worst = worst_class(gold, told)
    weighing = sum(table.columns.weights[i] > 0 for i in members)
    of_training = trained.classes.get(name) if trained else None
    return Group(
        n=len(members),
        value=summary.mean[table.metric],
        low=low,
        high=high,
        flagged=(weighing or len(members)) < min_n,
        train=trained.sizes[name] if trained else None,
        shift=divergence(of_training, counts, support) if of_training and counts else None,
        worst_class=worst,
        worst_class_share=counts[worst] / len(members) if worst is not None else None,
        recalls={one: right[one] / n for one, n in sorted(counts.items()) if n >= FEWEST},
        error=table.error(members),
        unweighted=summary.unweighted,
    )


def _cross(table: _Table, first: str, second: str) -> dict[str, dict[str, tuple[int, float]]]:
    one, other = table.groups(first), table.groups(second)
    found: dict[str, dict[str, tuple[int, float]]] = defaultdict(dict)
    for a, b in sorted(set(zip(one.tolist(), other.tolist(), strict=True))):
        if UNKNOWN not in (a, b):
            mask = (one == a) & (other == b)
            found[a][b] = (int(mask.sum()), table.value(mask))
    return dict(found)
