"""Sextuples and emotion events of a dialogue, as schema, reply and submission.

The schema of a reply depends on the step of the question: `window`, `sextuple`, `emotions`, or none
for the whole dialogue in one call.
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
"""Fields of a sextuple; the other two, holder and sentence, are given. No sextuple: all empty."""

MAX_LENGTHS = {
    "target": 60,
    "aspect": 60,
    "opinion": 80,
    "rationale": 120,
    "event": 40,
    "reason": 80,
    "source_id": 20,
}
"""Maximum characters of each field: 999 of 1,000 real values are shorter."""

MAX_EVENTS, MAX_EMOTIONS = 6, 8
"""Events per speaker, and emotions per event."""


def schema(example: Example, _labels: Labels) -> Schema:
    """Return the JSON Schema of the reply: each sentence and speaker of the question once."""
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
        else {"type": "string", "maxLength": MAX_LENGTHS[field]}
        for field in fields
    }


def _list_of(items: Sequence[Schema]) -> Schema:
    """Return the schema of a list with exactly these items."""
    count = len(items)
    return {
        "type": "array",
        "prefixItems": list(items),
        "items": False,
        "minItems": count,
        "maxItems": count,
    }


def _sentences(example: Example, fields: Sequence[str]) -> Schema:
    return _list_of([_object(id={"const": t.number}, **_texts(fields)) for t in example.turns])


def _holders(example: Example) -> Schema:
    emotion = _object(state={"enum": list(SENTIMENTS)}, **_texts(("reason", "source_id")))
    emotions = {"type": "array", "items": emotion, "maxItems": MAX_EMOTIONS}
    any_event = _object(**_texts(("event",)), emotions=emotions)
    any_events = {"type": "array", "items": any_event, "maxItems": MAX_EVENTS}
    return _list_of(
        [
            _object(
                holder={"const": holder},
                events=_list_of([_object(event={"const": e}, emotions=emotions) for e in events])
                if events
                else any_events,
            )
            for holder, events in speakers(example.turns).items()
        ]
    )


def speakers(turns: Sequence[Turn]) -> dict[str, list[str]]:
    """Return holder -> the known events of its sentences."""
    by_holder: dict[str, dict[str, None]] = {}
    for turn in turns:
        by_holder.setdefault(turn.holder, {}).update({turn.event: None} if turn.event else {})
    return {holder: list(events) for holder, events in by_holder.items()}


def target(example: Example) -> str:
    """Return the gold reply. It is invalid if the schema does not allow the gold answer."""
    assert example.answer is not None, "a test dialogue has no target"
    if "step" in example.inputs or example.answer["holders"] is None:
        return dump(example.answer)
    events = {holder["holder"]: holder["events"] for holder in example.answer["holders"]}
    holders = [{"holder": name, "events": events.get(name, [])} for name in speakers(example.turns)]
    return dump({"sentences": example.answer["sentences"], "holders": holders})


def decode(reply: str, example: Example, _labels: Labels) -> Decoded:
    """Read any reply as the answer to the step of its question."""
    value = load_json(reply)
    fields = value if isinstance(value, dict) else _read_loosely(reply)
    answer: dict[str, Any]
    match example.inputs.get("step"):
        case "window":
            answer = {"sentences": _read_sentences(fields, example, ("target", "event"))}
        case "sextuple":
            answer = {field: _read_text(fields.get(field), field) for field in FIELDS}
        case "emotions":
            answer = {"holders": _read_holders(fields, example)}
        case _:
            sentences = _read_sentences(fields, example, FIELDS)
            answer = {"sentences": sentences, "holders": _read_holders(fields, example)}
    if value == answer:
        return Decoded(answer)
    if not fields:
        return Decoded(answer, ("nothing could be read",), readable=False)
    return Decoded(answer, ("not the JSON that was asked for",))


INNERMOST_OBJECT = re.compile(r"\{[^{}]*+\}")


def _read_loosely(reply: str) -> dict[str, Any]:
    """Return the fields of the innermost objects of a reply that is not JSON."""
    values = [load_json(text) for text in INNERMOST_OBJECT.findall(reply)]
    objects = [value for value in values if isinstance(value, dict)]
    sentences = [value for value in objects if "id" in value]
    return {**(objects[0] if objects else {}), **({"sentences": sentences} if sentences else {})}


def _read_text(value: Any, field: str) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    # A JSON escape can be half a character, which a submission cannot contain.
    text = value.encode("utf-8", "ignore").decode("utf-8") if isinstance(value, str) else ""
    if field not in {"sentiment", "state"}:
        return text[: MAX_LENGTHS[field]]
    label = text.strip().lower()
    return label if label in SENTIMENTS else ""


def _dicts(parent: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    items = parent.get(key)
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def _read_sentences(
    reply: Mapping[str, Any], example: Example, fields: Sequence[str]
) -> list[dict[str, Any]]:
    by_id: dict[str, dict[str, Any]] = {}
    for sentence in _dicts(reply, "sentences"):
        by_id.setdefault(str(sentence.get("id"))[:20], sentence)
    nothing: dict[str, Any] = {}
    return [
        {
            "id": turn.number,
            **{f: _read_text(by_id.get(str(turn.number), nothing).get(f), f) for f in fields},
        }
        for turn in example.turns
    ]


def _read_holders(reply: Mapping[str, Any], example: Example) -> list[dict[str, Any]]:
    by_holder: dict[str, list[dict[str, Any]]] = {}
    for holder in _dicts(reply, "holders"):
        by_holder.setdefault(str(holder.get("holder")), _dicts(holder, "events"))
    return [
        {"holder": name, "events": _read_events(by_holder.get(name, []), events)}
        for name, events in speakers(example.turns).items()
    ]


def _read_events(events: Sequence[dict[str, Any]], known: Sequence[str]) -> list[dict[str, Any]]:
    pairs = [(_read_text(event.get("event"), "event"), _read_emotions(event)) for event in events]
    if known:
        chains = dict(reversed(pairs))  # of several events with one name the first counts
        pairs = [(event, chains.get(event, [])) for event in known]
    else:
        pairs = pairs[:MAX_EVENTS]
    return [{"event": event, "emotions": emotions} for event, emotions in pairs]


def _read_emotions(event: Mapping[str, Any]) -> list[dict[str, str]]:
    emotions = [
        {key: _read_text(emotion.get(key), key) for key in ("state", "reason", "source_id")}
        for emotion in _dicts(event, "emotions")[:MAX_EMOTIONS]
    ]
    return [emotion for emotion in emotions if emotion["state"]]


def reserve(example: Example) -> int:
    """Return the tokens to reserve beyond 1.5 times an empty reply, by usual reply lengths."""
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
    """Yield the faults of a submission row: its sentences by position, then its emotions."""
    chat = row.get("chat")
    if not isinstance(chat, list) or len(chat) != len(example.turns):
        yield f"the chat must list {len(example.turns)} sentences"
        return
    for turn, sentence in zip(example.turns, chat, strict=True):
        faults = _sentence_faults(turn, sentence)
        yield from (f"sentence {turn.number}: {fault}" for fault in faults)
    emotion_problems = list(emotion_faults(row.get("emo")))
    yield from emotion_problems
    if emotion_problems:
        return
    for holder in dict.fromkeys(turn.holder for turn in example.turns):
        if holder not in row["emo"]:
            yield f"holder {holder!r} is not answered"
    for holder, value in row["emo"].items():
        states = {emotion["state"] for event in value["events"] for emotion in event["emotions"]}
        for state in sorted(states.difference(SENTIMENTS)):
            yield f"holder {holder!r}: the state {state!r} is none of {', '.join(SENTIMENTS)}"


def _sentence_faults(turn: Turn, sentence: Any) -> Iterator[str]:
    if not isinstance(sentence, dict):
        yield "no JSON object"
        return
    if sentence.get("input_sentence") != turn.sentence or sentence.get("holder") != turn.holder:
        yield "text or holder differs from the dialogue"
    if not isinstance(sentence.get("event"), str):
        yield "'event' must be a text"
    sextuples = sentence.get("final_model_response")
    if not isinstance(sextuples, list) or len(sextuples) > 1:
        yield "'final_model_response' must list one sextuple or none"
    elif sextuples and not is_texts(sextuples[0], FIELDS):
        yield f"a sextuple must have the texts {', '.join(FIELDS)} and nothing else"
    elif sextuples and sextuples[0]["sentiment"] not in {*SENTIMENTS, ""}:
        yield f"the sentiment {sextuples[0]['sentiment']!r} is none of {', '.join(SENTIMENTS)}"


def is_texts(value: Any, keys: Sequence[str]) -> bool:
    """Say whether a value is an object of texts with these keys and no others."""
    return (
        isinstance(value, dict)
        and set(value) == set(keys)
        and all(isinstance(text, str) for text in value.values())
    )


def emotion_faults(emo: Any) -> Iterator[str]:
    """Yield the faults in the structure of a dialogue's emotions: holder to events."""
    if not isinstance(emo, dict):
        yield "the emotions must be an object: holder to events"
        return
    for holder, value in emo.items():
        events = value.get("events") if isinstance(value, dict) else None
        if not isinstance(events, list):
            yield f"holder {holder!r} must have a list of events"
            continue
        for event in events:
            emotions = event.get("emotions") if isinstance(event, dict) else None
            if not isinstance(emotions, list) or not isinstance(event.get("event"), str):
                yield f"holder {holder!r}: an event must have a name and a list of emotions"
            elif not all(is_texts(e, ("state", "reason", "source_id")) for e in emotions):
                yield f"holder {holder!r}: an emotion must have the texts state, reason, source_id"
