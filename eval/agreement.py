"""The model's answer to each field beside the text classifier's, and how the two compare."""

from collections.abc import Iterator, Sequence

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
"""How the model's and the text classifier's answers to one field compare, and in Chinese."""

WITHOUT_GOLD = {"agree, right": ("agree", "一致"), "differ, model right": ("differ", "不一致")}
"""What these are called where the model's answer is taken for gold."""

NO_REPLY = "not in the reply"
"""The model has no answer to compare: the classifier's is handed in."""


def compared_opinions(
    task: Task,
    example: Example,
    items: Sequence[Item],
    classifier_items: Sequence[Item],
    decoded: Decoded | None,
) -> Iterator[list[tuple[Field, str]]]:
    """Yield each item's fields as the classifier answers them, and how the model's compare.

    `items` has the model's answer beside gold, `classifier_items` the classifier's. `decoded` says
    which fields the reply to `example`, as it was asked, lacks; None: not known, all are compared.
    """
    numbers = {name: number for number, name in enumerate(numbered(example.names))}
    names = numbered(name for name, _ in items)
    pairs = zip(names, items, classifier_items, strict=True)
    for name, (_, answers), (_, classifier_answers) in pairs:
        number = numbers.get(name) if task.answer.items else 0
        compared = []
        fields = zip(answers, classifier_answers, task.answer.fields, strict=True)
        for model, classifier, field_name in fields:
            how = agreement(model, classifier)
            if decoded and (number is None or decoded.is_fallback(number, field_name)):
                how = NO_REPLY
            compared.append((classifier, how))
        yield compared


def agreement(model: Field, classifier: Field) -> str:
    """Return which of `AGREEMENTS` two answers to one field have."""
    if set(model.predicted) == set(classifier.predicted):
        return "agree, right" if model.correct else "agree, wrong"
    if model.correct:
        return "differ, model right"
    return "differ, classifier right" if classifier.correct else "differ, both wrong"
