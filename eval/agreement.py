"""Compare the model's answer to each field with the text classifier's answer.

For each field, the same one of the two is handed in for all cases, unless the model gave no answer.
The result says whether the two answers are the same, and who is right: `agree, right`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from panjue.prompts.example import Decoded, Example
from panjue.prompts.task import Task
from panjue.prompts.tasks.metrics import Field, Item, numbered

AGREEMENTS = {
    "agree, right": "一致，都对",
    "agree, wrong": "一致，都错",
    "differ, model right": "不一致，模型对",
    "differ, classifier right": "不一致，分类器对",
    "differ, both wrong": "不一致，都错",
}
"""Results of comparing the two answers to a field -> the same in Chinese."""

WITHOUT_GOLD = {"agree, right": ("agree", "一致"), "differ, model right": ("differ", "不一致")}
"""The two results that are left without gold -> how a page shows them in English and Chinese."""

NO_REPLY = "not in the reply"
"""The result if the model has no answer to compare, so that the classifier's is handed in."""


def used_replies(decoding: Mapping[str, Any]) -> bool:
    """Say whether replies of the model went into a submission with this `decode.json`.

    If it counts no calls, the text classifier answered everything, or the submission is a vote of
    several runs. If `decoding` is empty, nothing is known of that, and replies are assumed.
    """
    return not decoding or bool(decoding.get("calls"))


def compared_opinions(
    task: Task,
    example: Example,
    model_items: Sequence[Item],
    classifier_items: Sequence[Item],
    decoded: Decoded | None,
    by_field: Mapping[str, str],
) -> Iterator[list[tuple[Field, str]]]:
    """Yield for each item, field by field: the answer that was not handed in, and the result.

    `by_field` says whose answer to a field was handed in, by default the model's. The result is a
    key of `AGREEMENTS`, or `NO_REPLY` if the reply `decoded` to `example` lacks the field: then
    the model has no answer to compare. If `decoded` is None, all fields are compared.
    """
    positions = {person: position for position, person in enumerate(numbered(example.names))}
    persons = numbered(name for name, _ in model_items)
    by_person = zip(persons, model_items, classifier_items, strict=True)
    for person, (_, of_model), (_, of_classifier) in by_person:
        # Only gold may have this person. Then the model was not asked, and the position is None.
        position = positions.get(person) if task.answer.items else 0
        compared = []
        fields = zip(task.answer.fields, of_model, of_classifier, strict=True)
        for name, model, classifier in fields:
            if decoded and (position is None or decoded.is_fallback(position, name)):
                result = NO_REPLY
                model_answer = replace(model, predicted=(), correct=False)
            else:
                result = agreement(model, classifier)
                model_answer = model
            is_by_classifier = by_field.get(name) == "classifier"
            compared.append((model_answer if is_by_classifier else classifier, result))
        yield compared


def without_gold(compared: Sequence[tuple[Field, str]]) -> list[tuple[Field, str]]:
    """Return compared fields of a case without gold, where nobody knows who is right.

    The answer that was handed in counts as gold, so answers that agree are `agree, right` already.
    Answers that differ all get the same result, whichever was handed in; `NO_REPLY` stays.
    """
    differ = "differ, model right"  # pages show it as `differ` alone, see `WITHOUT_GOLD`
    return [(field, differ if how.startswith("differ") else how) for field, how in compared]


def agreement(model: Field, classifier: Field) -> str:
    """Return the key of `AGREEMENTS` for two answers to one field."""
    if set(model.predicted) == set(classifier.predicted):
        return "agree, right" if model.correct else "agree, wrong"
    if model.correct:
        return "differ, model right"
    return "differ, classifier right" if classifier.correct else "differ, both wrong"
