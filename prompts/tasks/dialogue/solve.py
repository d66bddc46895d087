"""The calls that answer a dialogue, in one of two ways."""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field, model_validator

from panjue.prompts.example import Decoded, Example, Solving, Turn
from panjue.prompts.plumbing.config import Config
from panjue.prompts.shorten import GAP
from panjue.prompts.tasks.dialogue.sextuples import SEXTUPLE, holders_of, speakers
from panjue.prompts.tasks.dialogue.similarity import ngrams
from panjue.prompts.tasks.metrics import Row

OTHER_EVENT = "其他"
"""The event of a sentence without a named event."""

SAME_EVENT = 0.6
"""Events whose names have at least this similarity are one event."""

EMOTION_WINDOW = 30
EMOTION_STEP = 10
"""Sentences per window of emotion chains, and new sentences of each later one."""

MAX_SUMMARY_LENGTH = 40
"""Maximum characters of a sentence in the summary of an event."""


class SolveConfig(Config):
    """How a dialogue is solved; each key can be changed alone, to measure its effect."""

    way: Literal["window", "whole"] = "window"
    """Sliding windows, or the whole dialogue in one call."""
    window: int = Field(20, ge=1)
    """Sentences per window."""
    step: int = Field(5, ge=1)
    """New sentences of each later window."""
    merge: bool = True
    """Whether equal consecutive states of a chain become one."""

    @model_validator(mode="after")
    def _step_fits(self) -> "SolveConfig":
        if self.step > self.window:
            raise ValueError(f"step must not exceed its window, {self.window}")
        return self


def solve(dialogue: Example, config: SolveConfig) -> Solving:
    if config.way == "whole":
        [whole] = yield [dialogue]
        holders = joined(dialogue.turns, [whole], merge=config.merge)
        return {"sentences": whole.answer["sentences"], "holders": holders}
    events = yield from first_pass(dialogue, config)
    turns = [turn._replace(event=events.event_of[turn.number]) for turn in dialogue.turns]
    sextuples = yield list(sextuple_questions(dialogue, turns, events))
    sentences = []
    for turn, sextuple in zip(turns, sextuples, strict=True):
        sentences.append({"id": turn.number, "event": turn.event, **sextuple.answer})
    chains = yield list(emotion_questions(dialogue, turns, sentences))
    return {"sentences": sentences, "holders": joined(turns, chains, merge=config.merge)}


def windows(sentences: int, size: int, step: int) -> Iterator[tuple[range, range]]:
    """Yield (seen, new) for every window over sentences 0, 1, …; each is new exactly once.

    The first window has `size` new sentences. Each later one has the last `size - step` seen
    sentences and `step` new ones; 0 < step <= size.
    """
    end = min(size, sentences)
    yield range(0), range(end)
    while end < sentences:
        until = min(end + step, sentences)
        yield range(max(0, end - (size - step)), end), range(end, until)
        end = until


class Events:
    """The events of one dialogue: each sentence is in exactly one, whose summary grows by it."""

    def __init__(self) -> None:
        self.event_of: dict[int, str] = {}
        self.sentences: dict[str, list[tuple[Turn, str]]] = {}
        """Event -> its sentences, each with its target."""

    def add(self, turn: Turn, target: str, event: str) -> None:
        """Add a sentence to the event with the same or the most similar name, or to a new event."""
        assert turn.number not in self.event_of, f"sentence {turn.number} is already added"
        event = self._known(" ".join(event.split()) or OTHER_EVENT)
        self.sentences.setdefault(event, []).append((turn, target))
        self.event_of[turn.number] = event

    def _known(self, event: str) -> str:
        names = list(self.sentences)
        if event in names or not names:
            return event
        cosines = ngrams([event] * len(names), names)
        best = int(cosines.argmax())
        return names[best] if cosines[best] >= SAME_EVENT else event

    def summary(self, turn: Turn) -> tuple[list[str], str]:
        """Return the speakers and the summary, a line a sentence, of a sentence's event up to it.

        The summary only grows at its end, so this equals the summary at the time of the sentence.
        """
        holders: dict[str, None] = {}
        lines = []
        for seen, target in self.sentences[self.event_of[turn.number]]:
            if seen.number <= turn.number:
                holders[seen.holder] = None
                lines.append(
                    f"[{seen.number}] {seen.holder}谈{target or OTHER_EVENT}：{_short(seen)}\n"
                )
        return list(holders), "".join(lines)


