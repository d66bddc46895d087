"""The label lists of a contest's stage. Its code knows no other labels, not even in gold."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

from panjue.prompts.labels import Labels, load_labels
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_json
from panjue.prompts.task import Task
from panjue.prompts.tasks.metrics import CorpusMetric, Metric, Row

Lists = Mapping[str, AbstractSet[str]]
"""Field -> the labels that count."""


def read_lists(task: Task, paths: Sequence[Path], answers: Labels) -> Lists:
    """Read the files of a stage; each is `labels.json` of a run, or the list of one field.

    A list of one field is `{label: number}` or a JSON list, and does not name its field: it is the
    field with most of these labels in `answers`, the labels of the answers that are scored.
    """
    if not task.answer.items:
        raise UserError("--labels: the labels of this task are always the same")
    lists: dict[str, set[str]] = {}
    for path in paths:
        for field, names in _lists_of(task, path, answers).items():
            lists.setdefault(field, set()).update(names)
    return lists


def _lists_of(task: Task, path: Path, answers: Labels) -> dict[str, set[str]]:
    """Return field -> labels of one file: the label sets of a run, or the list of one field."""
    value = read_json(path)
    if isinstance(value, dict) and "counts" in value:  # the `labels.json` of a run
        counts = load_labels(path).counts
        return {field: set(counts.get(field, ())) for field in task.answer.sets}
    labels = set(map(str, value)) if isinstance(value, list | dict) else set()
    n_shared = {field: len(labels & set(answers.names(field))) for field in task.answer.sets}
    if not any(n_shared.values()):
        raise UserError(f"{path}: shares no label with the answers; is it a list of labels?")
    likeliest = max(n_shared, key=lambda field: n_shared[field])  # the list does not name its field
    return {likeliest: labels}


def scored_by(task: Task, lists: Lists) -> Task:
    """Return the task with metrics that see only the labels of the lists, as the contest's code."""
    metrics = tuple(_seeing_only(lists, task, metric) for metric in task.score.metrics)
    return replace(task, score=replace(task.score, metrics=metrics))


def _seeing_only(lists: Lists, task: Task, metric: Metric) -> Metric:
    """Return a metric of the same name that ignores the labels which the lists do not have.

    `read_lists` refuses tasks without items (persons). Only such tasks have a `CorpusMetric`.
    """
    assert not isinstance(metric, CorpusMetric), "no task with items has one"

    @wraps(metric)
    def on_listed(gold: Row, predicted: Row | None) -> float:
        return metric(_listed(lists, task, gold), predicted and _listed(lists, task, predicted))

    return on_listed


def _listed(lists: Lists, task: Task, row: Row) -> Row:
    """Return a row without labels that are not in the lists."""
    items = []
    for item in task.answer.items_of(row):
        kept: dict[str, Any] = {}
        for field, known in lists.items():
            kept[field] = [label for label in item[field] if label in known]
        items.append({**item, **kept})
    return task.answer.with_items(row, items)


def outside(lists: Lists, task: Task, row: Row) -> int:
    """Return how many labels of a row are not in the lists."""
    count = 0
    for item in task.answer.items_of(row):
        for field, known in lists.items():
            count += sum(label not in known for label in item[field])
    return count
