"""Questions about a case, answered from its text (CAIL2019 阅读理解, data set CJRC)."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from panjue.prompts.example import Answer, Decoded, Example
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.decode import field_text, flatten_forms, load_json, unquote
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import Record, check_text, dump
from panjue.prompts.plumbing.submissions import JSON_LIST, list_items
from panjue.prompts.render import neutralize, render
from panjue.prompts.task import Ask, Data, Messages, Schema, Score, Task, id_of, text_of
from panjue.prompts.tasks.metrics import Row
from panjue.prompts.tasks.reading.metric import em, f1, shown

WRITTEN = {"yes": "YES", "no": "NO", "unknown": ""}
"""Type of an answer that is no span -> what the files have for it."""

KINDS = ("span", *WRITTEN)

LONGEST = 400
"""Characters of a span; the longest of 18,000 real references has 397."""

FAR = 0.5
"""Edits per character beyond which a span that is not in the text is like no part of it."""

WORDS = {
    **dict.fromkeys(("yes", "是", "是的"), "yes"),
    **dict.fromkeys(("no", "否", "不是"), "no"),
    **dict.fromkeys(("unknown", "无", "未知", "未提及", "无法回答"), "unknown"),
}
"""What a reply may write for the types that are no span."""

EDGES = " \n.。`"
"""What may stand around a word."""


def rows(path: Path) -> Iterator[Record]:
    """Yield every question of a SQuAD-like document with the text that it is about.

    Raises:
        UserError: The file is no JSON, or has no list `data`.
    """
    for i, document in enumerate(list_items(path, "data")):
        for place, paragraph in _listed(document, "paragraphs", f"data[{i}]"):
            for inner, question in _listed(paragraph, "qas", place):
                yield inner, partial(_row, document, paragraph, question)


def _listed(outer: Any, key: str, place: str) -> list[tuple[str, Any]]:
    """Return the places and items of a list; one item that is no question where there is none."""
    found = outer.get(key) if isinstance(outer, dict) else None
    if not isinstance(found, list) or not found:
        return [(place, None)]
    return [(f"{place}.{key}[{i}]", item) for i, item in enumerate(found)]


def _row(document: Any, paragraph: Any, question: Any) -> dict[str, Any]:
    """Return a question's fields with those of its paragraph and its document."""
    if not all(isinstance(part, dict) for part in (document, paragraph, question)):
        raise UserError("expected {paragraphs: [{context, qas: [{id, question, …}]}]}")
    row = {**{"domain": document.get("domain")}, **paragraph, **question}
    check_text({key: value for key, value in row.items() if key != "qas"})
    return row


def read(row: Mapping[str, Any]) -> Example:
    """Read one question.

    The gold answer is, of several references, one that most of them agree with in type, then in
    words. `is_impossible` is not read: the references say it.

    Raises:
        UserError: A field is missing or of the wrong type.
    """
    key, context, question = id_of(row), text_of(row, "context"), text_of(row, "question")
    for field in ("casename", "domain"):
        if not isinstance(row.get(field) or "", str):
            raise UserError(f"{field!r} must be a text")
    texts = _references(row["answers"]) if "answers" in row else ()
    kinds, words = Counter(map(kind_of, texts)), Counter(texts)
    chosen = max(texts, key=lambda text: (kinds[kind_of(text)], words[text]), default=None)
    of_gold = {} if chosen is None else {"type": kind_of(chosen)}
    domain = {"domain": row["domain"]} if row.get("domain") else {}
    return Example(
        id=key,
        text=context,
        inputs={"question": question, "casename": row.get("casename") or ""},
        answer=None if chosen is None else _answer(kind_of(chosen), chosen),
        references=leave_one_out(texts),
        groups={**domain, **of_gold},
        anchor=question,
    )


