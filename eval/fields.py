"""What a gold answer and a told one say, field by field, as a person reads them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from panjue.prompts.example import Decide
from panjue.prompts.task import Task
from panjue.prompts.tasks.metrics import Field, Item, Row, same, texts


def items_of(task: Task, gold: Row, row: Row | None) -> Iterator[Item]:
    """Yield what is judged of one example: as the task says, by its items, classes or keys."""
    if task.score.shown:
        yield from task.score.shown(gold, row)
    elif isinstance(task.answer, Decide):
        items = row[task.answer.items] if row else []
        told = {one["name"]: one for one in reversed(items)}  # of several the first counts
        for one in gold[task.answer.items]:
            yield str(one["name"]), list(_decided(task.answer, one, told.get(one["name"], {})))
    elif task.score.classes:
        yield "", [same("class", task.score.classes(gold), task.score.classes(row) if row else ())]
    else:
        keys = [key for key in dict.fromkeys([*gold, *(row or {})]) if key != "id"]
        yield "", [same(key, texts(gold.get(key)), texts((row or {}).get(key))) for key in keys]


def _decided(decides: Decide, gold: Mapping[str, Any], told: Mapping[str, Any]) -> Iterator[Field]:
    for name in decides.fields:
        order = decides.order.get(name, ())
        yield same(name, _named(gold.get(name), order), _named(told.get(name), order))


def _named(value: Any, order: Sequence[str]) -> list[str]:
    """Return the texts of a value; a number of the hand-in by what it stands for."""
    if isinstance(value, int) and 0 <= value < len(order):
        return [order[value]]
    return texts(value)
