"""Questions with replies in the forms of other trainers: Alpaca, ShareGPT, OpenAI's messages."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from panjue.prompts.forms.form import ARTICLES, CHARGES, NAMES_OF_PERSON, TERM, Case, Form, Row
from panjue.prompts.forms.record import outcome_of
from panjue.prompts.plumbing.decode import after_thinking, flatten_forms, load_json
from panjue.prompts.plumbing.errors import NotSaid
from panjue.prompts.tasks.judgment.verdict import Outcome, verdict_of

QUESTION_ROLES = ("user", "human", "prompter")
REPLY_ROLES = ("assistant", "gpt", "chatgpt", "bot", "model")
SPEAKERS = ("from", "role")
TURN_TEXTS = ("value", "content")


def case_of(fact: str, reply: str) -> Case:
    """Return the case of facts and a reply that judges them, in JSON, in lines or in words."""
    if not fact.strip():
        raise NotSaid("no facts")
    outcomes, of_nobody = _outcomes(reply)
    case: Case = {"fact": fact, "defendants": [one["name"] for one in outcomes]}
    case["outcomes"] = outcomes
    if of_nobody:
        case[OF_NOBODY] = len(of_nobody)
    return case


OF_NOBODY = "articles of nobody"
"""Key of a case for the number of articles that its text cites without saying for whom. This number
is counted and not written."""


def _outcomes(reply: str) -> tuple[list[Outcome], tuple[str, ...]]:
    text = after_thinking(reply).strip()
    if not text:
        raise NotSaid("an empty reply")
    fenced = re.search(r"```(?:json)?\s*(.*?)```", text, re.DOTALL)
    value = load_json(fenced[1] if fenced else text)
    if value is not None:
        return [outcome_of(person) for person in _persons(value)], ()
    if text[0] in "[{" or fenced:
        raise NotSaid("a reply that is no JSON", text)
    if persons := list(_in_lines(text)):
        return [outcome_of(person) for person in persons], ()
    return verdict_of(text)


def _persons(value: Any) -> list[Row]:
    """Return the objects of persons in a reply: a list, an object's only list, or the object."""
    if isinstance(value, Mapping):
        lists = [item for item in value.values() if _is_list_of_objects(item)]
        value = lists[0] if len(lists) == 1 else [value]
    if not _is_list_of_objects(value):
        raise NotSaid("a reply without persons", str(value))
    return list(value)


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


KEYS = {key: names[-1] for names in (NAMES_OF_PERSON, CHARGES, ARTICLES, TERM) for key in names}
LINE = re.compile(r"^[\s\-*#>·]*(?:\*\*)?([^\s:*]{2,8}?)(?:\*\*)?:(?:\*\*)?\s*(.+?)[。;.\s]*$")


def _in_lines(text: str) -> Iterator[dict[str, str]]:
    """Yield the fields of each person of a reply in lines: `被告人：张某`, `罪名：盗窃罪`.

    If the text has any other line, yield nothing.
    """
    person: dict[str, str] = {}
    pieces = [piece for piece in re.split("[\n;；]", text) if piece.strip()]
    found = [LINE.match(flatten_forms(piece)) for piece in pieces]
    if not all(match and match[1] in KEYS for match in found):
        return
    for piece, match in zip(pieces, found, strict=True):
        assert match is not None
        key = KEYS[match[1]]
        if key in person or (key == KEYS["被告人"] and person):
            yield person
            person = {}
        value = re.split("[:：]", piece, maxsplit=1)[1]
        person[key] = value.strip().strip("*").strip().rstrip("。;；.")
    yield person


def _alpaca(rows: Sequence[Row]) -> Iterator[Case]:
    [row] = rows
    if row.get("history"):
        raise NotSaid("a dialogue of several turns")
    given = row.get("input") or row["instruction"]
    yield {**_id(row), **case_of(_string(given), _string(row["output"]))}


def _pair(question: str, reply: str) -> Form:
    def cases(rows: Sequence[Row]) -> Iterator[Case]:
        [row] = rows
        if row.get("history"):
            raise NotSaid("a dialogue of several turns")
        asked, replied = row[question], row[reply]
        if isinstance(asked, list) and isinstance(replied, list):  # trl's conversational form
            yield {**_id(row), **_conversation([*asked, *replied])}
            return
        yield {**_id(row), **case_of(_string(asked), _string(replied))}

    def fits(row: Row) -> bool:
        return {question, reply} <= row.keys()

    return Form(f"{question} and {reply}", fits, cases)


def _turns(key: str) -> Any:
    def cases(rows: Sequence[Row]) -> Iterator[Case]:
        [row] = rows
        yield {**_id(row), **_conversation(row[key])}

    return cases


def _conversation(turns: Any) -> Case:
    """Return the case of one question and its reply; ignore a system turn before them."""
    said: list[tuple[str, str]] = []
    for turn in turns if isinstance(turns, list) else []:
        if not isinstance(turn, dict):
            raise NotSaid("a turn that is no object", str(turn))
        speaker = next((str(turn[key]).lower() for key in SPEAKERS if key in turn), "")
        text = next((turn[key] for key in TURN_TEXTS if key in turn), None)
        if speaker not in ("system", "developer"):
            said.append((speaker, _string(text)))
    speakers = [speaker for speaker, _ in said]
    if len(said) > 2:
        raise NotSaid("a dialogue of several turns")
    if len(said) < 2 or speakers[0] not in QUESTION_ROLES or speakers[1] not in REPLY_ROLES:
        raise NotSaid("no question with a reply", ", ".join(speakers))
    return case_of(said[0][1], said[1][1])


def _string(value: Any) -> str:
    """Return a text, or the only part of OpenAI's list of parts."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        value = value[0].get("text")
    if not isinstance(value, str):
        raise NotSaid("a turn that is no text", str(value))
    return value


def _id(row: Row) -> Case:
    return {"id": row["id"]} if row.get("id") is not None else {}


ALPACA = Form("Alpaca", lambda row: {"instruction", "output"} <= row.keys(), _alpaca)
SHAREGPT = Form("ShareGPT", lambda row: "conversations" in row, _turns("conversations"))
MESSAGES = Form("OpenAI's messages", lambda row: "messages" in row, _turns("messages"))
COMPLETION = _pair("prompt", "completion")
RESPONSE = _pair("query", "response")
QUESTIONS = (ALPACA, SHAREGPT, MESSAGES, COMPLETION, RESPONSE)
"""Forms in which a whole question becomes the facts, with any instruction in it."""
