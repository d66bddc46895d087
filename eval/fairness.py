"""One metric by groups: how far apart they are, and three things that may explain it (FairLex).

Chalkidis et al., "FairLex: A Multilingual Benchmark for Evaluating Fairness in Legal Text
Processing", ACL 2022.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from panjue.eval.calibration import Certainty
from panjue.eval.means import Columns, gold_rows, metric_values, summarize
from panjue.prompts.errors import UserError, did_you_mean
from panjue.prompts.files import read_json
from panjue.prompts.labels import Labels, load_labels
from panjue.prompts.task import UNKNOWN, Example, Row, Task

FREQUENCY = "class_frequency"
"""The attribute that every task with classes has: how often training saw an example's rarest."""

BANDS = ((100, "100 and more"), (10, "10 to 99"), (1, "1 to 9"), (0, "never"))

Classes = frozenset[str]


@dataclass(frozen=True)
class Group:
    """One group of one attribute.

    Attributes:
        n: Its test examples.
        value: The metric over them, with `low` and `high`, its 95% bootstrap interval.
        flagged: It has too few examples to count for mean, disparity, worst and gap.
        train: Training examples of this group (representation inequality); None where unknown.
        shift: KL divergence of its training from its test class distribution, add-one smoothed,
            in nats (label shift).
        worst_class: The class, of those it has in gold, with its lowest F1; `worst_class_share` is
            the share of its test examples that have that class (worst-class influence).
        recall: Share of its gold classes that were predicted (equal opportunity asks for equal
            ones).
        error: Expected calibration error, the mean over the decided fields.
    """

    n: int
    value: float
    low: float
    high: float
    flagged: bool
    train: int | None = None
    shift: float | None = None
    worst_class: str | None = None
    worst_class_share: float | None = None
    recall: float | None = None
    error: float | None = None


@dataclass(frozen=True)
class Attribute:
    """One attribute; numbers are over its groups that are not flagged, None where there are none.

    Attributes:
        mean: Of the groups' values (FairLex's mF1).
        disparity: Their population standard deviation (group disparity, GD).
        worst: The lowest of them (mF1_W), that of `worst_group`.
        gap: The highest less the lowest.
        recall_gap: The same of the groups' recalls.
        unknown: Examples whose group nobody knows; they are in no group here.
        groups: Name -> group, as often as they are in the test file.
    """

    mean: float | None
    disparity: float | None
    worst: float | None
    worst_group: str | None
    gap: float | None
    recall_gap: float | None
    unknown: int
    groups: dict[str, Group]


@dataclass(frozen=True)
class Report:
    """Everything that `panjue fairness` prints.

    Attributes:
        cross: Groups of the first two attributes -> (examples, metric) of those in both.
    """

    task: str
    metric: str
    total: float
    examples: int
    min_n: int
    attributes: dict[str, Attribute]
    cross: dict[str, dict[str, tuple[int, float]]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)


def report(  # noqa: PLR0913  # what the command line offers
    name: str,
    task: Task,
    gold: Path,
    submission: Path,
    by: Sequence[str],
    *,
    train: Path | None = None,
    metric: str | None = None,
    min_n: int = 20,
) -> Report:
    """Score `submission` by the groups of every attribute in `by`.

    Args:
        name: The task's.
        task: The task, with the side file of further groups if there is one.
        gold: The labelled file.
        submission: The answers, or the run folder that has them.
        by: Attributes.
        train: The training file; by default what the run folder says, if it is still there.
        metric: One of the task's; by default its headline.
        min_n: Groups of fewer examples are flagged.

    Raises:
        UserError: A file is missing or broken, or nobody has heard of an attribute or the metric.
    """
    submission = task.handin.find(submission)
    shown = metric or task.scores[-1]
    if shown not in task.scores:
        raise UserError(f"--metric: no {shown!r} in {name}{did_you_mean(shown, task.scores)}")
    labels = _labels(submission.parent)
    table = _Table(task, gold, submission, labels if FREQUENCY in by else None)
    known = list(table.columns.groups)
    for attribute in by:
        if attribute not in known:
            raise UserError(f"--by: no example has {attribute!r}{did_you_mean(attribute, known)}")
    trained = _trained_on(task, train or _train_file(submission.parent), by, labels)
    attributes = {
        attribute: _attribute(table, attribute, shown, trained.get(attribute, {}), min_n)
        for attribute in by
    }
    whole = summarize(table.columns, resamples=0)
    return Report(
        task=name,
        metric=shown,
        total=whole.mean[shown],
        examples=whole.examples,
        min_n=min_n,
        attributes=attributes,
        cross=_cross(table, by[0], by[1], shown) if len(by) > 1 else {},
    )


