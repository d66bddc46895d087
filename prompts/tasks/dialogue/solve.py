"""The calls that answer a dialogue. Each answers some of its sentences, in order."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from pydantic import Field

from panjue.prompts.example import Example, Solving, Turn
from panjue.prompts.plumbing.config import Config
from panjue.prompts.tasks.dialogue.sextuples import Chain, holders_of

CONTEXT = 10
"""Number of earlier sentences that a call shows."""


class SolveConfig(Config):
    """Settings for solving a dialogue."""

    window: int = Field(12, ge=1)
    """Number of sentences that one call answers."""


def solve(dialogue: Example, config: SolveConfig) -> Solving:
    """Ask about one window of sentences after the other; each call shows the events so far."""
    sentences: list[dict[str, Any]] = []
    chains: list[Chain] = []
    for start in range(0, len(dialogue.turns), config.window):
        events = dict.fromkeys(chain.event for chain in chains)
        [reply] = yield [question(dialogue, start, config.window, events)]
        sentences += reply.answer["sentences"]
        for holder in reply.answer["holders"] or ():
            for event in holder["events"]:
                chains.append(Chain(holder["holder"], event["event"], event["emotions"]))
    return {"sentences": sentences, "holders": holders_of(dialogue.turns, chains)}


def question(dialogue: Example, start: int, window: int, events: Iterable[str]) -> Example:
    """Return the question about `window` sentences from `start`, with `CONTEXT` before them.

    `events` are the names of those that earlier questions found, so that the model keeps the names.
    """
    end = start + window
    asked = dialogue.turns[start:end]
    shown = dialogue.turns[max(0, start - CONTEXT) : end]
    return replace(
        dialogue,
        id=f"{dialogue.id}/{asked[0].number}",
        text=transcript(shown),
        names=tuple(map(head, asked)),  # `shorten` keeps the lines with these beginnings
        inputs=inputs(asked, events),
        turns=asked,
        answer=None,
        notes=(),
    )


def inputs(asked: Sequence[Turn], events: Iterable[str]) -> dict[str, str]:
    """Return the fields of the prompt other than the text."""
    numbers = "、".join(str(turn.number) for turn in asked)
    return {"numbers": numbers, "events": "；".join(events) or "（无）"}


def head(turn: Turn) -> str:
    """Return the beginning of a sentence's line in the prompt, which is unique: `[3] 甲：`."""
    return f"[{turn.number}] {turn.holder}："


def transcript(turns: Sequence[Turn]) -> str:
    """Return the sentences with their numbers and speakers, one on each line."""
    lines = []
    for turn in turns:
        sentence = " ".join(turn.sentence.split())
        lines.append(f"{head(turn)}{sentence}\n")
    return "".join(lines)
