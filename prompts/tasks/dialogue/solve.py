"""The calls that answer a dialogue. Each answers some of its sentences, in order."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from pydantic import Field

from panjue.prompts.example import Answer, Example, Solving, Turn
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
        chains += _chains(reply.answer)
    return {"sentences": sentences, "holders": holders_of(dialogue.turns, chains)}


def _chains(answer: Answer) -> Iterator[Chain]:
    for holder in answer["holders"] or ():
        for event in holder["events"]:
            yield Chain(holder["holder"], event["event"], event["emotions"])


def question(dialogue: Example, start: int, window: int, events: Iterable[str]) -> Example:
    """Return the question about `window` sentences from `start`, with `CONTEXT` before them."""
    end = start + window
    asked = dialogue.turns[start:end]
    shown = dialogue.turns[max(0, start - CONTEXT) : end]
    return replace(
        dialogue,
        id=f"{dialogue.id}/{asked[0].number}",
        text=transcript(shown),
        names=tuple(map(head, asked)),  # with the beginnings of their lines, which `shorten` keeps
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
    """Return the beginning of the line of a sentence, which is unique."""
    return f"[{turn.number}] {turn.holder}："


def transcript(turns: Sequence[Turn]) -> str:
    """Return the sentences with their numbers and speakers, one on each line."""
    lines = []
    for turn in turns:
        sentence = " ".join(turn.sentence.split())
        lines.append(f"{head(turn)}{sentence}\n")
    return "".join(lines)
