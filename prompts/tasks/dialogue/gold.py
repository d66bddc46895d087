"""The answers of a perfect model to each call of a dialogue: the training examples."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from panjue.prompts.example import Example
from panjue.prompts.plumbing.decode import load_json
from panjue.prompts.tasks.dialogue.sextuples import FIELDS, speakers, target
from panjue.prompts.tasks.dialogue.similarity import best_pairs, ngrams
from panjue.prompts.tasks.dialogue.solve import OTHER
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
    events, emotions = aligned(dialogue)

    def answer(question: Example) -> Example:
        result: dict[str, Any]
        match question.inputs.get("step"):
            case "window":
                targets = [(t.number, sentences[t.number]["target"]) for t in question.turns]
                rows = [{"id": n, "target": t, "event": events.get(n, OTHER)} for n, t in targets]
                result = {"sentences": rows}
            case "sextuple":
                result = {field: sentences[question.turns[0].number][field] for field in FIELDS}
            case "emotions":
                chains = _gold_chains(question, emotions)
                result = {"holders": None if gold["holders"] is None else chains}
            case _:  # real gold also lists holders who say nothing; the reply does not
                result = load_json(target(dialogue))
        return replace(question, answer=result)

    return answer


def aligned(dialogue: Example) -> tuple[dict[int, str], dict[int, list[tuple[str, Row]]]]:
    """Return sentence number -> its event, and sentence number -> its (event, emotion) pairs."""
    assert dialogue.answer is not None
    opinions = {
        sentence["id"]: "".join(sentence[f] for f in FIELDS[:3]) + sentence["rationale"]
        for sentence in dialogue.answer["sentences"]
    }
    events: dict[int, str] = {}
    emotions: dict[int, list[tuple[str, Row]]] = {}
    for holder in dialogue.answer["holders"] or ():
        numbers = [turn.number for turn in dialogue.turns if turn.holder == holder["holder"]]
        if not numbers or not holder["events"]:
            continue
        texts = [opinions[number] for number in numbers]
        event_texts = [
            event["event"] + "".join(emotion["reason"] for emotion in event["emotions"])
            for event in holder["events"]
        ]
        cosines = ngrams(texts, event_texts)
        assigned = cosines.argmax(axis=1)
        for row, column in best_pairs(cosines):  # every event gets a sentence, if there are enough
            assigned[row] = column
        for column, event in enumerate(holder["events"]):
            rows = [i for i in range(len(numbers)) if assigned[i] == column]
            events.update({numbers[i]: event["event"] for i in rows})
            for emotion in event["emotions"] if rows else ():
                nearest = ngrams([emotion["reason"]], [texts[i] for i in rows])[0].argmax()
                number = numbers[rows[int(nearest)]]
                emotions.setdefault(number, []).append((event["event"], emotion))
    return events, emotions


def _gold_chains(
    question: Example, emotions: Mapping[int, Sequence[tuple[str, Row]]]
) -> list[dict[str, Any]]:
    """Return the emotion chains of the question's sentences, under the names of their events."""
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
