"""What a gold answer and a told one say, field by field, as a person reads them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from panjue.eval.means import named
from panjue.prompts.files import dump
from panjue.prompts.task import Row, Task


@dataclass(frozen=True)
class Field:
    """One field of an answer, gold and told, as texts in order; and whether it is right."""

    name: str
    gold: Sequence[str]
    told: Sequence[str]
    right: bool


Item = tuple[str, list[Field]]
"""Who or what is answered, nothing where it is the whole example; and its fields."""

Shown = Callable[[Row, Row | None], Iterator[Item]]


def items_of(task: Task, gold: Row, row: Row | None) -> Iterator[Item]:
    """Yield what is judged of one example: as the task says, by its items, classes or keys."""
    if task.shown:
        shown: Shown = named(task.shown)
        yield from shown(gold, row)
    elif task.decides:
        items = row[task.decides.items] if row else []
        told = {one["name"]: one for one in reversed(items)}  # of several the first counts
        for one in gold[task.decides.items]:
            yield str(one["name"]), list(_decided(task, one, told.get(one["name"], {})))
    elif task.classes:
        yield "", [same("class", task.classes(gold), task.classes(row) if row else ())]
    else:
        keys = [key for key in dict.fromkeys([*gold, *(row or {})]) if key != "id"]
        yield "", [same(key, texts(gold.get(key)), texts((row or {}).get(key))) for key in keys]


def same(name: str, gold: Any, told: Any) -> Field:
    """Return a field that is right where both have the same values, in whatever order."""
    gold, told = list(gold), list(told)
    return Field(name, gold, told, set(gold) == set(told))


def texts(value: Any) -> list[str]:
    """Return a value as texts: those of a list, the one that it is, none of nothing."""
    listed = value if isinstance(value, list | tuple) else [] if value in (None, "") else [value]
    return [one if isinstance(one, str) else dump(one) for one in listed]


def _decided(task: Task, gold: Mapping[str, Any], told: Mapping[str, Any]) -> Iterator[Field]:
    assert task.decides
    for name in task.decides.fields:
        order = task.decides.order.get(name, ())
        yield same(name, _named(gold.get(name), order), _named(told.get(name), order))


def _named(value: Any, order: Sequence[str]) -> list[str]:
    """Return the texts of a value; a number of the hand-in by what it stands for."""
    if isinstance(value, int) and 0 <= value < len(order):
        return [order[value]]
    return texts(value)
