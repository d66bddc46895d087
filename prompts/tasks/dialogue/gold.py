"""What a perfect model would answer to each call of a dialogue: what a model is trained on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from panjue.prompts.example import Example
from panjue.prompts.tasks.dialogue.bucket import OTHER
from panjue.prompts.tasks.dialogue.sextuples import (
    FIELDS,
    speakers,
)
from panjue.prompts.tasks.dialogue.similarity import (
    best_pairs,
    ngrams,
)
from panjue.prompts.tasks.metrics import Row

# What a perfect model would answer.


def gold_oracle(dialogue: Example) -> Callable[[Example], Example]:
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
