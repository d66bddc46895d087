"""What may be said of a dialogue: sextuples and emotion events, as schema, reply and hand-in.

What a question may be answered with depends on its step: `window`, `sextuple`, `emotions`, or none,
which is the whole dialogue at once.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from panjue.prompts.example import Decoded, Example, Turn
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.decode import load_json
from panjue.prompts.plumbing.files import dump
from panjue.prompts.task import Schema
from panjue.prompts.tasks.metrics import Row

SENTIMENTS = ("positive", "negative", "neutral", "ambiguous", "doubt")

FIELDS = ("target", "aspect", "opinion", "sentiment", "rationale")
"""Of a sextuple; its other two, holder and sentence, are given. All empty: there is none."""

LONGEST = {
    "target": 60,
    "aspect": 60,
    "opinion": 80,
    "rationale": 120,
    "event": 40,
    "reason": 80,
    "source_id": 20,
}
"""Characters of a field: above the longest of 999 in 1,000 real ones, everywhere."""

MOST_EVENTS, MOST_EMOTIONS = 6, 8
"""Of one speaker, and in one event."""


def schema(example: Example, _labels: Labels) -> Schema:
    """Return the JSON Schema of the reply: each sentence, each speaker asked about, once."""
    match example.inputs.get("step"):
        case "window":
            return _object(sentences=_sentences(example, ("target", "event")))
        case "sextuple":
            return _object(**_texts(FIELDS))
        case "emotions":
            return _object(holders=_holders(example))
    return _object(sentences=_sentences(example, FIELDS), holders=_holders(example))


def _object(**properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _texts(fields: Sequence[str]) -> dict[str, Schema]:
    return {
        field: {"enum": [*SENTIMENTS, ""]}
        if field == "sentiment"
        else {"type": "string", "maxLength": LONGEST[field]}
        for field in fields
    }


def _each(items: Sequence[Schema]) -> Schema:
    """Return the schema of a list that has exactly these items."""
    number = len(items)
    return {
        "type": "array",
        "prefixItems": list(items),
        "items": False,
        "minItems": number,
        "maxItems": number,
    }


def _sentences(example: Example, fields: Sequence[str]) -> Schema:
    return _each([_object(id={"const": t.number}, **_texts(fields)) for t in example.turns])


def _holders(example: Example) -> Schema:
    emotion = _object(state={"enum": list(SENTIMENTS)}, **_texts(("reason", "source_id")))
    emotions = {"type": "array", "items": emotion, "maxItems": MOST_EMOTIONS}
    free = _object(**_texts(("event",)), emotions=emotions)
    any_events = {"type": "array", "items": free, "maxItems": MOST_EVENTS}
    return _each(
        [
            _object(
                holder={"const": holder},
                events=_each([_object(event={"const": e}, emotions=emotions) for e in events])
                if events
                else any_events,
            )
            for holder, events in speakers(example.turns).items()
        ]
    )


def speakers(turns: Sequence[Turn]) -> dict[str, list[str]]:
    """Return holder -> the events that its sentences are about, where they are known."""
    found: dict[str, dict[str, None]] = {}
    for turn in turns:
        found.setdefault(turn.holder, {}).update({turn.event: None} if turn.event else {})
    return {holder: list(events) for holder, events in found.items()}


def target(example: Example) -> str:
    """Return the gold reply. It is invalid where the gold answer cannot be said in the schema."""
    assert example.answer is not None, "a test dialogue has no target"
    if "step" in example.inputs or example.answer["holders"] is None:
        return dump(example.answer)
    events = {one["holder"]: one["events"] for one in example.answer["holders"]}
    holders = [{"holder": name, "events": events.get(name, [])} for name in speakers(example.turns)]
    return dump({"sentences": example.answer["sentences"], "holders": holders})


def decode(reply: str, example: Example, _labels: Labels) -> Decoded:
    """Read a reply as what its step asks for, whatever it is."""
    found = load_json(reply)
    readable = found if isinstance(found, dict) else _salvaged(reply)
    answer: dict[str, Any]
    match example.inputs.get("step"):
        case "window":
            answer = {"sentences": _read_sentences(readable, example, ("target", "event"))}
        case "sextuple":
            answer = {field: _read_text(readable.get(field), field) for field in FIELDS}
        case "emotions":
            answer = {"holders": _read_holders(readable, example)}
        case _:
            sentences = _read_sentences(readable, example, FIELDS)
            answer = {"sentences": sentences, "holders": _read_holders(readable, example)}
    if found == answer:
        return Decoded(answer)
    if not readable:
        return Decoded(answer, ("nothing could be read",), readable=False)
    return Decoded(answer, ("not the JSON that was asked for",))


INNERMOST = re.compile(r"\{[^{}]*+\}")


def _salvaged(reply: str) -> dict[str, Any]:
    """Return what can be read of a reply that is no JSON: its innermost objects."""
    objects = [load_json(text) for text in INNERMOST.findall(reply)]
    whole = [one for one in objects if isinstance(one, dict)]
    numbered = [one for one in whole if "id" in one]
    return {**(whole[0] if whole else {}), **({"sentences": numbered} if numbered else {})}


def _read_text(value: Any, field: str) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    # Half a character, which a JSON escape can write, cannot be handed in.
    text = value.encode("utf-8", "ignore").decode("utf-8") if isinstance(value, str) else ""
    if field not in {"sentiment", "state"}:
        return text[: LONGEST[field]]
    known = text.strip().lower()
    return known if known in SENTIMENTS else ""


def _dicts(found: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    listed = found.get(key)
    return [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []


def _read_sentences(
    found: Mapping[str, Any], example: Example, fields: Sequence[str]
) -> list[dict[str, Any]]:
    told: dict[str, dict[str, Any]] = {}
    for one in _dicts(found, "sentences"):
        told.setdefault(str(one.get("id"))[:20], one)
    nothing: dict[str, Any] = {}
    return [
        {
            "id": turn.number,
            **{f: _read_text(told.get(str(turn.number), nothing).get(f), f) for f in fields},
        }
        for turn in example.turns
    ]


def _read_holders(found: Mapping[str, Any], example: Example) -> list[dict[str, Any]]:
    told: dict[str, list[dict[str, Any]]] = {}
    for one in _dicts(found, "holders"):
        told.setdefault(str(one.get("holder")), _dicts(one, "events"))
    return [
        {"holder": holder, "events": _read_events(told.get(holder, []), events)}
        for holder, events in speakers(example.turns).items()
    ]


def _read_events(told: Sequence[dict[str, Any]], known: Sequence[str]) -> list[dict[str, Any]]:
    read = [(_read_text(one.get("event"), "event"), _read_emotions(one)) for one in told]
    if known:
        chains: dict[str, list[Any]] = {}
        for event, emotions in read:
            chains.setdefault(event, emotions)
        read = [(event, chains.get(event, [])) for event in known]
    return [
        {"event": event, "emotions": emotions}
        for event, emotions in read[: None if known else MOST_EVENTS]
    ]


def _read_emotions(event: Mapping[str, Any]) -> list[dict[str, str]]:
    read = [
        {key: _read_text(one.get(key), key) for key in ("state", "reason", "source_id")}
        for one in _dicts(event, "emotions")[:MOST_EMOTIONS]
    ]
    return [one for one in read if one["state"]]


def reserve(example: Example) -> int:
    """Return tokens beyond one and a half times an empty reply, by what replies usually hold."""
    sentences, holders = len(example.turns), len(speakers(example.turns))
    match example.inputs.get("step"):
        case "window":
            return 64 + 16 * sentences
        case "sextuple":
            return 128
        case "emotions":
            return 64 + 128 * holders
    return 64 + 40 * sentences + 192 * holders


def check(example: Example, row: Row, _labels: Labels | None) -> Iterator[str]:
    """Yield what a submission has wrong: sentences by their position, then the emotions."""
    chat = row.get("chat")
    if not isinstance(chat, list) or len(chat) != len(example.turns):
        yield f"the chat must list {len(example.turns)} sentences"
        return
    for turn, one in zip(example.turns, chat, strict=True):
        yield from (f"sentence {turn.number}: {fault}" for fault in _sentence_faults(turn, one))
    wrong = list(emotion_faults(row.get("emo")))
    yield from wrong
    if wrong:
        return
    for holder in dict.fromkeys(turn.holder for turn in example.turns):
        if holder not in row["emo"]:
            yield f"holder {holder!r} is not answered"
    for holder, one in row["emo"].items():
        states = {emotion["state"] for event in one["events"] for emotion in event["emotions"]}
        for state in sorted(states.difference(SENTIMENTS)):
            yield f"holder {holder!r}: the state {state!r} is none of {', '.join(SENTIMENTS)}"


def _sentence_faults(turn: Turn, one: Any) -> Iterator[str]:
    if not isinstance(one, dict):
        yield "no JSON object"
        return
    if one.get("input_sentence") != turn.sentence or one.get("holder") != turn.holder:
        yield "is not what the dialogue has there, or not said by that holder"
    if not isinstance(one.get("event"), str):
        yield "'event' must be a text"
    told = one.get("final_model_response")
    if not isinstance(told, list) or len(told) > 1:
        yield "'final_model_response' must list one sextuple or none"
    elif told and not is_texts(told[0], FIELDS):
        yield f"a sextuple has the texts {', '.join(FIELDS)} and nothing else"
    elif told and told[0]["sentiment"] not in {*SENTIMENTS, ""}:
        yield f"the sentiment {told[0]['sentiment']!r} is none of {', '.join(SENTIMENTS)}"


def is_texts(value: Any, keys: Sequence[str]) -> bool:
    """Say whether a value is an object of texts with these keys and no others."""
    return (
        isinstance(value, dict)
        and set(value) == set(keys)
        and all(isinstance(text, str) for text in value.values())
    )


def emotion_faults(emo: Any) -> Iterator[str]:
    """Yield what is wrong with the form of a dialogue's emotions: holder to events."""
    if not isinstance(emo, dict):
        yield "the emotions must be an object: holder to events"
        return
    for holder, one in emo.items():
        events = one.get("events") if isinstance(one, dict) else None
        if not isinstance(events, list):
            yield f"holder {holder!r} must have a list of events"
            continue
        for event in events:
            emotions = event.get("emotions") if isinstance(event, dict) else None
            if not isinstance(emotions, list) or not isinstance(event.get("event"), str):
                yield f"holder {holder!r}: an event has a name and a list of emotions"
            elif not all(is_texts(e, ("state", "reason", "source_id")) for e in emotions):
                yield f"holder {holder!r}: an emotion has the texts state, reason and source_id"
