"""The model's answer to each field beside the text classifier's, and how the two compare."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from panjue.eval.opinions import Advisor
from panjue.eval.shown import items_of
from panjue.prompts.example import Decoded, Example
from panjue.prompts.task import Task
from panjue.prompts.tasks.metrics import Field, Item, Row

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
    advisor: Advisor | None,
    reply: Mapping[str, Any],
    gold: Row,
    items: Sequence[Item],
    decoded: Decoded | None,
) -> Iterator[list[tuple[Field, str]]]:
    """Yield each item's fields as the classifier answers them, and how the model's compare.

    `reply` is the example's row of `completions.jsonl`, `decoded` what it says.
    """
    if advisor is None:
        return
    row = task.data.write(example, advisor.alone(example, reply))
    own_items = items_of(task, gold, row)
    for (name, answers), (_, own) in zip(items, own_items, strict=True):
        number = example.names.index(name) if task.answer.items else 0
        compared = []
        for model, classifier, field_name in zip(answers, own, task.answer.fields, strict=True):
            is_guess = decoded is not None and decoded.is_guess(number, field_name)
            compared.append((classifier, NO_REPLY if is_guess else agreement(model, classifier)))
        yield compared


def agreement(model: Field, classifier: Field) -> str:
    """Return which of `AGREEMENTS` two answers to one field have."""
    if set(model.predicted) == set(classifier.predicted):
        return "agree, right" if model.correct else "agree, wrong"
    if model.correct:
        return "differ, model right"
    return "differ, classifier right" if classifier.correct else "differ, both wrong"
