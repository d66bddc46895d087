"""Sextuples and emotion events of a dialogue: the schema, and reading a reply."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from panjue.prompts.example import Decoded, Example, Turn
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.decode import last_object, load_json
from panjue.prompts.task import Schema, closed_object
from panjue.prompts.tasks.metrics import Row

SENTIMENTS = ("positive", "negative", "neutral", "ambiguous", "doubt")


def _at_most(length: int) -> Schema:
    return {"type": "string", "maxLength": length}


SEXTUPLE = {
    "target": _at_most(60),
    "aspect": _at_most(60),
    "opinion": _at_most(80),
    "sentiment": {"enum": [*SENTIMENTS, ""]},
    "rationale": _at_most(120),
}
"""Fields of a sextuple -> their schemas. The sixth field, its holder, is given. Without a sextuple,
all fields are empty. 999 of 1,000 real values are shorter than these limits."""

EMOTION = {
    "state": {"enum": list(SENTIMENTS)},
    "reason": _at_most(80),
    "source_id": _at_most(20),
}

MAX_EVENT_LENGTH = 40
MAX_EVENTS = 6  # for each speaker
MAX_EMOTIONS = 8  # for each event

EVENT = {
    "event": _at_most(MAX_EVENT_LENGTH),
    "emotions": {"type": "array", "items": closed_object(EMOTION), "maxItems": MAX_EMOTIONS},
}
EVENTS = {"type": "array", "items": closed_object(EVENT), "maxItems": MAX_EVENTS}


class Chain(NamedTuple):
    """The emotions of a speaker in an event, in order."""

    holder: str
    event: str
    emotions: Sequence[Row]


def schema(example: Example, _labels: Labels) -> Schema:
    """Return the JSON Schema of the reply, with each sentence and speaker of the question once."""
    sentences = []
    for turn in example.turns:
        sentences.append(closed_object({"id": {"const": turn.number}, **SEXTUPLE}))
    holders = []
    for holder in speakers(example.turns):
        holders.append(closed_object({"holder": {"const": holder}, "events": EVENTS}))
    return closed_object({"sentences": _list_of(sentences), "holders": _list_of(holders)})


def _list_of(items: list[Schema]) -> Schema:
    """Return the schema of a list with exactly these items."""
    return {
        "type": "array",
        "prefixItems": items,
        "items": False,
        "minItems": len(items),
        "maxItems": len(items),
    }


def speakers(turns: Sequence[Turn]) -> list[str]:
    """Return who speaks, in the order of their first sentences."""
    return list(dict.fromkeys(turn.holder for turn in turns))


def holders_of(turns: Sequence[Turn], chains: Iterable[Chain]) -> list[dict[str, Any]]:
    """Return the holders of an answer: every speaker, with each event's chains joined in order."""
    events: dict[str, dict[str, list[Row]]] = {holder: {} for holder in speakers(turns)}
    for chain in chains:
        joined = events[chain.holder].setdefault(chain.event, [])
        joined += chain.emotions
    holders = []
    for holder, by_event in events.items():
        listed = [{"event": event, "emotions": joined} for event, joined in by_event.items()]
        holders.append({"holder": holder, "events": listed})
    return holders


def decode(reply: str, example: Example, _labels: Labels) -> Decoded:
    """Read each sentence and speaker of a reply; missing parts are empty."""
    fields = last_object(reply, ["sentences", "holders"]).value
    given_sentences = _objects_in(fields.get("sentences"))
    given_holders = _objects_in(fields.get("holders"))
    # Numbers of a reply are read as texts. If several objects have an id, the first counts.
    by_id = {_text_of(value, "id"): value for value in reversed(given_sentences)}
    sentences = []
    for turn in example.turns:
        value = by_id.get(str(turn.number), {})
        sentences.append({"id": turn.number, **_read_fields(value, SEXTUPLE)})
    holders = []
    for holder in speakers(example.turns):
        own = [value for value in given_holders if _text_of(value, "holder") == holder]
        holders.append({"holder": holder, "events": _read_events(own)})
    answer = {"sentences": sentences, "holders": holders}
    if load_json(reply) == answer:
        return Decoded(answer)
    if not given_holders and not given_sentences:
        return Decoded(answer, ("nothing could be read",), readable=False)
    return Decoded(answer, ("not the JSON that was asked for",))


def _read_events(objects: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the events in the objects of one speaker, at most `MAX_EVENTS`.

    An event that an earlier object of the speaker has is left out.
    """
    given: list[Mapping[str, Any]] = []
    for value in objects:
        # An endless reply may repeat the speaker. This saves time; the limit itself is below.
        if len(given) < MAX_EVENTS:
            given += [event for event in _objects_in(value.get("events")) if event not in given]
    events = []
    for value in given[:MAX_EVENTS]:
        listed = _objects_in(value.get("emotions"))[:MAX_EMOTIONS]
        emotions = [_read_fields(emotion, EMOTION) for emotion in listed]
        name = _text_of(value, "event")[:MAX_EVENT_LENGTH]
        with_state = [emotion for emotion in emotions if emotion["state"]]
        events.append({"event": name, "emotions": with_state})
    return events


def _objects_in(values: Any) -> list[dict[str, Any]]:
    """Return the objects in a list of a reply; none if it is no list."""
    if not isinstance(values, list):
        return []
    return [value for value in values if isinstance(value, dict)]


def _read_fields(value: Mapping[str, Any], schemas: Mapping[str, Schema]) -> dict[str, str]:
    """Return the texts of an object, cut as their schemas say; an unknown label becomes empty."""
    texts = {}
    for field, form in schemas.items():
        text = _text_of(value, field)
        if "enum" not in form:
            texts[field] = text[: form["maxLength"]]
            continue
        label = text.strip().lower()
        texts[field] = label if label in form["enum"] else ""
    return texts


def _text_of(value: Mapping[str, Any], field: str) -> str:
    """Return the text of a field of a reply; empty if it is no text."""
    text = value.get(field)
    if not isinstance(text, str):
        return ""
    # A JSON escape can be half a pair, which a submission cannot contain.
    return text.encode("utf-8", "ignore").decode("utf-8")


def reserve(example: Example) -> int:
    """Return how many tokens to keep free for the texts of a reply.

    A usual reply has up to 40 for the sextuple of each sentence, and 192 for the events of each
    speaker; 64 are spare, as in other tasks. For the rest of the reply, its JSON without texts, the
    caller adds 1.5 times the tokens of an empty answer.
    """
    return 64 + 40 * len(example.turns) + 192 * len(speakers(example.turns))