def _references(answers: Any) -> tuple[str, ...]:
    """Return the texts of all references; no answer is the empty one, as in the official code."""
    listed = answers if isinstance(answers, list) else [None]
    texts = [answer.get("text") if isinstance(answer, dict) else answer for answer in listed]
    told = tuple(text for text in texts if isinstance(text, str))
    if len(told) < len(listed):
        raise UserError("'answers' must be a list of {answer_start, text}")
    return told or ("",)


def leave_one_out(texts: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Return the sets of references that the official metric compares with, in turn.

    Each lacks one of several, so that people can be measured by the same rule; one stands alone.
    """
    if len(texts) < 2:
        return (texts,) if texts else ()
    return tuple((*texts[:i], *texts[i + 1 :]) for i in range(len(texts)))


def kind_of(reference: str) -> str:
    """Return the type of an answer as the files have it."""
    return next((kind for kind, text in WRITTEN.items() if text == reference), "span")


def _answer(kind: str, span: str = "") -> dict[str, str]:
    return {"type": kind, "answer": span if kind == "span" else ""}


def prompt(example: Example) -> Messages:
    """Ask the question."""
    return render("reading", example)


def schema(_example: Example, _labels: Labels) -> Schema:
    """Return the JSON Schema of a reply: a span, or one of the other types and nothing beside."""
    spans = {"type": "string", "minLength": 1, "maxLength": LONGEST}
    return {"anyOf": [_object(["span"], spans), _object(list(WRITTEN), {"const": ""})]}


def _object(kinds: list[str], answer: Schema) -> Schema:
    return {
        "type": "object",
        "properties": {"type": {"enum": kinds}, "answer": answer},
        "required": ["type", "answer"],
        "additionalProperties": False,
    }


def target(example: Example) -> str:
    """Return the gold reply."""
    assert example.answer is not None, "a test question has no target"
    span = example.answer["answer"]
    start = example.text.find(span)
    # As the prompt has it: a tag that the span cuts in two is neutralized there.
    told = neutralize(example.text)[start : start + len(span)] if start >= 0 else span
    return dump({**example.answer, "answer": told})


def decode(reply: str, example: Example, _labels: Labels) -> Decoded:
    """Read a reply as a part of the text, yes, no or unknown, whatever it is."""
    strict = _read_strictly(load_json(reply))
    kind, span = strict or _find(reply) or (None, "")
    repairs = [] if strict else ["not the JSON that was asked for"]
    if kind is None:
        return Decoded(_answer("unknown"), (*repairs, "nothing to read"), readable=False)
    start, end = 0, 0
    if kind == "span":
        start = neutralize(example.text).find(span)
        end = start + len(span)
    if start < 0:
        start, end = closest(span, example.text)
        kind = "span" if start < end else "unknown"
        repairs.append(f"a span that is not in the text, {'mended' if start < end else 'dropped'}")
    return Decoded(_answer(kind, example.text[start:end]), tuple(repairs))


def _read_strictly(found: Any) -> tuple[str, str] | None:
    """Return type and answer of a reply that is valid under the schema."""
    if not (isinstance(found, dict) and list(found) == ["type", "answer"]):
        return None
    kind, span = found.values()
    if not (isinstance(kind, str) and kind in KINDS and isinstance(span, str)):
        return None
    is_valid = 0 < len(span) <= LONGEST if kind == "span" else not span
    return (kind, span) if is_valid else None


def _find(reply: str) -> tuple[str, str] | None:
    """Return type and answer of a reply with fences, remarks or a torn end, or of bare words."""
    plain = flatten_forms(reply)
    kind, span = (
        _field(reply, keys) or _field(plain, keys) for keys in ("type|类型", "answer|答案")
    )
    if kind is None and span is None:
        span = plain.strip(EDGES)
        if not 0 < len(span) <= LONGEST:
            return None
    span = (span or "")[:LONGEST]
    meant = WORDS.get((kind or "").strip(EDGES).lower(), "span")
    if meant == "span":
        meant = WORDS.get(span.strip(EDGES).lower(), "span" if span.strip() else "unknown")
    return (meant, span) if meant == "span" else (meant, "")


def _field(text: str, keys: str) -> str | None:
    found = field_text(text, keys)
    if found is None:  # the reply ends inside it
        torn = re.search(rf'"(?:{keys})"\s*+:\s*+"([^"\\]++)$', text)
        return torn and torn[1]
    return unquote(found)


def closest(span: str, text: str) -> tuple[int, int]:
    """Return where the part of `text` stands that is most like `span`; nowhere if none is near.

    Exact: no part of the text has a smaller edit distance (Sellers 1980). Of equals one that ends
    as the span does, and begins so.
    """
    nowhere = np.zeros(len(text) + 1, dtype=np.int64)  # a part may begin anywhere for nothing
    distances = edit_distances(span, text, nowhere)
    if distances.min() > len(span) * FAR:
        return 0, 0
    end = _best(distances, text, span)
    # The same backwards, where the part must begin at that end.
    before = text[:end][::-1]
    distances = edit_distances(span[::-1], before, np.arange(end + 1))
    return end - _best(distances, before, span[::-1]), end


def _best(distances: NDArray[np.int64], text: str, span: str) -> int:
    """Return the end of least distance, one behind the last character of `span` if it can be."""
    ends = [int(end) for end in np.flatnonzero(distances == distances.min())]
    return next((end for end in ends if text[:end].endswith(span[-1:])), ends[0])


def edit_distances(span: str, text: str, row: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for every place of `text` the edits from `span` to what ends there.

    `row` has the edits from an empty span.
    """
    written = np.array([ord(character) for character in text], dtype=np.int64)
    steps = np.arange(len(text) + 1)
    for number, character in enumerate(span, start=1):
        over = np.minimum(row[1:] + 1, row[:-1] + (written != ord(character)))
        row = np.concatenate(([number], over))
        row = np.minimum.accumulate(row - steps) + steps  # further characters of the text
    return row


def write(example: Example, answer: Answer) -> dict[str, Any]:
    """Return the official hand-in row: the span, YES, NO or nothing."""
    return {"id": example.id, "answer": WRITTEN.get(answer["type"], answer["answer"])}


def check(example: Example, row: Row, _labels: Labels | None) -> Iterator[str]:
    """Yield what a submission row has wrong: its shape, an answer that is not in the text."""
    if row.keys() != {"id", "answer"}:
        yield "the fields must be id and answer"
    if row["id"] != example.id:
        yield f"the id is written {row['id']!r}, the question has {example.id!r}"
    answer = row.get("answer")
    if not isinstance(answer, str):
        yield "'answer' must be a text"
    elif kind_of(answer) == "span" and answer not in example.text:
        yield f"{answer[:40]!r} is not in the text"


def baselines(example: Example) -> Iterator[tuple[str, Row, Row]]:
    """Yield people, each reference against the others, and the first sentence."""
    sets = example.references
    # The text that is left out of the first set is the first of the second.
    texts = (sets[1][0], *sets[0]) if len(sets) > 1 else ()
    for others, text in zip(sets, texts, strict=False):
        yield "human", {"references": [others]}, {"answer": text}
    first = re.split("[。！？；]", example.text, maxsplit=1)[0]
    yield "first sentence", {"references": sets}, {"answer": first}


TASK = Task(
    data=Data(read=read, write=write, rows=rows, submission=JSON_LIST, check=check),
    ask=Ask(
        prompt=prompt,
        schema=schema,
        target=target,
        decode=decode,
        reserve=128,  # the longest but twelve of 6,000 real answers
    ),
    score=Score(
        metrics=(em, f1),
        fallback="always unknown",
        baselines=baselines,
        reported={
            "human_f1": ("baselines", "human", "f1"),
            "civil_f1": ("domain", "civil", "f1"),
            "criminal_f1": ("domain", "criminal", "f1"),
        },
        shown=shown,
    ),
)