class _Table:
    """What a report is made of, a row per example."""

    def __init__(self, task: Task, gold: Path, submission: Path, labels: Labels | None) -> None:
        """Read gold and submission; with `labels`, how frequent classes are is an attribute."""
        rows = task.handin.index(submission)
        self.task, self.columns = task, Columns(task)
        self.gold: list[Classes] = []
        self.told: list[Classes] = []
        self.confidence = _confidence(task, submission.parent)
        self.kept: list[tuple[Example, Row, Row | None]] = []
        for example, right in gold_rows(task, gold):
            row = rows.get(example.id)
            values = metric_values(task, right, row, f"{submission}: id {example.id}")
            found = _classes(task, right)
            groups = dict(example.groups)
            if labels and found:
                groups[FREQUENCY] = frequency(found, labels)
            self.columns.add(replace(example, groups=groups), task.weight(example), values)
            self.gold.append(found)
            self.told.append(_classes(task, row) if row is not None else frozenset())
            if self.confidence:
                self.kept.append((replace(example, text=""), right, row))
        if not self.gold:
            raise UserError(f"{gold}: has no examples")

    def groups(self, attribute: str) -> NDArray[np.str_]:
        """Return the group of every example."""
        return np.array(self.columns.groups[attribute])

    def error(self, mask: NDArray[np.bool_]) -> float | None:
        """Return the calibration error over some examples."""
        if not self.confidence:
            return None
        certainty = self.confidence()
        for i in np.flatnonzero(mask):
            certainty.add(*self.kept[i])
        return float(np.mean([found.error for found in certainty.fields().values()]))


def _confidence(task: Task, run: Path) -> Callable[[], Certainty] | None:
    path = run / "confidence.jsonl"
    return (lambda: Certainty(task, path)) if task.decides and path.exists() else None


def _classes(task: Task, row: Row) -> Classes:
    return frozenset(task.classes(row)) if task.classes else frozenset()


def frequency(classes: Iterable[str], labels: Labels) -> str:
    """Return the band of the rarest of some classes by how often training saw it."""
    seen: Counter[str] = Counter()
    for counts in islice(labels.counts.values(), 1):  # the first field is that of the classes
        seen.update(counts)
    rarest = min(seen[name] for name in classes)
    return next(band for least, band in BANDS if rarest >= least)


def _labels(run: Path) -> Labels | None:
    return load_labels(run / "labels.json") if (run / "labels.json").exists() else None


def _train_file(run: Path) -> Path | None:
    """Return the file that the run's adapter was trained on, if it is still to be found."""
    place = run / "manifest.json"
    trained = read_json(place).get("generate", {}).get("trained") if place.exists() else None
    made = Path(trained or "nowhere") / "manifest.json"
    train = Path(read_json(made)["train"]) if made.exists() else None
    return train if train and train.exists() else None


Trained = dict[str, tuple[int, Counter[str]]]
"""Group -> its training examples and their classes."""


def _trained_on(
    task: Task, train: Path | None, by: Sequence[str], labels: Labels | None
) -> dict[str, Trained]:
    """Return attribute -> what training had of its groups; nothing where that is not known."""
    sizes: dict[str, Counter[str]] = defaultdict(Counter)
    classes: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for example in task.read(train) if train else ():
        found = _classes(task, task.gold(example)) if example.answer is not None else Classes()
        groups = dict(example.groups)
        if labels and found:
            groups[FREQUENCY] = frequency(found, labels)
        for attribute in by:
            group = groups.get(attribute, UNKNOWN)
            sizes[attribute][group] += 1
            classes[attribute][group].update(found)
    return {
        attribute: {group: (n, classes[attribute][group]) for group, n in counts.items()}
        for attribute, counts in sizes.items()
    }


