"""The answers of a perfect model to each call of a dialogue: the training examples."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from panjue.prompts.example import Example
from panjue.prompts.tasks.dialogue.sextuples import SEXTUPLE, holders_of, speakers
from panjue.prompts.tasks.dialogue.similarity import table
from panjue.prompts.tasks.metrics import Row


def gold_oracle(dialogue: Example) -> Callable[[Example], Example]:
    """Return a function that answers every question about a dialogue from its gold.

    Gold lists events by holder, without their sentences. So each emotion is assigned to the
    holder's sentence that is most similar to its reason. An answer that the schema does not allow
    (a sentiment outside the five, unreadable emotions) is not changed, so that training refuses the
    question. Holders who say nothing are not in a reply.
    """
    gold = dialogue.answer
    assert gold is not None, "a test dialogue has no gold"
    sentences = {sentence["id"]: sentence for sentence in gold["sentences"]}
    emotions: dict[int, list[tuple[str, Row]]] = {}
    for holder in gold["holders"] or ():
        numbers = [turn.number for turn in dialogue.turns if turn.holder == holder["holder"]]
        for event in holder["events"] if numbers else ():
            _assign(event, [sentences[number] for number in numbers], emotions)

    def answer(question: Example) -> Example:
        own = [sentences[turn.number] for turn in question.turns]
        holders = None if gold["holders"] is None else _chains(question, emotions)
        return replace(question, answer={"sentences": own, "holders": holders})

    return answer


def _assign(
    event: Row, sentences: Sequence[Row], emotions: dict[int, list[tuple[str, Row]]]
) -> None:
    """Add each emotion of an event to those of its sentence, with the name of the event."""
    opinions = [
        "".join(one[field] for field in SEXTUPLE if field != "sentiment") for one in sentences
    ]
    for emotion in event["emotions"]:
        nearest = int(table([emotion["reason"]], opinions).argmax())
        number = sentences[nearest]["id"]
        emotions.setdefault(number, []).append((event["event"], emotion))


def _chains(
    question: Example, emotions: Mapping[int, Sequence[tuple[str, Row]]]
) -> list[dict[str, Any]]:
    chains: dict[str, dict[str, list[Row]]] = {holder: {} for holder in speakers(question.turns)}
    for turn in question.turns:
        for event, emotion in emotions.get(turn.number, ()):
            chains[turn.holder].setdefault(event, []).append(emotion)
    return holders_of(chains)
