"""How a text and its answers are shown: pieces of the text, and items with their fields."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from panjue.prompts.task import Task
from panjue.prompts.tasks.metrics import Field, Item, Row, same, texts


def class_fields(task: Task) -> tuple[Sequence[str], Sequence[str]]:
    """Return the fields that are sets of classes, and the fields that always have one class."""
    if task.answer.items:
        return task.answer.sets, task.answer.classes
    return (("class",) if task.score.classes else ()), ()


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


def own_gold(row: Row) -> Row:
    """Return an answer as its own gold, where there is no gold to show or to check it with."""
    return {**row, "references": [[""]]}


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


def split_at_names(text: str, names: Sequence[str]) -> list[tuple[str, int | None]]:
    """Split a text at the `names`: (piece, index of the name that it is, or None).

    张某甲 does not name 张某.
    """
    indices = {name: index for index, name in enumerate(names) if name}
    longest_first = sorted(map(re.escape, indices), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(longest_first)})", text) if indices else [text]
    return [(piece, indices.get(piece)) for piece in pieces if piece]
