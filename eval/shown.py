"""How a text and its answers are shown: pieces of the text, and items with fields."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from panjue.prompts.plumbing.decode import visible
from panjue.prompts.task import Task
from panjue.prompts.tasks.metrics import Item, Row, by_name, field_of, texts


def class_fields(task: Task) -> Sequence[str]:
    """Return the fields for which a report counts errors by label or class.

    Fields of persons all have labels. An answer without persons has them only if the task says what
    its classes are (`Score.classes`); `items_of` shows these as one field, `class`.
    """
    if task.answer.items:
        return task.answer.fields
    return ("class",) if task.score.classes else ()


def items_of(task: Task, gold: Row, row: Row | None) -> Iterator[Item]:
    """Yield the items of a gold row, each with its fields: gold texts and those of the answer."""
    rules = task.score
    if rules.shown:
        yield from rules.shown(gold, row)
    elif task.answer.items:
        yield from _named_items(task, gold, row)
    elif rules.classes:
        predicted = rules.classes(row) if row else ()
        yield "", [field_of("class", rules.classes(gold), predicted)]
    else:
        answered = row or {}
        keys = dict.fromkeys([*gold, *answered])
        keys.pop("id", None)
        yield "", [field_of(key, texts(gold.get(key)), texts(answered.get(key))) for key in keys]


def _named_items(task: Task, gold: Row, row: Row | None) -> Iterator[Item]:
    """Yield each gold item with its fields. The prediction is the item of the same name."""
    predicted = by_name(task.answer.items_of(row)) if row else {}
    for person, gold_item in by_name(task.answer.items_of(gold)).items():
        predicted_item = predicted.get(person, {})
        fields = []
        for name in task.answer.fields:
            readable = task.score.readable.get(name, str)
            gold_labels = map(readable, labels_in(task, name, gold_item))
            predicted_labels = map(readable, labels_in(task, name, predicted_item))
            fields.append(field_of(name, gold_labels, predicted_labels))
        yield visible(str(gold_item["name"])), fields  # as in `Example.names`


def labels_in(task: Task, field: str, item: Mapping[str, Any]) -> list[str]:
    """Return the labels of a field of an item in a row; none if it lacks the field.

    A class may be written as its position in a closed list: `1 -> "无期徒刑"`.
    """
    value = item.get(field)
    order = task.answer.order.get(field, ())
    if isinstance(value, int) and 0 <= value < len(order):
        value = order[value]
    return texts(value)
