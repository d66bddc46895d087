"""Read the dialogues of a submission, and find faults.

Everything is read as by the organisers' scripts. Their baselines leave out fields, write an object
in place of a list with one object, and numbers in place of texts. What the scripts cannot read
counts as missing.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, TypeAdapter, ValidationError

from panjue.prompts.example import Example, Turn
from panjue.prompts.labels import Labels
from panjue.prompts.tasks.dialogue.sextuples import SENTIMENTS, speakers
from panjue.prompts.tasks.metrics import Row

SEXTUPLE_KEYS = {
    "target": ("target", "Target"),
    "aspect": ("aspect", "Aspect"),
    "opinion": ("opinion", "opinions"),
    "sentiment": ("sentiment", "Sentiment"),
    "rationale": ("rationale", "Rationale"),
}
"""Field of a sextuple -> keys that the scripts know for it. The first one that exists counts."""

MAX_DIGITS = 20
"""Most digits of a number as source id; Python refuses to convert thousands of digits."""

OLD_NAMES = ("chat_", "emo_")
"""Beginnings of the file names in a submission of panjue 0.4."""


def check(example: Example, row: Row, _labels: Labels | None) -> Iterator[str]:
    """Yield the faults of a submission row in its files, form, texts and labels."""
    for name in row.get("names", ()):
        if name.startswith(OLD_NAMES):
            yield f"the organisers' scripts do not read {name}; `panjue decode` gives other names"
    parts = (
        ("chat", f"chat/output_chat_{example.id}.json", CHAT_FILE, _chat_faults),
        ("emo", f"emo/output_emotions_{example.id}.json", EMO_FILE, _emo_faults),
    )
    for key, file, form, faults_of in parts:
        value = row.get(key)
        if value is None:
            yield f"{file} is missing"
        elif faults := list(form_faults(form, value)):
            yield from (f"{key}.{fault}" for fault in faults)
        else:
            yield from faults_of(example, value)


def _chat_faults(example: Example, chat: Sequence[Row]) -> Iterator[str]:
    """Yield the faults of sentences of the right form."""
    if len(chat) != len(example.turns):
        yield f"the chat must list {len(example.turns)} sentences"
        return
    for turn, sentence in zip(example.turns, chat, strict=True):
        yield from _sentence_faults(turn, sentence)
    sextuples = []
    for turn, read in zip(example.turns, sentences_of(chat), strict=True):
        sextuples += [{"id": turn.number, **sextuple} for sextuple in read.sextuples]
    yield from unknown_sentiments(sextuples)


def _sentence_faults(turn: Turn, sentence: Row) -> Iterator[str]:
    """Yield how a sentence differs from the dialogue's, and what its sextuples lack."""
    place = f"sentence {turn.number}"
    is_same_text = sentence["input_sentence"].strip() == turn.sentence.strip()
    if not is_same_text or sentence["holder"].strip() != turn.holder.strip():
        yield f"{place}: the text or the holder differs from the dialogue"
    if sentence["final_model_response"] is None:
        yield f"{place}: the answer is null, which counts as no sextuple"
    for given in objects(sentence["final_model_response"]):
        missing = [field for field, keys in SEXTUPLE_KEYS.items() if given.keys().isdisjoint(keys)]
        if missing:
            yield f"{place}: the sextuple has no {', '.join(missing)}"


def _emo_faults(example: Example, emo: Mapping[str, Row]) -> Iterator[str]:
    """Yield the faults of emotions of the right form: holder -> events."""
    for holder in speakers(example.turns):
        if holder not in emo:
            yield f"holder {holder!r} is not answered"
    sources = []
    for answer in emo.values():
        for event in answer["events"]:
            sources += [emotion["source_id"] for emotion in objects(event["emotions"])]
    texts = [one for one in sources if isinstance(one, str) and source_number(one) is not None]
    if texts:
        # The scripts look for the value among the numbers in gold.
        yield f"{len(texts)} source ids are texts such as {texts[0]!r}; the scripts count numbers"
    yield from unknown_states(events_by_holder(emo), SENTIMENTS)


def unknown_sentiments(sextuples: Iterable[Row]) -> Iterator[str]:
    """Yield the sentiments that are not among the five; an empty one does not count."""
    for row in sextuples:
        if row["sentiment"] not in (*SENTIMENTS, ""):
            yield f"sentence {row['id']}: the sentiment {row['sentiment']!r} is none of the five"


def unknown_states(events: Mapping[str, Sequence[Row]], states: Sequence[str]) -> Iterator[str]:
    """Yield an error for each state of an emotion that is not in `states`.

    These are the five known states. In gold, an empty state is also allowed.
    """
    for holder, own in events.items():
        for event in own:
            for emotion in event["emotions"]:
                state = emotion["state"]
                if state not in states:
                    yield f"holder {holder}: the state {state!r} is none of the five"


