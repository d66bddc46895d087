"""Exports of Label Studio, JSON and JSON-MIN."""

from collections.abc import Iterator, Mapping
from typing import Any

from panjue.prompts.forms import table
from panjue.prompts.forms.form import Case, Form, Row
from panjue.prompts.plumbing.errors import NotSaid

VALUES = ("choices", "text", "taxonomy", "labels", "number")
"""Keys in the value of a result."""


def flat_task(row: Row) -> dict[str, Any]:
    """Return a task as a row of a table: its data, and the value of each control.

    `{"data": {"fact": "…"}, "annotations": […]}` -> `{"id": 7, "fact": "…", "罪名": "盗窃罪"}`
    """
    data = row.get("data")
    if not isinstance(data, Mapping):
        raise NotSaid("a task without data")
    made = row.get("annotations") or row.get("completions") or []
    made = made if isinstance(made, list) else []
    valid = [one for one in made if isinstance(one, Mapping) and not one.get("was_cancelled")]
    if not valid:
        raise NotSaid("a task without an annotation")
    read = [_annotated(one) for one in valid]
    if any(one != read[0] for one in read):
        raise NotSaid("annotations that differ")
    of_both = data.keys() & read[0].keys()
    differing = sorted(name for name in of_both if data[name] != read[0][name])
    if differing:
        raise NotSaid("two columns of one meaning differ", ", ".join(differing))
    return {"id": row.get("id"), **data, **read[0]}


def _annotated(annotation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the name of each control of an annotation (`from_name`) -> its value."""
    fields: dict[str, Any] = {}
    results = annotation.get("result")
    for result in results if isinstance(results, list) else []:
        value = result.get("value") if isinstance(result, Mapping) else None
        if not isinstance(value, Mapping):
            continue
        if "start" in value and "end" in value:  # a span does not say whom it is about
            raise NotSaid("spans, which name no person's judgment")
        found = [value[key] for key in VALUES if key in value]
        name = str(result.get("from_name"))
        if len(found) != 1 or name in fields:
            raise NotSaid("an annotation that cannot be read", name)
        items = found[0]
        is_text = isinstance(items, list) and len(items) == 1
        fields[name] = items[0] if is_text else items
    return fields


def _task_cases(row: Row) -> Iterator[Case]:
    """Yield the case of a task, read like a row of a table."""
    fields = flat_task(row)
    if not table.is_table_row(fields):
        raise NotSaid("no facts, or no person and no judgment in words", ", ".join(fields))
    yield from table.table_cases(fields)


LABEL_STUDIO = Form(
    "Label Studio",
    lambda row: (
        isinstance(row.get("data"), Mapping)
        and {"annotations", "completions"} & row.keys() != set()
    ),
    _task_cases,
)
