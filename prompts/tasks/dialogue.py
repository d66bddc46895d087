"""Long dialogues: who feels what about what, and why (EmoCaustics' sextuples and emotion events).

An example takes several calls (`solve`), in one of three ways; what each is asked, and what it may
answer, depends on its step: `window`, `sextuple`, `emotions`, or the whole dialogue at once.
"""

import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from panjue.prompts.bucket import OTHER, Bucket, windows
from panjue.prompts.config import Config
from panjue.prompts.decode import after_thinking, load_json
from panjue.prompts.dialogues import DIALOGUES, dialogues
from panjue.prompts.errors import UserError
from panjue.prompts.files import dump
from panjue.prompts.labels import Labels
from panjue.prompts.render import render
from panjue.prompts.similarity import BUILT_IN, best_pairs, ngrams, similarity
from panjue.prompts.task import (
    Answer,
    Decoded,
    Example,
    Messages,
    Row,
    Schema,
    Solving,
    Task,
    Turn,
)

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

Asking = Generator[Sequence[Example], Sequence[Decoded], Any]


class Settings(Config):
    """How a dialogue is solved; each key may be changed alone, to see what it is worth."""

    way: Literal["window", "retrieval", "whole"] = "window"
    """Sliding windows; each sentence with those most like it; the whole dialogue in one call."""
    window: int | None = Field(20, ge=1)
    """Sentences of a window; null: one window over all."""
    step: int = Field(5, ge=1)
    """New sentences of each later window."""
    bucket: bool = True
    """Whether a sentence is read with the account of its event, or with those just before it."""
    same_event: float = Field(0.6, ge=0, le=1)
    """Names of events that are so much alike are one event."""
    nearest: int = Field(5, ge=1)
    """Earlier sentences that `way: retrieval` shows beside a sentence."""
    emotions: Literal["window", "whole"] = "window"
    """Emotion chains by windows, or of the whole dialogue at once."""
    emotion_window: int = Field(30, ge=1)
    """Sentences of such a window."""
    emotion_step: int = Field(10, ge=1)
    """New sentences of each later one."""
    merge: bool = True
    """Whether neighbouring equal states of a chain become one."""
    similarity: str = BUILT_IN
    """`ngrams`, a folder with a sentence-transformers model, or URL#MODEL of an endpoint."""
    kept_in: Path | None = Field(None, exclude=True)
    """The run folder, where a model's vectors are kept; not for you to set."""

    @model_validator(mode="after")
    def _steps_fit(self) -> "Settings":
        for step, size in (("step", self.window), ("emotion_step", self.emotion_window)):
            if size is not None and getattr(self, step) > size:
                raise ValueError(f"{step} must not exceed its window, {size}")
        return self


def from_row(row: Mapping[str, Any]) -> Example:
    """Read one dialogue.

    Raises:
        UserError: A sentence is broken. Broken emotions are a note: the sentences stay good.
    """
    chat = row.get("chat")
    if not isinstance(chat, list) or not chat or not all(isinstance(one, dict) for one in chat):
        raise UserError("the chat must list one sentence or more")
    turns = tuple(_turn(number, one) for number, one in enumerate(chat, start=1))
    told = [sum(key.title() in one for one in chat) for key in FIELDS]
    if any(told) and set(told) != {len(chat)}:
        raise UserError("some sentences have Target, Aspect, … and others have not")
    sextuples = [_gold_sextuple(number, one) for number, one in enumerate(chat, start=1)]
    holders, problem = _emotions(row)
    notes = [problem] if problem else []
    if any(told):
        notes += _odd(sextuples, holders or [])
    return Example(
        id=str(row["id"]),
        text=transcript(turns),
        names=tuple(map(head, turns)),
        answer={"sentences": sextuples, "holders": holders} if any(told) else None,
        groups={"turns": _size(len(turns))},
        turns=turns,
        notes=tuple(notes),
    )


def _turn(number: int, one: Mapping[str, Any]) -> Turn:
    """Read who says what; both are free strings, and may be empty."""
    holder, sentence = one.get("Holder"), one.get("sentence")
    if not isinstance(holder, str | int) or not isinstance(sentence, str):
        raise UserError(f"sentence {number}: 'sentence' and 'Holder' must be texts")
    return Turn(number, str(holder), sentence)


def _gold_sextuple(number: int, one: Mapping[str, Any]) -> dict[str, Any]:
    found = {field: one.get(field.title(), "") for field in FIELDS}
    wrong = next((field for field, value in found.items() if not isinstance(value, str)), None)
    if wrong:
        raise UserError(f"sentence {number}: {wrong.title()!r} must be a text")
    return {"id": number, **found}


