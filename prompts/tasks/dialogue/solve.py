"""The calls that answer a dialogue, in one of three ways."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from panjue.prompts.example import Decoded, Example, Solving, Turn
from panjue.prompts.plumbing.config import SolveSettings
from panjue.prompts.tasks.dialogue.bucket import Bucket, windows
from panjue.prompts.tasks.dialogue.sextuples import (
    FIELDS,
)
from panjue.prompts.tasks.dialogue.similarity import (
    BUILT_IN,
    check_similarity,
    similarity,
)
from panjue.prompts.tasks.metrics import Row


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
    folder = settings.cache_folder
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
