"""A gold answer and a predicted one, field by field, as texts for people."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from panjue.prompts.task import Task
from panjue.prompts.tasks.metrics import Field, Item, Row, same, texts


def items_of(task: Task, gold: Row, row: Row | None) -> Iterator[Item]:
    """Yield items with their fields: as the task shows them, or by items, classes or keys."""
    if task.score.shown:
        yield from task.score.shown(gold, row)
    elif task.answer.items:
        items = task.answer.items_of(row) if row else []
        predicted = {item["name"]: item for item in reversed(items)}  # of doubled names the first
        for item in task.answer.items_of(gold):
            name = item["name"]
            yield str(name), list(_decided(task, item, predicted.get(name, {})))
    elif task.score.classes:
        yield "", [same("class", task.score.classes(gold), task.score.classes(row) if row else ())]
    else:
        keys = [key for key in dict.fromkeys([*gold, *(row or {})]) if key != "id"]
        yield "", [same(key, texts(gold.get(key)), texts((row or {}).get(key))) for key in keys]


def _decided(task: Task, gold: Mapping[str, Any], predicted: Mapping[str, Any]) -> Iterator[Field]:
    for name in task.answer.fields:
        order, readable = task.answer.order.get(name, ()), task.score.readable.get(name, str)
        values = (_as_texts(judged.get(name), order) for judged in (gold, predicted))
        yield same(name, *(map(readable, value) for value in values))


def _as_texts(value: Any, order: Sequence[str]) -> list[str]:
    """Return the texts of a value; a class number becomes the name of the class."""
    if isinstance(value, int) and 0 <= value < len(order):
        return [order[value]]
    return texts(value)