def silent_holders(events: Mapping[str, Sequence[Row]], speaking: Container[str]) -> Iterator[str]:
    """Yield holders of gold emotions who never speak, so that no reply contains them."""
    for holder, own in events.items():
        count = sum(len(event["emotions"]) for event in own)
        if count and holder not in speaking:
            yield f"holder {holder} says nothing: {count} emotions that no reply can have"


class Sentence(NamedTuple):
    """A sentence of a submission."""

    holder: str
    text: str
    sextuples: list[dict[str, str]]
    """The sextuples. Each has all fields, and not all of them are empty."""


def sentences_of(chat: Any) -> list[Sentence]:
    """Return the sentences in the list of a `chat` file."""
    sentences = []
    for value in chat or ():
        given = value if isinstance(value, dict) else {}
        sextuples = [_sextuple(one) for one in objects(given.get("final_model_response"))]
        sentence = Sentence(
            holder=_text(given.get("holder")),
            text=_text(given.get("input_sentence")),
            sextuples=[sextuple for sextuple in sextuples if any(sextuple.values())],
        )
        sentences.append(sentence)
    return sentences


def _sextuple(given: Row) -> dict[str, str]:
    """Return field -> text of a sextuple, whichever of the `SEXTUPLE_KEYS` it has."""
    sextuple = {}
    for field, keys in SEXTUPLE_KEYS.items():
        key = next((key for key in keys if key in given), field)
        sextuple[field] = _text(given.get(key))
    return sextuple


def events_by_holder(emo: Any) -> dict[str, list[dict[str, Any]]]:
    """Return holder -> events of an `emo` file, each with all fields."""
    return {holder: _events(value) for holder, value in (emo or {}).items()}


def _events(holder: Any) -> list[dict[str, Any]]:
    """Return the events of a holder, each with all fields; what cannot be read is empty."""
    events = []
    for value in objects(holder.get("events")) if isinstance(holder, dict) else ():
        emotions = []
        for given in objects(value.get("emotions")):
            emotion = {
                "state": _text(given.get("state")),
                "reason": _text(given.get("reason")),
                "source_id": source_text(given.get("source_id")),
            }
            emotions.append(emotion)
        events.append({"event": _text(value.get("event")), "emotions": emotions})
    return events


def objects(value: Any) -> list[dict[str, Any]]:
    """Return the objects of a list that are not empty; one object counts as a list."""
    items = _as_list(value)
    if not isinstance(items, list):
        return []
    return [item for item in items if isinstance(item, dict) and item]


def _as_list(value: Any) -> Any:
    """Return an object as a list with one; return any other value unchanged."""
    return [value] if isinstance(value, dict) else value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def source_text(value: Any) -> str:
    """Return a source id as text, equal for 3, `"3"` and `"03"`."""
    number = source_number(value)
    return _text(value) if number is None else str(number)


def source_number(value: Any) -> int | None:
    """Return the number in a source id; None if it is no number."""
    if isinstance(value, str) and value.strip().isdecimal() and len(value) <= MAX_DIGITS:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number_as_text(value: Any) -> Any:
    """Return the number of a sentence as the contest's text; return other values unchanged."""
    return value if source_number(value) is None else source_text(value)


class Form(BaseModel, strict=True):
    """A part of the files of a submission or of gold, with the keys that are read."""


class EmotionForm(Form):
    """An emotion of a holder in an event."""

    state: str
    reason: str
    source_id: Annotated[str, BeforeValidator(_number_as_text)]


class EventForm(Form):
    """An event of a holder."""

    event: str
    emotions: Annotated[list[EmotionForm], BeforeValidator(_as_list)]


class HolderForm(Form):
    """A holder in `emo`."""

    events: list[EventForm]


class SextupleForm(Form):
    """The texts of a sextuple, under any of their keys."""

    target: str | None = None
    aspect: str | None = None
    opinion: str | None = None
    opinions: str | None = None
    sentiment: str | None = None
    rationale: str | None = None


class SentenceForm(Form):
    """A sentence of `chat` with its answers."""

    input_sentence: str
    holder: str
    final_model_response: Annotated[list[SextupleForm] | None, BeforeValidator(_as_list)]


CHAT_FILE = TypeAdapter(list[SentenceForm])
EMO_FILE = TypeAdapter(dict[str, HolderForm])
"""The form of a submission's emotions; gold has the same form: holder -> events."""


def form_faults(form: TypeAdapter[Any], value: Any) -> Iterator[str]:
    """Yield the faults in the form of a value, with their places.

    With jsonschema, this took half of the time of scoring 700 dialogues.
    """
    try:
        form.validate_python(value)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            place = ".".join(map(str, detail["loc"]))
            yield f"{place}: {detail['msg']:.200}"
