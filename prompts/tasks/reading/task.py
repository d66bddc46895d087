"""Questions about a case, answered from its text (CAIL2019 阅读理解, data set CJRC).

A question may have several references: gold answers by different people. An answer is a span (a
part of the text), YES, NO or an empty text (`""`), which says that the text has no answer.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from panjue.prompts.example import Answer, Decoded, Example, known_groups
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.decode import last_object, load_json, visible
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import FileRow, dump
from panjue.prompts.plumbing.rows import Faulty, check_item, list_items
from panjue.prompts.plumbing.submissions import JSON_LIST
from panjue.prompts.render import neutralize, render
from panjue.prompts.task import Ask, Data, Schema, Score, Task, closed_object, id_of, text_of
from panjue.prompts.tasks.metrics import Row
from panjue.prompts.tasks.reading.metric import em, f1, shown

TEXT_WITHOUT_SPAN = {"yes": "YES", "no": "NO", "unknown": ""}
"""Type of an answer that is no part of the text (no span) -> what files write for it."""

KIND_OF_TEXT = {text: kind for kind, text in TEXT_WITHOUT_SPAN.items()}
KINDS = ("span", *TEXT_WITHOUT_SPAN)

DOMAINS = ("civil", "criminal")
"""The test sets of the contest, which ranks by the mean of their scores."""

SUBMISSION = replace(JSON_LIST, same=dump, last_counts=True)
"""For the contest's script, 1 is not "1", and the last answer of a repeated id counts."""

MAX_SPAN_LENGTH = 400
"""In characters. The longest of 18,000 real references has 397."""


def rows(path: Path) -> Iterator[FileRow]:
    """Yield the questions of a file, in which documents have paragraphs with questions."""
    for i, document in enumerate(list_items(path, "data")):
        for outer_place, paragraph in _items(document, "paragraphs", f"data[{i}]"):
            for place, question in _items(paragraph, "qas", outer_place):
                yield place, partial(_row, document, paragraph, question)


def _items(parent: Any, key: str, place: str) -> list[tuple[str, Any]]:
    """Return (place, item) for a list; without a list, one None, which `_row` refuses."""
    items = parent.get(key) if isinstance(parent, dict) else None
    if not isinstance(items, list) or not items:
        return [(place, None)]
    return [(f"{place}.{key}[{i}]", item) for i, item in enumerate(items)]


def _row(document: Any, paragraph: Any, question: Any) -> dict[str, Any]:
    """Return a question's fields with those of its paragraph and its document."""
    for part in (document, paragraph, question):
        if isinstance(part, Faulty):
            raise UserError(part.reason)
        if not isinstance(part, dict):
            raise UserError("no document of the form {paragraphs: [{context, qas: [{id, …}]}]}")
    row = {**document, **paragraph, **question}
    del row["paragraphs"], row["qas"]
    if "id" not in {**paragraph, **question}:
        row.pop("id", None)  # the id of a document is not that of a question
    check_item(row)
    return row


def read(row: Mapping[str, Any]) -> Example:
    """Read a question with the text of its case, and in training and gold files its references."""
    key = id_of(row)
    context = text_of(row, "context")
    question = text_of(row, "question")
    case = row.get("casename") or ""
    if not isinstance(case, str):
        raise UserError("'casename' must be a text")
    texts = _references_of(row)
    notes = []
    for text in texts:
        if kind_of(text) == "span" and text not in context:
            notes.append(f"the reference {text[:40]!r} is not in the text")
    groups = known_groups({"domain": row.get("domain")})
    domain = groups.get("domain")
    if texts and domain not in (None, *DOMAINS):
        # The contest's scorer has no other domain, and fails.
        notes.append(f"domain {domain!r} is neither civil nor criminal: the contest stops there")
    answer = None
    if texts:
        answer = _gold_answer(texts)
        groups["type"] = answer["type"]
    return Example(
        id=key,
        text=context,
        inputs={"question": question, "casename": case},
        answer=answer,
        references=leave_one_out(texts),  # an answer is scored by each of these sets
        groups=groups,
        anchor=question,
        notes=tuple(notes),
    )


def _references_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the texts of all references; none in a test file without gold.

    If all texts are blank, `is_impossible` decides whether this is gold:

    - "true": it is, the text has no answer.
    - absent: it is, with the texts that are listed.
    - another value, such as a blank: it is not, the row is from a test file.
    """
    texts = _texts([] if row.get("answers") is None else row["answers"])
    are_blank = not any(map(str.strip, texts))
    if are_blank and "is_impossible" in row:
        if row["is_impossible"] in ("true", True):
            return texts or ("",)
        return ()
    return texts


def _texts(answers: Any) -> tuple[str, ...]:
    """Return the texts in a list of `{"text": "…"}` or of texts; refuse any other value."""
    texts = []
    for answer in answers if isinstance(answers, list) else [None]:  # None is refused below
        text = answer.get("text") if isinstance(answer, dict) else answer
        if not isinstance(text, str):
            raise UserError("'answers' must be a list of {answer_start, text}")
        texts.append(visible(text))
    return tuple(texts)


def _gold_answer(texts: Sequence[str]) -> dict[str, str]:
    """Return which of several references to learn: the commonest of the commonest type."""
    kinds = Counter(map(kind_of, texts))
    counts = Counter(texts)
    commonest = max(texts, key=lambda text: (kinds[kind_of(text)], counts[text]))
    return _answer(kind_of(commonest), commonest)


def leave_one_out(texts: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Return the official sets of references: each leaves out one, unless there is only one."""
    if len(texts) < 2:
        return (texts,) if texts else ()
    sets = combinations(texts, len(texts) - 1)
    return tuple(sets)[::-1]  # the first set leaves out the first text