def _attribute(
    table: _Table, attribute: str, metric: str, trained: Trained, min_n: int
) -> Attribute:
    of_example = table.groups(attribute)
    names = [name for name, _ in Counter(of_example.tolist()).most_common() if name != UNKNOWN]
    nobody: tuple[int, Counter[str]] = (0, Counter())
    groups = {
        name: _group(
            table, of_example == name, metric, trained.get(name, nobody) if trained else None, min_n
        )
        for name in names
    }
    counted = {name: group for name, group in groups.items() if not group.flagged}
    values = [group.value for group in counted.values()]
    recalls = [group.recall for group in counted.values() if group.recall is not None]
    return Attribute(
        mean=float(np.mean(values)) if values else None,
        disparity=float(np.std(values)) if values else None,
        worst=min(values, default=None),
        worst_group=min(counted, key=lambda name: counted[name].value, default=None),
        gap=max(values) - min(values) if values else None,
        recall_gap=max(recalls) - min(recalls) if recalls else None,
        unknown=int((of_example == UNKNOWN).sum()),
        groups=groups,
    )


def _group(
    table: _Table,
    mask: NDArray[np.bool_],
    metric: str,
    trained: tuple[int, Counter[str]] | None,
    min_n: int,
) -> Group:
    summary = summarize(table.columns, mask=mask)
    low, high = summary.interval[metric]
    members = np.flatnonzero(mask)
    gold, told = [table.gold[i] for i in members], [table.told[i] for i in members]
    counts = Counter(name for names in gold for name in names)
    worst = worst_class(gold, told)
    right = sum(len(a & b) for a, b in zip(gold, told, strict=True))
    return Group(
        n=len(members),
        value=summary.mean[metric],
        low=low,
        high=high,
        flagged=len(members) < min_n,
        train=trained[0] if trained else None,
        shift=divergence(trained[1], counts) if trained and trained[1] and counts else None,
        worst_class=worst,
        worst_class_share=counts[worst] / len(members) if worst is not None else None,
        recall=right / counts.total() if counts else None,
        error=table.error(mask),
    )


def worst_class(gold: Sequence[Classes], told: Sequence[Classes]) -> str | None:
    """Return the class with the lowest F1, of those that gold has; the first by name of equals."""
    wanted, given, right = (
        Counter(name for names in sets for name in names)
        for sets in (gold, told, [a & b for a, b in zip(gold, told, strict=True)])
    )
    return min(wanted, key=lambda n: (2 * right[n] / (wanted[n] + given[n]), n), default=None)


def divergence(train: Mapping[str, int], test: Mapping[str, int]) -> float:
    """Return the Kullback-Leibler divergence of the train from the test distribution, in nats.

    Both are add-one smoothed over the classes that either has.
    """
    names = sorted({*train, *test})
    p = np.array([train.get(name, 0) + 1.0 for name in names])
    q = np.array([test.get(name, 0) + 1.0 for name in names])
    p, q = p / p.sum(), q / q.sum()
    return float((p * np.log(p / q)).sum())


def _cross(
    table: _Table, first: str, second: str, metric: str
) -> dict[str, dict[str, tuple[int, float]]]:
    one, other = table.groups(first), table.groups(second)
    found: dict[str, dict[str, tuple[int, float]]] = defaultdict(dict)
    for a, b in _pairs(one, other):
        mask = (one == a) & (other == b)
        value = summarize(table.columns, resamples=0, mask=mask).mean[metric]
        found[a][b] = (int(mask.sum()), value)
    return dict(found)


def _pairs(one: NDArray[np.str_], other: NDArray[np.str_]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of known groups that some example has."""
    pairs = zip(one.tolist(), other.tolist(), strict=True)
    yield from sorted({pair for pair in pairs if UNKNOWN not in pair})
