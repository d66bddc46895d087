"""Questions with replies in the forms of other trainers: Alpaca, ShareGPT, OpenAI's messages.

The reply has the judgment.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from panjue.prompts.forms.form import ARTICLES, CHARGES, NAMES_OF_PERSON, TERM, Case, Form, Row
from panjue.prompts.forms.record import outcome_of
from panjue.prompts.plumbing.decode import after_thinking, flatten_forms, load_json
from panjue.prompts.plumbing.errors import NotSaid
from panjue.prompts.tasks.judgment.verdict import Verdict, verdict_of

QUESTION_ROLES = ("user", "human", "prompter")
REPLY_ROLES = ("assistant", "gpt", "chatgpt", "bot", "model")
SPEAKERS = ("from", "role")
TURN_TEXTS = ("value", "content")


def case_of(fact: str, reply: str) -> Case:
    """Return the case of facts and a reply with the judgment, in JSON, in lines or in prose."""
    if not fact.strip():
        raise NotSaid("no facts")
    outcomes, of_nobody = _read_reply(reply)
    case: Case = {"fact": fact, "defendants": [one["name"] for one in outcomes]}
    case["outcomes"] = outcomes
    if of_nobody:
        case[OF_NOBODY] = len(of_nobody)
    return case


OF_NOBODY = "articles of nobody"
"""Key of a case for a note to the user of `panjue convert`: the number of articles that a reply in
prose cites for several persons without saying for whom. They are of the general part."""


def _read_reply(reply: str) -> Verdict:
    """Return what a reply says about each person.

    Only a reply in prose may cite articles without saying for whom (`of_nobody`).
    """
    text = after_thinking(reply).strip()
    if not text:
        raise NotSaid("an empty reply, which names nobody (cases without answers: prompts/DATA.md)")
    fenced = re.search(r"```(?:json)?\s*(.*?)```", text, re.DOTALL)
    value = load_json(fenced[1] if fenced else text)
    if value is not None:
        return Verdict([outcome_of(person) for person in _persons(value)], of_nobody=())
    if text[0] in "[{" or fenced:
        raise NotSaid("a reply that is no JSON", text)
    if persons := _in_lines(text):
        return Verdict([outcome_of(person) for person in persons], of_nobody=())
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
"""Any name of a field of a person -> the same name for all that mean this field."""

LINE = re.compile(r"^[\s\-*#>·]*(?:\*\*)?([^\s:*]{2,8}?)(?:\*\*)?:(?:\*\*)?\s*(.+?)[。;.\s]*$")


def _in_lines(text: str) -> list[dict[str, str]]:
    """Return the fields of each person of a reply in lines: `被告人：张某`, `罪名：盗窃罪`.

    If the text has any other line, return an empty list. A name begins a new person, and so does a
    field that the person already has.
    """
    persons: list[dict[str, str]] = [{}]
    for piece in re.split("[\n;；]", text):
        if not piece.strip():
            continue
        match = LINE.match(flatten_forms(piece))
        if match is None or match[1] not in KEYS:
            return []
        key = KEYS[match[1]]
        is_name = key == KEYS["被告人"]
        if key in persons[-1] or (is_name and persons[-1]):
            persons.append({})
        value = re.split("[:：]", piece, maxsplit=1)[1]
        persons[-1][key] = value.strip().strip("*").strip().rstrip("。;；.")
    return persons


def _alpaca(row: Row) -> Iterator[Case]:
    """Yield the case of a row. The facts are the `input`, or without one in the `instruction`."""
    if row.get("history"):
        raise NotSaid("a dialogue of several turns")
    given = row.get("input") or row["instruction"]
    yield {**_id(row), **case_of(_string(given), _string(row["output"]))}


def _pair(question: str, reply: str) -> Form:
    """Return the form of rows with a question and its reply in columns of these names."""

    def cases(row: Row) -> Iterator[Case]:
        if row.get("history"):
            raise NotSaid("a dialogue of several turns")
        asked, replied = row[question], row[reply]
        if isinstance(asked, list) and isinstance(replied, list):  # trl's conversational form
            case = _conversation([*asked, *replied])
        else:
            case = case_of(_string(asked), _string(replied))
        yield {**_id(row), **case}

    return Form(f"{question} and {reply}", lambda row: {question, reply} <= row.keys(), cases)


def _turns(key: str) -> Callable[[Row], Iterator[Case]]:
    """Return a function that yields the case of a row with a dialogue under `key`."""

    def cases(row: Row) -> Iterator[Case]:
        yield {**_id(row), **_conversation(row[key])}

    return cases


def _conversation(turns: Any) -> Case:
    """Return the case of one question and its reply, without system turns.

    A turn is `{"from": "human", "value": "…"}` or `{"role": "user", "content": "…"}`.
    """
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