def _emotions(row: Mapping[str, Any]) -> tuple[list[dict[str, Any]] | None, str]:
    """Return every holder's events, or None and what is wrong with them."""
    if row.get("emo_problem"):
        return None, str(row["emo_problem"])
    if row.get("emo") is None:
        return None, ""
    wrong = next(_emotion_faults(row["emo"]), "")
    if wrong:
        return None, f"emo/emo_{row['id']}.json: {wrong}"
    return [{"holder": name, "events": one["events"]} for name, one in row["emo"].items()], ""


def _odd(sextuples: Sequence[Row], holders: Sequence[Row]) -> Iterator[str]:
    """Yield the sentiments and states that are none of the five: they are scored, not taught."""
    known = {*SENTIMENTS, ""}
    for one in sextuples:
        if one["sentiment"] not in known:
            yield f"sentence {one['id']}: the sentiment {one['sentiment']!r} is none of the five"
    for one in holders:
        for event in one["events"]:
            for emotion in event["emotions"]:
                if emotion["state"] not in known:
                    yield f"holder {one['holder']}: the state {emotion['state']!r} is none of them"


def _size(turns: int) -> str:
    return "1-20" if turns <= 20 else "21-60" if turns <= 60 else "61+"


def head(turn: Turn) -> str:
    """Return how a sentence's line opens, which no other line holds."""
    return f"[{turn.number}] {turn.holder}："


def transcript(turns: Sequence[Turn]) -> str:
    """Return the sentences with their numbers and speakers, one a line."""
    return "".join(f"{head(turn)}{' '.join(turn.sentence.split())}\n" for turn in turns)


# What is asked.


def solve(dialogue: Example, settings: Settings) -> Solving:
    """Find the answer of a dialogue in the way that the settings say."""
    if settings.way == "whole":
        [whole] = yield [dialogue]
        return whole.answer
    turns, bucket = dialogue.turns, None
    if settings.way == "window":
        bucket = yield from first_pass(dialogue, settings)
        turns = tuple(turn._replace(event=bucket.of(turn.number).event) for turn in turns)
    told = yield list(sextuple_questions(dialogue, turns, bucket, settings))
    sentences = [
        {"id": turn.number, "event": turn.event, **one.answer}
        for turn, one in zip(turns, told, strict=True)
    ]
    asked = list(emotion_questions(dialogue, turns, sentences, settings))
    chains = yield asked
    return {"sentences": sentences, "holders": joined(turns, chains, merge=settings.merge)}


def first_pass(dialogue: Example, settings: Settings) -> Generator[Any, Any, Bucket]:
    """Slide a window over the dialogue and sort its sentences into events."""
    turns = dialogue.turns
    bucket = Bucket(_similar(settings), settings.same_event)
    slides = windows(len(turns), settings.window or len(turns), settings.step)
    for count, (seen, new) in enumerate(slides):
        asked = _part(turns, new)
        known = "；".join(entry.event for entry in bucket.entries)
        question = _question(
            dialogue,
            f"window {count}",
            _part(turns, seen) + asked,
            asked,
            events=known or "（无）",
        )
        [told] = yield [question]
        for turn, one in zip(asked, told.answer["sentences"], strict=True):
            bucket.add(turn, one["target"], one["event"])
    return bucket


def _part(turns: tuple[Turn, ...], which: range) -> tuple[Turn, ...]:
    return turns[which.start : which.stop]


def _similar(settings: Settings) -> Any:
    folder = settings.kept_in
    return similarity(settings.similarity, folder and folder / "vectors.sqlite")


def _question(
    dialogue: Example, name: str, shown: Sequence[Turn], asked: tuple[Turn, ...], **inputs: str
) -> Example:
    numbers = "、".join(str(turn.number) for turn in asked)
    return replace(
        dialogue,
        id=f"{dialogue.id}/{name}",
        text=transcript(shown),
        names=tuple(map(head, asked)),
        inputs={"step": name.partition(" ")[0], "numbers": numbers, **inputs},
        turns=asked,
        answer=None,
        notes=(),
    )


