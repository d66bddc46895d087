"""Long dialogues: who feels what about what, and why (EmoCaustics' sextuples and emotion events).

An example takes several calls (`solve`), in one of three ways.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from panjue.prompts.bucket import OTHER, Bucket, windows
from panjue.prompts.config import SolveSettings
from panjue.prompts.dialogues import DIALOGUES, dialogues
from panjue.prompts.errors import UserError
from panjue.prompts.render import render
from panjue.prompts.sextuples import (
    FIELDS,
    SENTIMENTS,
    decode,
    emotion_faults,
    faults,
    schema,
    slack,
    speakers,
    target,
)
from panjue.prompts.similarity import (
    BUILT_IN,
    best_pairs,
    check_similarity,
    ngrams,
    similarity,
)
from panjue.prompts.task import (
    Answer,
    Decoded,
    Example,
    Messages,
    Row,
    Solving,
    Task,
    Turn,
)


class Settings(SolveSettings):
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

    @field_validator("similarity")
    @classmethod
    def _is_similarity(cls, name: str) -> str:
        check_similarity(name)
        return name

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
    if any(told) and row.get("emo") is None and not problem:
        notes.append(f"emo/emo_{row['id']}.json is missing: no events are scored")
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
    wrong = next(emotion_faults(row["emo"]), "")
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
        holders = joined(dialogue.turns, [whole], merge=settings.merge)
        return {"sentences": whole.answer["sentences"], "holders": holders}
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
        text = "".join(lines[i] for i in (*seen, *new))
        yield replace(question, text=text, names=())  # better without some lines than not asked


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
            last["reason"] = "；".join(part for part in (last["reason"], emotion["reason"]) if part)
            sources = [*last["source_id"].split(","), *emotion["source_id"].split(",")]
            last["source_id"] = ",".join(dict.fromkeys(source for source in sources if source))
        else:
            found.append(dict(emotion))
    return found


def prompt(example: Example) -> Messages:
    """Put a question, by the template of its step."""
    step = example.inputs.get("step")
    return render(f"dialogue-{step}" if step else "dialogue", example)


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
    shown="dialogue.shown",
    metrics=("dialogue.event", "dialogue.sextuple"),
)
