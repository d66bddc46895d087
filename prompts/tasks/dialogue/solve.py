"""The calls that answer a dialogue, in one of two ways."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import Field, model_validator

from panjue.prompts.example import Decoded, Example, Solving, Turn
from panjue.prompts.plumbing.config import Config
from panjue.prompts.shorten import GAP
from panjue.prompts.tasks.dialogue.sextuples import FIELDS
from panjue.prompts.tasks.dialogue.similarity import ngrams
from panjue.prompts.tasks.metrics import Row

OTHER = "其他"
"""The event of a sentence without a named event."""

MAX_SENTENCE_LENGTH = 40
"""Maximum characters of a sentence in an event's account, which is a summary, no transcript."""


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


@dataclass
class Bucket:
    """The events of one dialogue: each sentence is in exactly one, whose account grows by it."""

    same_event: float  # names with at least this similarity are one event
    accounts: dict[str, list[tuple[Turn, str]]] = field(default_factory=dict)
    """Event -> (sentence, its target)."""
    event_of: dict[int, str] = field(default_factory=dict)

    def add(self, turn: Turn, target: str, event: str) -> None:
        """Add a sentence to the event with the same or the most similar name, or to a new event."""
        assert turn.number not in self.event_of, f"sentence {turn.number} is already added"
        event = self._known(" ".join(event.split()) or OTHER)
        self.accounts.setdefault(event, []).append((turn, target))
        self.event_of[turn.number] = event

    def _known(self, event: str) -> str:
        names = list(self.accounts)
        if event in names or not names:
            return event
        cosines = ngrams([event], names)[0]
        best = int(cosines.argmax())
        return names[best] if cosines[best] >= self.same_event else event

    def account(self, turn: Turn) -> tuple[list[str], str]:
        """Return the speakers and the account, a line a sentence, of a sentence's event up to it.

        The account only grows at its end, so this equals the account at the time of the sentence.
        """
        account = self.accounts[self.event_of[turn.number]]
        account = [(seen, target) for seen, target in account if seen.number <= turn.number]
        lines = [
            f"[{seen.number}] {seen.holder}谈{target or OTHER}：{_short(seen.sentence)}\n"
            for seen, target in account
        ]
        return list(dict.fromkeys(seen.holder for seen, _ in account)), "".join(lines)


def _short(sentence: str) -> str:
    sentence = " ".join(sentence.split())
    too_long = len(sentence) > MAX_SENTENCE_LENGTH
    return sentence[:MAX_SENTENCE_LENGTH] + GAP if too_long else sentence


class Settings(Config):
    """How a dialogue is solved; each key can be changed alone, to measure its effect."""

    way: Literal["window", "whole"] = "window"
    """Sliding windows, or the whole dialogue in one call."""
    window: int | None = Field(20, ge=1)
    """Sentences per window; null: one window over all."""
    step: int = Field(5, ge=1)
    """New sentences of each later window."""
    same_event: float = Field(0.6, ge=0, le=1)
    """Events whose names have at least this similarity are one event."""
    emotion_window: int | None = Field(30, ge=1)
    """Sentences per window of emotion chains; null: one window over all."""
    emotion_step: int = Field(10, ge=1)
    """New sentences of each later window of emotion chains."""
    merge: bool = True
    """Whether equal consecutive states of a chain become one."""

    @model_validator(mode="after")
    def _steps_fit(self) -> "Settings":
        for step, size in (("step", self.window), ("emotion_step", self.emotion_window)):
            if size is not None and getattr(self, step) > size:
                raise ValueError(f"{step} must not exceed its window, {size}")
        return self


def head(turn: Turn) -> str:
    """Return the start of a sentence's line, which is unique."""
    return f"[{turn.number}] {turn.holder}："


def transcript(turns: Sequence[Turn]) -> str:
    """Return the sentences with their numbers and speakers, one per line."""
    return "".join(f"{head(turn)}{' '.join(turn.sentence.split())}\n" for turn in turns)