def kind_of(reference: str) -> str:
    """Return the type of an answer as files write it: `YES` -> yes, `""` -> unknown, else span.

    White space does not count: ` Y ES ` is YES.
    """
    return KIND_OF_TEXT.get("".join(reference.split()), "span")


def _answer(kind: str, text: str) -> dict[str, str]:
    """Return an answer of a type; only a span has a text."""
    return {"type": kind, "answer": text if kind == "span" else ""}


def schema(_example: Example, _labels: Labels) -> Schema:
    """Return the JSON Schema of a reply: a span, or another type with an empty answer."""
    text = {"type": "string", "minLength": 1, "maxLength": MAX_SPAN_LENGTH}
    span = closed_object({"type": {"enum": ["span"]}, "answer": text})
    without_span = {"enum": list(TEXT_WITHOUT_SPAN)}
    other = closed_object({"type": without_span, "answer": {"const": ""}})
    return {"anyOf": [span, other]}


def target(example: Example) -> str:
    """Return the reply that training teaches, with the span as the prompt writes it (neutralized).

    The whole text is neutralized, since a span may contain only a part of a tag: `<b` of `<b>`.
    This changes single characters, so that all places stay.
    """
    assert example.answer is not None, "a test question has no target"
    span = example.answer["answer"]
    start = example.text.find(span)
    answer = neutralize(example.text)[start : start + len(span)] if start >= 0 else span
    return dump({**example.answer, "answer": answer})


def decode(reply: str, example: Example, _labels: Labels) -> Decoded:
    """Read the type and the span of a reply.

    A span that is not in the text becomes its longest part that is in it, if this is half of it.
    """
    found = last_object(reply, ["type", "answer"]).value
    kind = found.get("type")
    span = found.get("answer")
    if kind not in KINDS or not isinstance(span, str) or (kind == "span" and not span.strip()):
        return Decoded(_answer("unknown", ""), ("nothing to read",), readable=False)
    answer = _answer(kind, span)
    is_valid = load_json(reply) == answer and len(span) <= MAX_SPAN_LENGTH
    repairs: tuple[str, ...] = () if is_valid else ("not the JSON that was asked for",)
    if kind != "span":
        return Decoded(answer, repairs)
    start = neutralize(example.text).find(span)  # as in the prompt; no place changes
    if start >= 0:
        in_text = example.text[start : start + len(span)]
        return Decoded(_answer("span", in_text), repairs)
    part = longest_part(span[:MAX_SPAN_LENGTH], example.text)
    result = "shortened" if part else "dropped"
    repairs += (f"a span that is not in the text, {result}",)
    return Decoded(_answer("span" if part else "unknown", part), repairs)


def longest_part(span: str, text: str) -> str:
    """Return the longest part of `span` that is in `text`; empty if it is less than half of it."""
    part = SequenceMatcher(None, text, span, autojunk=False).find_longest_match()
    if 2 * part.size < len(span):
        return ""
    return text[part.a : part.a + part.size]


def write(example: Example, answer: Answer) -> dict[str, Any]:
    """Return the official submission row: the span, YES, NO or an empty text."""
    text = TEXT_WITHOUT_SPAN.get(answer["type"], answer["answer"])
    return {"id": example.id, "answer": text}


def check(example: Example, row: Row, _labels: Labels | None) -> Iterator[str]:
    """Yield the faults of a submission row: in its fields, or an answer that is not in the text."""
    if row.keys() != {"id", "answer"}:
        yield "the fields must be id and answer"
    if row["id"] != example.id:
        yield f"the id is {row['id']!r}, the question has {example.id!r}"
    answer = row.get("answer")
    if not isinstance(answer, str):
        yield "'answer' must be a text"
    elif kind_of(answer) == "span" and visible(answer) not in example.text:
        yield f"{answer[:40]!r} is not in the text"


def baselines(example: Example) -> Iterator[tuple[str, Row, Row]]:
    """Yield the name, gold row and predicted row of the baselines `human` and `first sentence`.

    For `human`, each reference is an answer that is scored by the other references.
    """
    sets = example.references  # of a, b and c: (b, c), (a, c), (a, b)
    if len(sets) > 1:
        texts = (sets[1][0], *sets[0])  # a, and b, c
        for others, text in zip(sets, texts, strict=True):
            yield "human", {"references": [others]}, {"answer": text}
    first = re.split("[。！？；]", example.text, maxsplit=1)[0]
    yield "first sentence", {"references": sets}, {"answer": first}


TASK = Task(
    data=Data(read=read, write=write, rows=rows, submission=SUBMISSION, check=check),
    ask=Ask(
        prompt=partial(render, "reading"),
        schema=schema,
        target=target,
        decode=decode,
        reserve=128,  # enough for all but twelve of 6,000 real answers
    ),
    score=Score(
        metrics=(em, f1),
        ranked_over=("domain", DOMAINS),
        fallback="always unknown",
        baselines=baselines,
        shown=shown,
        titles={
            "em": ("exact match", "完全匹配"),
            "f1": ("character F1", "字 F1"),
            "answer": ("answer", "答案"),
            "human": ("human", "人"),
            "always unknown": ("always unknown", "始终答“无法回答”"),
        },
    ),
)
