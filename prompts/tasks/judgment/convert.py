"""Rows of other formats as official cases: CAIL2018, and questions whose answers are judgments."""

import json
import re
from ast import literal_eval
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from panjue.prompts.plumbing.decode import after_thinking, named_objects
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.task import Converter, text_of
from panjue.prompts.tasks.judgment.read import FIELDS, sentence, sentence_of_class
from panjue.prompts.tasks.judgment.repair import PENALTIES

Noted = tuple[dict[str, Any], list[str]]
"""A case or a part of it, and notes on what the format does not tell."""

SHORTEST_IMPRISONMENT = 6
"""Months; article 45 of the Criminal Law."""

NO_TERM = (
    "0 months: a fine alone, exemption or a term that was not found, the file does not tell; "
    "written without a term, penalty class 14"
)
SHORT_TERM = (
    "1 to 5 months: too short for imprisonment, so detention (拘役) or, rarely, surveillance "
    "(管制), the file does not tell; written as detention"
)
ONLY_A_CLASS = (
    "a penalty without months, only with its class: written as the class's longest term "
    "(15 years for more than ten)"
)
ASKED = re.compile(r"案件事实：(?P<fact>.*?\S)\s*被告人名单：(?P<names>[^\n]+)", re.DOTALL)
"""The end of our own prompt."""


def from_cail2018(row: Mapping[str, Any]) -> Noted:
    """Convert a case of CAIL2018; its fields may be nested, or flat as in CSV.

    Raises:
        UserError: It has not exactly one criminal, or a field has another type.
        KeyError: A field is missing.
    """
    row = {key: value if key == "fact" else _value(value) for key, value in row.items()}
    meta = _object(row.get("meta", row), "meta")
    term = _object(meta.get("term_of_imprisonment", meta), "term_of_imprisonment")
    names = _list(meta, "criminals", str)
    if len(names) != 1:
        raise UserError(
            f"'criminals' has {len(names)} names, and 'accusation' is not by name; "
            "only a case of one defendant can be converted"
        )
    penalty, notes = _sentence_of_term(term)
    outcome = {
        "name": names[0],
        "penalty": {**penalty, "fine": meta.get("punish_of_money") or 0},
        "charges": [charge_name(charge) for charge in _list(meta, "accusation", str)],
        "articles": [str(article) for article in _list(meta, "relevant_articles", int, str)],
    }
    return {"fact": row["fact"], "defendants": names, "outcomes": [outcome]}, notes


def charge_name(accusation: str) -> str:
    """Return a charge as our labels have it: `[走私、贩卖]毒品` -> 走私、贩卖毒品罪."""
    text = re.sub(r"[\[\]\s]", "", accusation)
    return text if text.endswith("罪") else f"{text}罪"


def _sentence_of_term(term: Mapping[str, Any]) -> Noted:
    flags = {key: term[key] for key in ("death_penalty", "life_imprisonment")}
    for key, value in flags.items():
        if value not in (False, True):
            raise UserError(f"{key!r} must be true or false, found {value!r}")
    months = term["imprisonment"]
    if type(months) not in (int, float) or not months >= 0:
        raise UserError(f"'imprisonment' must be months, 0 or more, found {months!r}")
    if any(flags.values()):
        return sentence(**{key: bool(value) for key, value in flags.items()}), []
    if 0 < months < SHORTEST_IMPRISONMENT:
        return sentence(detention=months), [SHORT_TERM]
    return sentence(imprisonment=months), [] if months else [NO_TERM]


def _value(cell: Any) -> Any:
    """Return the list, object, number or truth value in a CSV cell; any other text as it is."""
    text = cell.strip() if isinstance(cell, str) else ""
    if re.match(r"[\[{\d]|(true|false)$", text, re.IGNORECASE):
        for read in (json.loads, literal_eval):  # pandas writes lists as Python does
            with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                return read(text.title() if text[0].isalpha() else text)
    return cell


def _list(meta: Mapping[str, Any], key: str, *kinds: type) -> list[Any]:
    """Return a list of values of these types; a text is split at `;` and `|`."""
    value = meta[key]
    if isinstance(value, str):
        value = [part.strip() for part in re.split("[;；|]", value) if part.strip()]
    values = value if isinstance(value, list) else [value]
    if not all(type(item) in kinds for item in values):
        raise UserError(f"{key!r} has the wrong type: {value!r:.40}")
    return values


def _object(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(f"{name!r} must be an object")
    return value


def from_alpaca(row: Mapping[str, Any]) -> Noted:
    """Convert a question whose answer has judgments; `input` is the facts, if it has no list."""
    facts = row.get("input") or ""
    return _case(f"{row['instruction']}\n{facts}", facts, text_of(row, "output"))


def from_turns(row: Mapping[str, Any]) -> Noted:
    """Convert a question and its answer; after a system message, the question is the facts.

    Raises:
        UserError: There are other turns, or the answer has no judgments.
    """
    turns: Any = row.get("conversations", row.get("messages"))
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise UserError("the conversation must be a list of objects")
    texts = [str(turn.get("value", turn.get("content"))) for turn in turns]
    has_system = bool(turns) and "system" in (turns[0].get("from"), turns[0].get("role"))
    if len(texts) != 2 + has_system:
        raise UserError(
            f"a conversation must be a question and its answer, found {len(texts)} turns"
        )
    question, answer = texts[-2:]
    return _case(question, question if has_system or row.get("system") else "", answer)


def _case(question: str, facts: str, answer: str) -> Noted:
    """Return a case from the question that was asked and its answer.

    Args:
        question: The question; if it has the form of our prompt, it names the defendants.
        facts: The facts, if the question has another form; empty if they are not known.
        answer: Text with the JSON of our replies, of a submission or of official `outcomes`.
    """
    asked = ASKED.search(question)
    if not asked and not facts:
        raise UserError(
            "the question has no 案件事实：… 被告人名单：…, so that the facts cannot be told "
            "from the instruction"
        )
    judged = named_objects(after_thinking(answer), ["name"])
    if not judged:
        raise UserError("the answer has no JSON with the names and judgments of defendants")
    outcomes = [_outcome(name, judgment) for name, judgment in judged]
    listed = asked["names"].strip(" 。").split("、") if asked else [name for name, _ in judged]
    notes = [ONLY_A_CLASS] if any(not isinstance(j["penalty"], dict) for _, j in judged) else []
    case = {"fact": asked["fact"] if asked else facts, "defendants": listed, "outcomes": outcomes}
    return case, notes


def _outcome(name: str, judgment: Mapping[str, Any]) -> dict[str, Any]:
    if missing := [key for key in (*FIELDS, "penalty") if key not in judgment]:
        raise UserError(f"the judgment of {name} has no {', '.join(missing)}")
    penalty = judgment["penalty"]
    if isinstance(penalty, str) and penalty in PENALTIES:
        penalty = sentence_of_class(PENALTIES.index(penalty))
    elif type(penalty) is int and 0 <= penalty < len(PENALTIES):
        penalty = sentence_of_class(penalty)
    elif not isinstance(penalty, dict):
        raise UserError(f"the penalty of {name}, {penalty!r:.40}, is no class of ours")
    return {"name": name, "penalty": penalty, **{field: judgment[field] for field in FIELDS}}


CONVERTERS: Mapping[str, Converter] = {
    "CAIL2018": from_cail2018,
    "CAIL2018 without meta": from_cail2018,
    "Alpaca": from_alpaca,
    "ShareGPT": from_turns,
    "OpenAI messages": from_turns,
}
"""Format -> how its rows become cases."""