def sextuple_questions(
    dialogue: Example, turns: Sequence[Turn], bucket: Bucket | None, settings: Settings
) -> Iterator[Example]:
    """Yield one question a sentence; none shows anything that comes after its sentence."""
    texts = [turn.sentence for turn in turns]
    alike = _similar(settings)(texts, texts) if settings.way == "retrieval" else None
    for i, turn in enumerate(turns):
        shown: Sequence[Turn] = turns[max(0, i - (settings.window or i)) : i]
        context, text = "此前的对话：", ""
        if bucket and settings.bucket:
            entry, shown = bucket.of(turn.number), ()
            context = (
                f"事件：{entry.event}\n参与者：{'、'.join(entry.holders(turn.number))}\n经过："
            )
            text = entry.description(turn.number)
        elif alike is not None:
            best = np.argsort(-alike[i, :i], kind="stable")[: settings.nearest]
            shown, context = [turns[j] for j in sorted(best.tolist())], "此前相似的句子："
        question = _question(
            dialogue,
            f"sextuple {turn.number}",
            shown,
            (turn,),
            context=context,
            sentence=transcript([turn]).rstrip("\n"),
        )
        # The sentence itself stands apart, so that nothing in the text must stay.
        yield replace(question, text=text or question.text, names=())


def emotion_questions(
    dialogue: Example, turns: Sequence[Turn], sentences: Sequence[Row], settings: Settings
) -> Iterator[Example]:
    """Yield what asks for emotion chains, given the sextuples and the events so far."""
    lines = [_line(turn, one) for turn, one in zip(turns, sentences, strict=True)]
    size, step = settings.emotion_window, settings.emotion_step
    if settings.emotions == "whole":
        size = step = len(turns)
    for count, (seen, new) in enumerate(windows(len(turns), size, step)):
        asked = tuple(turns[new.start : new.stop])
        question = _question(dialogue, f"emotions {count}", (), asked)
        yield replace(question, text="".join(lines[i] for i in (*seen, *new)))


def _line(turn: Turn, sextuple: Row) -> str:
    event = f"【{turn.event}】" if turn.event else ""
    told = "｜".join(sextuple[field] for field in FIELDS)
    return f"{head(turn)}{event}{told if told.strip('｜') else '（无）'}\n"


def joined(turns: Sequence[Turn], replies: Sequence[Decoded], *, merge: bool) -> list[Any]:
    """Return every holder's events, the chains of all windows joined in order."""
    chains: dict[str, dict[str, list[Any]]] = {turn.holder: {} for turn in turns}
    for reply in replies:
        for one in reply.answer["holders"] or ():
            for event in one["events"]:
                chain = chains[one["holder"]].setdefault(event["event"], [])
                chain += event["emotions"]
    return [
        {
            "holder": holder,
            "events": [
                {"event": event, "emotions": merged(chain) if merge else chain}
                for event, chain in events.items()
                if chain
            ],
        }
        for holder, events in chains.items()
    ]


