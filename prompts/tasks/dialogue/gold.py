"""The answers of a perfect model to each call of a dialogue: the training examples."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from panjue.prompts.example import Example, Turn
from panjue.prompts.plumbing.decode import load_json
from panjue.prompts.tasks.dialogue.sextuples import SEXTUPLE, holders_of, speakers, target
from panjue.prompts.tasks.dialogue.similarity import best_pairs, ngrams, table
from panjue.prompts.tasks.dialogue.solve import OTHER_EVENT
from panjue.prompts.tasks.metrics import Row


def gold_oracle(dialogue: Example) -> Callable[[Example], Example]:
    """Return a function that answers every question about a dialogue from its gold.

    Gold lists events by holder, without their sentences. So each sentence of a holder is assigned
    to the most similar event, and each emotion to the sentence most similar to its reason. An
    answer that the schema does not allow (a sentiment outside the five, unreadable emotions) is
    not changed, so that training refuses the question.
    """
    gold = dialogue.answer
    assert gold is not None, "a test dialogue has no gold"
    sentences = {sentence["id"]: sentence for sentence in gold["sentences"]}
    aligned = Aligned(sentences)
    for holder in gold["holders"] or ():
        numbers = [turn.number for turn in dialogue.turns if turn.holder == holder["holder"]]
        aligned.add(numbers, holder["events"])

    def event_of(turn: Turn) -> dict[str, Any]:
        event = aligned.event_of.get(turn.number, OTHER_EVENT)
        return {"id": turn.number, "target": sentences[turn.number]["target"], "event": event}

    def answer(question: Example) -> Example:
        result: dict[str, Any]
        match question.inputs.get("step"):
            case "window":
                result = {"sentences": [event_of(turn) for turn in question.turns]}
            case "sextuple":
                [turn] = question.turns
                result = {field: sentences[turn.number][field] for field in SEXTUPLE}
            case "emotions":
                chains = _chains(question, aligned.emotions)
                result = {"holders": None if gold["holders"] is None else chains}
            case _:  # real gold also lists holders who say nothing; the reply does not
                result = load_json(target(dialogue))
        return replace(question, answer=result)

    return answer


class Aligned:
    """The sentences of gold's events and emotions, by similarity."""

    def __init__(self, sentences: Mapping[int, Row]) -> None:
        self.event_of: dict[int, str] = {}
        self.emotions: dict[int, list[tuple[str, Row]]] = {}  # with the name of the event
        self._opinions = {
            number: "".join(sextuple[field] for field in (*SEXTUPLE[:3], "rationale"))
            for number, sextuple in sentences.items()
        }

    def add(self, numbers: Sequence[int], events: Sequence[Row]) -> None:
        """Assign a holder's sentences to their events; each gets one, if there are enough."""
        if not numbers or not events:
            return
        opinions = [self._opinions[number] for number in numbers]
        cosines = table(ngrams, opinions, [_event_text(event) for event in events])
        assigned = cosines.argmax(axis=1)
        for row, column in best_pairs(cosines):
            assigned[row] = column
        for column, event in enumerate(events):
            own = [number for number, to in zip(numbers, assigned, strict=True) if to == column]
            if own:
                self._add_event(event, own)

    def _add_event(self, event: Row, numbers: Sequence[int]) -> None:
        """Assign each emotion of an event to one of its sentences."""
        opinions = [self._opinions[number] for number in numbers]
        name: str = event["event"]
        self.event_of.update(dict.fromkeys(numbers, name))
        for emotion in event["emotions"]:
            cosines = table(ngrams, [emotion["reason"]], opinions)
            number = numbers[int(cosines.argmax())]
            self.emotions.setdefault(number, []).append((name, emotion))


def _event_text(event: Row) -> str:
    reasons = [emotion["reason"] for emotion in event["emotions"]]
    return "".join([event["event"], *reasons])


def _chains(
    question: Example, emotions: Mapping[int, Sequence[tuple[str, Row]]]
) -> list[dict[str, Any]]:
    """Return the emotion chains of the question's sentences, under the names of their events."""
    chains: dict[str, dict[str, list[Row]]] = {}
    for holder, known in speakers(question.turns).items():
        chains[holder] = {event: [] for event in known}
    for turn in question.turns:
        for event, emotion in emotions.get(turn.number, ()):
            chains[turn.holder].setdefault(turn.event or event, []).append(dict(emotion))
    return holders_of(chains)
