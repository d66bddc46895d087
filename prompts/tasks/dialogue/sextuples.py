"""Sextuples and emotion events of a dialogue, as schema, reply and submission.

A reply is read by its schema.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from panjue.prompts.example import Decoded, Example, Turn
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.decode import last_object, load_json
from panjue.prompts.plumbing.files import dump
from panjue.prompts.task import Schema, closed_object
from panjue.prompts.tasks.metrics import Row

SENTIMENTS = ("positive", "negative", "neutral", "ambiguous", "doubt")

SEXTUPLE = ("target", "aspect", "opinion", "sentiment", "rationale")
"""Fields of a sextuple; the other two, holder and sentence, are given. No sextuple: all empty."""

EMOTION_FIELDS = ("state", "reason", "source_id")

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

TEXT_SCHEMAS: dict[str, Schema] = {
    field: {"type": "string", "maxLength": length} for field, length in MAX_LENGTHS.items()
}
TEXT_SCHEMAS["sentiment"] = {"enum": [*SENTIMENTS, ""]}
TEXT_SCHEMAS["state"] = {"enum": list(SENTIMENTS)}
"""Field -> its schema."""

MAX_EVENTS = 6  # per speaker
MAX_EMOTIONS = 8  # per event


def schema(example: Example, _labels: Labels) -> Schema:
    """Return the JSON Schema of the reply: each sentence and speaker of the question once."""
    sentences = [_texts(SEXTUPLE, id={"const": turn.number}) for turn in example.turns]
    emotions = {"type": "array", "items": _texts(EMOTION_FIELDS), "maxItems": MAX_EMOTIONS}
    event = closed_object({"event": TEXT_SCHEMAS["event"], "emotions": emotions})
    events = {"type": "array", "items": event, "maxItems": MAX_EVENTS}
    holders = [
        closed_object({"holder": {"const": holder}, "events": events})
        for holder in speakers(example.turns)
    ]
    return closed_object({"sentences": _list_of(sentences), "holders": _list_of(holders)})


def _texts(fields: Sequence[str], **others: Schema) -> Schema:
    """Return the schema of an object with these `others`, then the texts."""
    return closed_object(others | {field: TEXT_SCHEMAS[field] for field in fields})


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
    return list(dict.fromkeys(turn.holder for turn in turns))


def holders_of(chains: Mapping[str, Mapping[str, Sequence[Row]]]) -> list[dict[str, Any]]:
    """Return the holders of an answer from holder -> event -> emotions."""
    holders = []
    for holder, by_event in chains.items():
        events = [{"event": event, "emotions": chain} for event, chain in by_event.items()]
        holders.append({"holder": holder, "events": events})
    return holders


def target(example: Example) -> str:
    """Return the gold reply. It is invalid if the schema does not allow the gold answer."""
    assert example.answer is not None, "a test dialogue has no target"
    answered = example.answer["holders"]
    if answered is None:
        return dump(example.answer)
    events = {holder["holder"]: holder["events"] for holder in answered}
    holders = []
    for name in speakers(example.turns):
        holders.append({"holder": name, "events": events.get(name, [])})
    return dump({"sentences": example.answer["sentences"], "holders": holders})


def decode(reply: str, example: Example, labels: Labels) -> Decoded:
    form = schema(example, labels)
    fields = last_object(reply, list(form["properties"])).value
    holders = _each_once(fields.get("holders"))
    answer: dict[str, Any] = _read({**fields, "holders": holders}, form)
    if load_json(reply) == answer:
        return Decoded(answer)
    if not holders and not _objects(fields.get("sentences")):
        return Decoded(answer, ("nothing could be read",), readable=False)
    return Decoded(answer, ("not the JSON that was asked for",))


def _each_once(holders: Any) -> list[dict[str, Any]]:
    """Return the holders of a reply, each with the events of all objects that name it."""
    events: dict[str, list[dict[str, Any]]] = {}
    for value in _objects(holders):
        known = events.setdefault(_text(value.get("holder")), [])
        if len(known) < MAX_EVENTS:
            known += [event for event in _objects(value.get("events")) if event not in known]
    return [{"holder": holder, "events": found} for holder, found in events.items()]


def _objects(values: Any) -> list[dict[str, Any]]:
    if not isinstance(values, list):
        return []
    return [value for value in values if isinstance(value, dict)]


def _read(value: Any, form: Schema) -> Any:
    """Return what a value has of a schema; what is missing or has another type is empty."""
    if "const" in form:
        return form["const"]
    if "enum" in form:
        label = _text(value).strip().lower()
        return label if label in form["enum"] else ""
    if form["type"] == "string":
        return _text(value)[: form["maxLength"]]
    if form["type"] == "object":
        given = value if isinstance(value, dict) else {}
        return {key: _read(given.get(key), inner) for key, inner in form["properties"].items()}
    if "prefixItems" in form:
        return _read_known(_objects(value), form["prefixItems"])
    items = [_read(item, form["items"]) for item in _objects(value)[: form["maxItems"]]]
    return [item for item in items if item.get("state") != ""]  # an emotion needs a state


def _read_known(objects: list[dict[str, Any]], forms: list[Schema]) -> list[Any]:
    """Return an item for each form, from the first object with the constant that it begins with.

    The constant is the number of a sentence, or the name of a speaker.
    """
    [key, *_] = forms[0]["properties"]
    given = {_text(value.get(key)): value for value in reversed(objects)}
    items = []
    for form in forms:
        constant = form["properties"][key]["const"]
        items.append(_read(given.get(str(constant)), form))
    return items


def _text(value: Any) -> str:
    if not isinstance(value, str):
        return ""
    # A JSON escape can be half a character, which a submission cannot contain.
    return value.encode("utf-8", "ignore").decode("utf-8")


def reserve(example: Example) -> int:
    """Return the tokens to reserve beyond 1.5 times an empty reply, by usual reply lengths."""
    return 64 + 40 * len(example.turns) + 192 * len(speakers(example.turns))


def check(example: Example, row: Row, _labels: Labels | None) -> Iterator[str]:
    """Yield the faults of a submission row: its sentences by position, then its emotions."""
    chat = row.get("chat")
    if not isinstance(chat, list) or len(chat) != len(example.turns):
        yield f"the chat must list {len(example.turns)} sentences"
        return
    for turn, sentence in zip(example.turns, chat, strict=True):
        for fault in _sentence_faults(turn, sentence):
            yield f"sentence {turn.number}: {fault}"
    faults = list(emotion_faults(row.get("emo")))
    yield from faults or _holder_faults(example, row["emo"])


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
    elif sextuples and not is_texts(sextuples[0], SEXTUPLE):
        yield f"a sextuple must have the texts {', '.join(SEXTUPLE)} and nothing else"
    elif sextuples and sextuples[0]["sentiment"] not in {*SENTIMENTS, ""}:
        yield f"the sentiment {sextuples[0]['sentiment']!r} is none of {', '.join(SENTIMENTS)}"


def is_texts(value: Any, keys: Sequence[str]) -> bool:
    """Say whether a value is an object of texts with these keys and no others."""
    if not isinstance(value, dict) or set(value) != set(keys):
        return False
    return all(isinstance(text, str) for text in value.values())


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
            elif not all(is_texts(emotion, EMOTION_FIELDS) for emotion in emotions):
                yield f"holder {holder!r}: an emotion must have the texts state, reason, source_id"


def states(events: Sequence[Row]) -> list[str]:
    return [emotion["state"] for event in events for emotion in event["emotions"]]


def _holder_faults(example: Example, emo: Row) -> Iterator[str]:
    for holder in speakers(example.turns):
        if holder not in emo:
            yield f"holder {holder!r} is not answered"
    for holder, value in emo.items():
        for state in sorted(set(states(value["events"])) - {*SENTIMENTS}):
            yield f"holder {holder!r}: the state {state!r} is none of {', '.join(SENTIMENTS)}"