def merged(chain: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Return a chain without neighbouring equal states: their reasons and sources are joined."""
    found: list[dict[str, str]] = []
    for emotion in chain:
        if found and found[-1]["state"] == emotion["state"]:
            last = found[-1]
            for key, mark in (("reason", "；"), ("source_id", ",")):
                parts = [*last[key].split(mark), *emotion[key].split(mark)]
                last[key] = mark.join(dict.fromkeys(part for part in parts if part))
        else:
            found.append(dict(emotion))
    return found


def prompt(example: Example) -> Messages:
    """Put a question, by the template of its step."""
    step = example.inputs.get("step")
    return render(f"dialogue-{step}" if step else "dialogue", example)


# What may be answered.


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
    objects = [load_json(text) for text in INNERMOST.findall(after_thinking(reply))]
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
        told.setdefault(str(one.get("holder"))[:200], _dicts(one, "events"))
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


def slack(example: Example) -> int:
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


# What a perfect model would answer.


def right(dialogue: Example) -> Callable[[Example], Example]:
    """Return what answers every question about a dialogue as its gold says.

    Gold names events by holder and says of no sentence to which it belongs: a holder's sentence
    belongs to the event most like it, and an emotion to the sentence most like its reason. An
    answer that the schema cannot hold (a sentiment that is none of the five, emotions that could
    not be read) stays as it is, so that the question is refused in training.
    """
    gold = dialogue.answer
    assert gold is not None, "a test dialogue has no gold"
    sentences = {one["id"]: one for one in gold["sentences"]}
    events, emotions = aligned(dialogue)

    def answer(question: Example) -> Example:
        found: dict[str, Any]
        match question.inputs.get("step"):
            case "window":
                told = [(t.number, sentences[t.number]["target"]) for t in question.turns]
                named = [{"id": n, "target": t, "event": events.get(n, OTHER)} for n, t in told]
                found = {"sentences": named}
            case "sextuple":
                found = {field: sentences[question.turns[0].number][field] for field in FIELDS}
            case "emotions":
                found = {"holders": _gold_chains(question, emotions)}
                if gold["holders"] is None:
                    found = {"holders": None}
            case _:
                found = dict(gold)
        return replace(question, answer=found)

    return answer


def aligned(dialogue: Example) -> tuple[dict[int, str], dict[int, list[tuple[str, Row]]]]:
    """Return sentence -> its event, and sentence -> (event, emotion) that belong there."""
    assert dialogue.answer is not None
    said = {
        one["id"]: "".join(one[f] for f in FIELDS[:3]) + one["rationale"]
        for one in dialogue.answer["sentences"]
    }
    events: dict[int, str] = {}
    emotions: dict[int, list[tuple[str, Row]]] = {}
    for one in dialogue.answer["holders"] or ():
        numbers = [turn.number for turn in dialogue.turns if turn.holder == one["holder"]]
        if not numbers or not one["events"]:
            continue
        texts = [said[number] for number in numbers]
        told = [e["event"] + "".join(m["reason"] for m in e["emotions"]) for e in one["events"]]
        alike = ngrams(texts, told)
        of = alike.argmax(axis=1)
        for row, column in best_pairs(alike):  # so that every event has a sentence, if they suffice
            of[row] = column
        for column, event in enumerate(one["events"]):
            its = [i for i in range(len(numbers)) if of[i] == column]
            events.update({numbers[i]: event["event"] for i in its})
            for emotion in event["emotions"] if its else ():
                near = ngrams([emotion["reason"]], [texts[i] for i in its])[0]
                place = numbers[its[int(near.argmax())]]
                emotions.setdefault(place, []).append((event["event"], emotion))
    return events, emotions


def _gold_chains(
    question: Example, emotions: Mapping[int, Sequence[tuple[str, Row]]]
) -> list[dict[str, Any]]:
    """Return the chains of the sentences asked about, under the names that their events have."""
    chains: dict[str, dict[str, list[Row]]] = {
        holder: {event: [] for event in known} for holder, known in speakers(question.turns).items()
    }
    for turn in question.turns:
        for event, emotion in emotions.get(turn.number, ()):
            chains[turn.holder].setdefault(turn.event or event, []).append(dict(emotion))
    return [
        {"holder": holder, "events": [{"event": e, "emotions": m} for e, m in events.items()]}
        for holder, events in chains.items()
    ]


# What is handed in.


def submission(example: Example, answer: Answer) -> dict[str, Any]:
    """Return the row that becomes `chat_<id>.json` and `emo_<id>.json`."""
    holders = answer["holders"]
    return {
        "id": example.id,
        "chat": [
            {
                "input_sentence": turn.sentence,
                "holder": turn.holder,
                "event": one.get("event", ""),
                "final_model_response": [{field: one[field] for field in FIELDS}]
                if any(one[field] for field in FIELDS)
                else [],
            }
            for turn, one in zip(example.turns, answer["sentences"], strict=True)
        ],
        "emo": {one["holder"]: {"events": one["events"]} for one in holders}
        if holders is not None
        else None,
    }


def faults(example: Example, row: Row, _labels: Labels | None) -> Iterator[str]:
    """Yield what a submission has wrong: sentences by their position, then the emotions."""
    chat = row.get("chat")
    if not isinstance(chat, list) or len(chat) != len(example.turns):
        yield f"the chat must list {len(example.turns)} sentences"
        return
    for turn, one in zip(example.turns, chat, strict=True):
        yield from (f"sentence {turn.number}: {fault}" for fault in _sentence_faults(turn, one))
    if row.get("emo") is None:
        yield "there are no emotions"
    else:
        yield from _emotion_faults(row["emo"])


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
    elif told and not _is_texts(told[0], FIELDS):
        yield f"a sextuple has the texts {', '.join(FIELDS)} and nothing else"
    elif told and told[0]["sentiment"] not in {*SENTIMENTS, ""}:
        yield f"the sentiment {told[0]['sentiment']!r} is none of {', '.join(SENTIMENTS)}"


def _is_texts(value: Any, keys: Sequence[str]) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == set(keys)
        and all(isinstance(text, str) for text in value.values())
    )


def _emotion_faults(emo: Any) -> Iterator[str]:
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
            elif not all(_is_texts(e, ("state", "reason", "source_id")) for e in emotions):
                yield f"holder {holder!r}: an emotion has the texts state, reason and source_id"


TASK = Task(
    from_row=from_row,
    prompt=prompt,
    schema=schema,
    target=target,
    decode=decode,
    submission=submission,
    rows=dialogues,
    handin=DIALOGUES,
    faults=faults,
    fallback="no opinions",
    slack=slack,
    solve=solve,
    right=right,
    settings=Settings.model_validate({}),
    compares=True,
    metrics=("dialogue.sextuple", "dialogue.event"),
)