def solve(dialogue: Example, settings: Settings) -> Solving:
    """Solve a dialogue by the steps of its settings."""
    if settings.way == "whole":
        [whole] = yield [dialogue]
        holders = joined(dialogue.turns, [whole], merge=settings.merge)
        return {"sentences": whole.answer["sentences"], "holders": holders}
    bucket = yield from first_pass(dialogue, settings)
    turns = tuple(turn._replace(event=bucket.event_of[turn.number]) for turn in dialogue.turns)
    sextuples = yield list(sextuple_questions(dialogue, turns, bucket))
    sentences = [
        {"id": turn.number, "event": turn.event, **sextuple.answer}
        for turn, sextuple in zip(turns, sextuples, strict=True)
    ]
    chains = yield list(emotion_questions(dialogue, turns, sentences, settings))
    return {"sentences": sentences, "holders": joined(turns, chains, merge=settings.merge)}


def first_pass(dialogue: Example, settings: Settings) -> Generator[Any, Any, Bucket]:
    """Slide a window over the dialogue and assign its sentences to events."""
    turns = dialogue.turns
    bucket = Bucket(settings.same_event)
    positions = windows(len(turns), settings.window or len(turns), settings.step)
    for number, (seen, new) in enumerate(positions):
        asked = turns[new.start : new.stop]
        question = _question(
            dialogue,
            f"window {number}",
            turns[seen.start : seen.stop] + asked,
            asked,
            events="；".join(bucket.accounts) or "（无）",
        )
        [decoded] = yield [question]
        for turn, sentence in zip(asked, decoded.answer["sentences"], strict=True):
            bucket.add(turn, sentence["target"], sentence["event"])
    return bucket


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
    dialogue: Example, turns: Sequence[Turn], bucket: Bucket
) -> Iterator[Example]:
    """Yield one question per sentence: with the account of its event, and nothing after it."""
    for turn in turns:
        holders, account = bucket.account(turn)
        inputs = {
            "context": f"事件：{turn.event}\n参与者：{'、'.join(holders)}\n经过：",
            "sentence": transcript([turn]).rstrip("\n"),
        }
        question = _question(dialogue, f"sextuple {turn.number}", (), (turn,), **inputs)
        # The sentence is a field of its own, so `shorten` may drop any line of the text.
        yield replace(question, text=account, names=())


def emotion_questions(
    dialogue: Example, turns: Sequence[Turn], sentences: Sequence[Row], settings: Settings
) -> Iterator[Example]:
    """Yield the questions for emotion chains, given the sextuples and the events so far."""
    lines = [_line(turn, sextuple) for turn, sextuple in zip(turns, sentences, strict=True)]
    size = settings.emotion_window or len(turns)
    for number, (seen, new) in enumerate(windows(len(turns), size, settings.emotion_step)):
        asked = tuple(turns[new.start : new.stop])
        question = _question(dialogue, f"emotions {number}", (), asked)
        text = "".join(lines[i] for i in (*seen, *new))
        yield replace(question, text=text, names=())  # `shorten` may drop lines of a long text


def _line(turn: Turn, sextuple: Row) -> str:
    event = f"【{turn.event}】" if turn.event else ""
    values = "｜".join(sextuple[field] for field in FIELDS)
    return f"{head(turn)}{event}{values if values.strip('｜') else '（无）'}\n"


def joined(turns: Sequence[Turn], replies: Sequence[Decoded], *, merge: bool) -> list[Any]:
    """Return every holder's events, with the chains of all windows joined in order."""
    chains: dict[str, dict[str, list[Any]]] = {turn.holder: {} for turn in turns}
    for reply in replies:
        for holder in reply.answer["holders"] or ():
            for event in holder["events"]:
                chain = chains[holder["holder"]].setdefault(event["event"], [])
                chain += event["emotions"]
    return [
        {
            "holder": name,
            "events": [
                {"event": event, "emotions": merged(chain) if merge else chain}
                for event, chain in events.items()
                if chain
            ],
        }
        for name, events in chains.items()
    ]


def merged(chain: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Return a chain with equal consecutive states merged: their reasons and sources are joined."""
    result: list[dict[str, str]] = []
    for emotion in chain:
        if result and result[-1]["state"] == emotion["state"]:
            last = result[-1]
            last["reason"] = "；".join(part for part in (last["reason"], emotion["reason"]) if part)
            sources = [*last["source_id"].split(","), *emotion["source_id"].split(",")]
            last["source_id"] = ",".join(dict.fromkeys(source for source in sources if source))
        else:
            result.append(dict(emotion))
    return result
