"""The calls that answer a dialogue: each answers some of its sentences, in order."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import Field

from panjue.prompts.example import Decoded, Example, Solving, Turn
from panjue.prompts.plumbing.config import Config
from panjue.prompts.tasks.dialogue.sextuples import holders_of, speakers

CONTEXT = 10
"""Sentences before those of a call that it shows."""


class SolveConfig(Config):
    """How a dialogue is solved."""

    window: int = Field(12, ge=1)
    """Sentences per call."""


def solve(dialogue: Example, config: SolveConfig) -> Solving:
    replies: list[Decoded] = []
    events: dict[str, None] = {}
    for start in range(0, len(dialogue.turns), config.window):
        [reply] = yield [question(dialogue, start, config.window, list(events))]
        replies.append(reply)
        for holder in reply.answer["holders"] or ():
            events |= dict.fromkeys(event["event"] for event in holder["events"])
    sentences = []
    for reply in replies:
        sentences += reply.answer["sentences"]
    return {"sentences": sentences, "holders": _joined(dialogue.turns, replies)}


def question(dialogue: Example, start: int, window: int, events: Sequence[str]) -> Example:
    """Return the question about `window` sentences from `start`; the lines of others may go."""
    asked = dialogue.turns[start : start + window]
    shown = (*dialogue.turns[max(0, start - CONTEXT) : start], *asked)
    return replace(
        dialogue,
        id=f"{dialogue.id}/{asked[0].number}",
        text=transcript(shown),
        names=tuple(map(head, asked)),
        inputs=inputs(asked, events),
        turns=asked,
        answer=None,
        notes=(),
    )


def inputs(asked: Sequence[Turn], events: Sequence[str]) -> dict[str, str]:
    """Return the fields of the prompt beside the text."""
    numbers = "、".join(str(turn.number) for turn in asked)
    return {"numbers": numbers, "events": "；".join(events) or "（无）"}


def head(turn: Turn) -> str:
    """Return the start of a sentence's line, which is unique."""
    return f"[{turn.number}] {turn.holder}："


def transcript(turns: Sequence[Turn]) -> str:
    """Return the sentences with their numbers and speakers, one per line."""
    return "".join(f"{head(turn)}{' '.join(turn.sentence.split())}\n" for turn in turns)


def _joined(turns: Sequence[Turn], replies: Sequence[Decoded]) -> list[dict[str, Any]]:
    """Return every holder's events, with the chains of all calls joined in order."""
    chains: dict[str, dict[str, list[Any]]] = {holder: {} for holder in speakers(turns)}
    for reply in replies:
        for holder in reply.answer["holders"] or ():
            for event in holder["events"]:
                chain = chains[holder["holder"]].setdefault(event["event"], [])
                chain += event["emotions"]
    return holders_of(chains)
