"""Rows that are already in panjue's own form, in any layout of the file."""

from collections.abc import Iterator
from typing import Any

from panjue.prompts.forms.form import Case, Form, Row
from panjue.prompts.forms.record import literal
from panjue.prompts.plumbing.errors import NotSaid, UserError
from panjue.prompts.task import Task
from panjue.prompts.tasks.judgment.penalties import TERMS


def own_form(name: str, task: Task, *, in_years: bool, in_table: bool) -> Form:
    """Return the form of a task's own files.

    With `in_years`, terms are years, not months. Cells of a table may have lists and numbers as
    texts.
    """

    def fits(row: Row) -> bool:
        if name == "judgment":
            return "fact" in row and not {"defendants", "outcomes"}.isdisjoint(row)
        if name == "reading":
            return "paragraphs" in row
        try:
            task.data.read(row)
        except (UserError, KeyError):
            return False
        return True

    def cases(row: Row) -> Iterator[Case | NotSaid]:
        if name == "reading":
            yield from _questions(row)
            return
        case = dict(row)
        if in_table:
            case = {key: _value(value) if key in OF_LISTS else value for key, value in case.items()}
        if name == "judgment":
            case = {key: value for key, value in case.items() if value is not None}
        if in_years:
            _to_months(case)
        yield case

    return Form(f"panjue's own form of {name}", fits, cases)


OF_LISTS = ("id", "defendants", "outcomes", "groups")


def _value(value: Any) -> Any:
    """Return the list or number in a cell of a table: `"[1, 2]"` -> `[1, 2]`; else the cell."""
    if isinstance(value, str) and value[:1] in ("[", "{") and not isinstance(literal(value), str):
        return literal(value)
    if isinstance(value, str) and value.isdecimal() and str(int(value)) == value:
        return int(value)
    return value


def _to_months(case: Case) -> None:
    """Change the terms of a case from years to months."""
    try:
        penalties = [outcome["penalty"] for outcome in case["outcomes"]]
        for penalty in penalties:
            for term in TERMS:
                months = 12 * penalty[term]
                if abs(months - round(months)) > 0.01:
                    raise NotSaid("a term that is no whole number of months", str(penalty[term]))
                penalty[term] = round(months)
    except (KeyError, TypeError):
        raise NotSaid("a term that cannot be read", str(case.get("outcomes"))) from None


def _questions(document: Row) -> Iterator[Case | NotSaid]:
    """Yield the questions of a document, each with the fields of its paragraph.

    `{"domain": "…", "paragraphs": [{"context": "…", "qas": [{"question": "…"}]}]}` -> `{"domain":
    "…", "context": "…", "question": "…"}`
    """
    domain = {"domain": document["domain"]} if "domain" in document else {}
    paragraphs = document["paragraphs"]
    if not isinstance(paragraphs, list):
        yield NotSaid("a paragraph without questions")
        return
    for paragraph in paragraphs:
        of_text = paragraph if isinstance(paragraph, dict) else {}
        questions = of_text.get("qas")
        if not isinstance(questions, list) or not questions:
            yield NotSaid("a paragraph without questions")
            continue
        of_text = {key: value for key, value in of_text.items() if key != "qas"}
        for question in questions:
            answers = question.get("answers") if isinstance(question, dict) else None
            if not isinstance(question, dict):
                yield NotSaid("a question that is no object")
            elif isinstance(answers, list) and any(isinstance(one, list) for one in answers):
                yield NotSaid("an answer of several spans")
            else:
                yield {**domain, **of_text, **question}
