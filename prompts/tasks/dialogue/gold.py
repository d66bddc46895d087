"""The training examples of a dialogue: the answers of a perfect model to each call."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from panjue.prompts.example import Example
from panjue.prompts.tasks.dialogue.sextuples import SEXTUPLE, Chain, holders_of
from panjue.prompts.tasks.dialogue.similarity import cosine
from panjue.prompts.tasks.metrics import Row


def gold_oracle(dialogue: Example) -> Callable[[Example], Example]:
    """Return a function that answers every question about a dialogue from its gold.

    Gold lists events by holder, without their sentences. So each emotion is assigned to the
    holder's sentence that is most similar to its reason. An answer that the schema forbids (a
    sentiment outside the five, unreadable emotions) is not changed, so that training refuses the
    question. A reply does not contain holders who say nothing.
    """
    gold = dialogue.answer
    assert gold is not None, "a test dialogue has no gold"
    sentences = {sentence["id"]: sentence for sentence in gold["sentences"]}
    # Number of a sentence -> the chains assigned to it.
    chains: dict[int, list[Chain]] = {number: [] for number in sentences}
    for holder in gold["holders"] or ():
        name = holder["holder"]
        own = [sentences[turn.number] for turn in dialogue.turns if turn.holder == name]
        for event in holder["events"] if own else ():
            for emotion in event["emotions"]:
                number = _nearest(own, emotion["reason"])["id"]
                chains[number].append(Chain(name, event["event"], [emotion]))

    def answer(question: Example) -> Example:
        asked = []
        felt: list[Chain] = []
        for turn in question.turns:
            asked.append(sentences[turn.number])
            felt += chains[turn.number]
        holders = None if gold["holders"] is None else holders_of(question.turns, felt)
        return replace(question, answer={"sentences": asked, "holders": holders})

    return answer


def _nearest(sentences: Sequence[Row], reason: str) -> Row:
    """Return the sentence whose sextuple is most similar to the reason; the first of equal ones."""

    def likeness(sentence: Row) -> float:
        opinion = "".join(sentence[field] for field in SEXTUPLE if field != "sentiment")
        return cosine(reason, opinion)

    return max(sentences, key=likeness)
