"""How a text and its answers are shown: pieces of the text, and items with fields."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from panjue.prompts.plumbing.decode import visible
from panjue.prompts.task import Task
from panjue.prompts.tasks.metrics import Item, Row, by_name, same, texts


def class_fields(task: Task) -> Sequence[str]:
    """Return the fields of `items_of` whose values are classes."""
    if task.answer.items:
        return task.answer.fields
    return ("class",) if task.score.classes else ()


def items_of(task: Task, gold: Row, row: Row | None) -> Iterator[Item]:
    """Yield items with their fields, as the task shows them; else by items, classes or keys."""
    rules = task.score
    if rules.shown:
        yield from rules.shown(gold, row)
    elif task.answer.items:
        yield from _named_items(task, gold, row)
    elif rules.classes:
        predicted = rules.classes(row) if row else ()
        yield "", [same("class", rules.classes(gold), predicted)]
    else:
        answered = row or {}
        keys = dict.fromkeys([*gold, *answered])
        keys.pop("id", None)
        yield "", [same(key, texts(gold.get(key)), texts(answered.get(key))) for key in keys]


def _named_items(task: Task, gold: Row, row: Row | None) -> Iterator[Item]:
    """Yield the name and the fields of each gold item and the predicted item of that name."""
    predicted = by_name(task.answer.items_of(row)) if row else {}
    for key, item in by_name(task.answer.items_of(gold)).items():
        given = predicted.get(key, {})
        fields = []
        for field in task.answer.fields:
            gold_texts = _readable(task, field, item)
            fields.append(same(field, gold_texts, _readable(task, field, given)))
        yield visible(str(item["name"])), fields  # as in `Example.names`


def _readable(task: Task, field: str, item: Mapping[str, Any]) -> list[str]:
    """Return the readable texts of a field's value; the number of a class becomes its name."""
    value = item.get(field)
    order = task.answer.order.get(field, ())
    if isinstance(value, int) and 0 <= value < len(order):
        value = order[value]
    return list(map(task.score.readable.get(field, str), texts(value)))