def _short(turn: Turn) -> str:
    sentence = " ".join(turn.sentence.split())
    if len(sentence) <= MAX_SUMMARY_LENGTH:
        return sentence
    return sentence[:MAX_SUMMARY_LENGTH] + GAP


def head(turn: Turn) -> str:
    """Return the start of a sentence's line, which is unique."""
    return f"[{turn.number}] {turn.holder}："


def transcript(turns: Sequence[Turn]) -> str:
    """Return the sentences with their numbers and speakers, one per line."""
    return "".join(f"{head(turn)}{' '.join(turn.sentence.split())}\n" for turn in turns)


def first_pass(dialogue: Example, config: SolveConfig) -> Generator[Any, Any, Events]:
    """Slide a window over the dialogue and assign its sentences to events."""
    turns = dialogue.turns
    events = Events()
    for number, (seen, new) in enumerate(windows(len(turns), config.window, config.step)):
        asked = turns[new.start : new.stop]
        question = replace(
            _question(dialogue, "window", number, asked),
            text=transcript(turns[seen.start : new.stop]),
            names=tuple(map(head, asked)),
        )
        known = "；".join(events.sentences) or "（无）"
        [decoded] = yield [with_inputs(question, events=known)]
        for turn, sentence in zip(asked, decoded.answer["sentences"], strict=True):
            events.add(turn, sentence["target"], sentence["event"])
    return events


def _question(dialogue: Example, step: str, number: int, asked: Sequence[Turn]) -> Example:
    """Return a question without a text; `shorten` may drop any line of the text."""
    numbers = "、".join(str(turn.number) for turn in asked)
    return replace(
        dialogue,
        id=f"{dialogue.id}/{step} {number}",
        names=(),
        inputs={"step": step, "numbers": numbers},
        turns=tuple(asked),
        answer=None,
        notes=(),
    )


def with_inputs(question: Example, **inputs: str) -> Example:
    return replace(question, inputs={**question.inputs, **inputs})


def sextuple_questions(
    dialogue: Example, turns: Sequence[Turn], events: Events
) -> Iterator[Example]:
    """Yield one question per sentence: with the summary of its event, and nothing after it."""
    for turn in turns:
        holders, summary = events.summary(turn)
        question = _question(dialogue, "sextuple", turn.number, [turn])
        yield with_inputs(
            replace(question, text=summary),
            context=f"事件：{turn.event}\n参与者：{'、'.join(holders)}\n经过：",
            sentence=transcript([turn]).rstrip("\n"),
        )


def emotion_questions(
    dialogue: Example, turns: Sequence[Turn], sentences: Sequence[Row]
) -> Iterator[Example]:
    """Yield the questions for emotion chains, given the sextuples and the events so far."""
    lines = [_line(turn, sextuple) for turn, sextuple in zip(turns, sentences, strict=True)]
    slides = windows(len(turns), EMOTION_WINDOW, EMOTION_STEP)
    for number, (seen, new) in enumerate(slides):
        question = _question(dialogue, "emotions", number, turns[new.start : new.stop])
        yield replace(question, text="".join(lines[seen.start : new.stop]))


def _line(turn: Turn, sextuple: Row) -> str:
    event = f"【{turn.event}】" if turn.event else ""
    values = "｜".join(sextuple[field] for field in SEXTUPLE)
    if not values.strip("｜"):
        values = "（无）"
    return f"{head(turn)}{event}{values}\n"


def joined(turns: Sequence[Turn], replies: Sequence[Decoded], *, merge: bool) -> list[Any]:
    """Return every holder's events, with the chains of all windows joined in order."""
    chains: dict[str, dict[str, list[Any]]] = {holder: {} for holder in speakers(turns)}
    for reply in replies:
        for holder in reply.answer["holders"] or ():
            for event in holder["events"]:
                chain = chains[holder["holder"]].setdefault(event["event"], [])
                chain += event["emotions"]
    for events in chains.values():
        for event, chain in list(events.items()):
            if not chain:
                del events[event]
            elif merge:
                events[event] = merged(chain)
    return holders_of(chains)


def merged(chain: Sequence[Row]) -> list[dict[str, str]]:
    """Return a chain with equal consecutive states merged: their reasons and sources are joined."""
    result: list[dict[str, str]] = []
    for emotion in chain:
        if not result or result[-1]["state"] != emotion["state"]:
            result.append(dict(emotion))
            continue
        last = result[-1]
        last["reason"] = "；".join(filter(None, (last["reason"], emotion["reason"])))
        sources = f"{last['source_id']},{emotion['source_id']}".split(",")
        last["source_id"] = ",".join(dict.fromkeys(filter(None, sources)))
    return result
