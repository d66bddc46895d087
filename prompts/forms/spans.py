"""Questions about a text, for the task `reading`: CMRC2018, and flat rows of SQuAD."""

from collections.abc import Iterator, Mapping
from typing import Any

from panjue.prompts.forms.form import Case, Form, Row
from panjue.prompts.plumbing.errors import NotSaid


def _cmrc2018(row: Row) -> Iterator[Case | NotSaid]:
    """Yield the questions of a text: `{"context_text": "…", "qas": [{"query_text": "…"}]}`."""
    questions = row["qas"]
    if not isinstance(questions, list) or not questions:
        yield NotSaid("a text without questions")
        return
    for question in questions:
        if not isinstance(question, Mapping):
            yield NotSaid("a text without questions")
            continue
        case = {
            "id": question.get("query_id"),
            "context": row["context_text"],
            "casename": row.get("title") or "",
            "question": question.get("query_text"),
        }
        yield _with_answers(case, question)


def _squad(row: Row) -> Iterator[Case | NotSaid]:
    case = {key: row.get(key) for key in ("id", "context", "question")}
    case["casename"] = row.get("title") or ""
    yield _with_answers(case, row)


def _with_answers(case: Case, row: Row) -> Case | NotSaid:
    """Return the question with its answers; without their key, it is a question to answer.

    Some references of people are not in the text; one reference in the text is enough.
    """
    if "answers" not in row and "answer" not in row:
        return case
    texts = _texts(row.get("answers", row.get("answer")))
    context = case["context"] if isinstance(case["context"], str) else ""
    if texts is None or not all(isinstance(text, str) for text in texts):
        return NotSaid("several spans, or answers that cannot be read", str(row.get("answers")))
    if texts and not any(text in context for text in texts):
        return NotSaid("an answer that is not in the text", texts[0])
    answers = [{"text": text, "answer_start": context.find(text)} for text in texts]
    return {**case, "answers": answers, "is_impossible": "false" if texts else "true"}


def _texts(answers: Any) -> list[Any] | None:
    """Return the texts of answers: `["…"]`, `{"text": ["…"]}`, `[{"text": "…"}]`, `"…"`."""
    if isinstance(answers, Mapping):
        answers = answers.get("text")
    if isinstance(answers, str):
        return [answers]
    if not isinstance(answers, list):
        return None
    texts = [one.get("text") if isinstance(one, Mapping) else one for one in answers]
    return [_number_in_text(text) for text in texts]


def _number_in_text(answer: Any) -> Any:
    """Return a number as it stands in a text, 3.0 -> `3`; return any other answer unchanged."""
    if isinstance(answer, float):
        return str(int(answer)) if answer.is_integer() else f"{answer:.15g}"
    return str(answer) if type(answer) is int else answer


CMRC2018 = Form("CMRC2018", lambda row: {"context_text", "qas"} <= row.keys(), _cmrc2018)
SQUAD = Form("rows of SQuAD", lambda row: {"context", "question"} <= row.keys(), _squad)
