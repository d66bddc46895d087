"""Compare the model's answer to each field with the text classifier's answer."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

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
"""The same results -> other words if there is no gold; the submission is then taken for gold."""

NO_REPLY = "not in the reply"
"""The result if the model has no answer to compare, so that the classifier's is handed in."""


def compared_opinions(
    task: Task,
    example: Example,
    model_items: Sequence[Item],
    classifier_items: Sequence[Item],
    decoded: Decoded | None,
    by_field: Mapping[str, str],
) -> Iterator[list[tuple[Field, str]]]:
    """Yield each item with the other one's answers, and how model and classifier compare.

    The other one is the model if `by_field` says that the classifier answered, else the classifier.
    The items have an answer and gold. `decoded` says which fields the reply to `example` lacks;
    None means that this is unknown, and all fields are compared.
    """
    numbers = {name: number for number, name in enumerate(numbered(example.names))}
    names = numbered(name for name, _ in model_items)
    pairs = zip(names, model_items, classifier_items, strict=True)
    for name, (_, answers), (_, classifier_answers) in pairs:
        number = numbers.get(name) if task.answer.items else 0
        compared = []
        fields = zip(answers, classifier_answers, task.answer.fields, strict=True)
        for model, classifier, field_name in fields:
            how = agreement(model, classifier)
            of_model = model
            if decoded and (number is None or decoded.is_fallback(number, field_name)):
                how = NO_REPLY
                of_model = replace(model, predicted=(), correct=False)
            is_of_classifier = by_field.get(field_name) == "classifier"
            compared.append((of_model if is_of_classifier else classifier, how))
        yield compared


def without_gold(compared: Sequence[tuple[Field, str]]) -> list[tuple[Field, str]]:
    """Return compared fields for cases without gold: they agree, or they differ."""
    differ = "differ, model right"  # see `WITHOUT_GOLD`
    return [(field, differ if how.startswith("differ") else how) for field, how in compared]


def agreement(model: Field, classifier: Field) -> str:
    """Return the key of `AGREEMENTS` for two answers to one field."""
    if set(model.predicted) == set(classifier.predicted):
        return "agree, right" if model.correct else "agree, wrong"
    if model.correct:
        return "differ, model right"
    return "differ, classifier right" if classifier.correct else "differ, both wrong"
