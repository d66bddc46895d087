"""The model's answer to each field beside the text classifier's, and how the two compare."""

from collections.abc import Iterator, Sequence

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
    gold: Row,
    items: Sequence[Item],
    decoded: Decoded | None,
) -> Iterator[list[tuple[Field, str]]]:
    """Yield each item's fields as the classifier answers them, and how the model's compare."""
    if advisor is None:
        return
    guesses = _guesses(task, decoded) if decoded else set()
    row = task.data.write(example, advisor.alone(example))
    own_items = items_of(task, gold, row)
    for (name, answers), (_, own) in zip(items, own_items, strict=True):
        compared = []
        for model, classifier in zip(answers, own, strict=True):
            is_guess = (name, classifier.name) in guesses
            how = NO_REPLY if is_guess else agreement(model, classifier)
            compared.append((classifier, how))
        yield compared


def _guesses(task: Task, decoded: Decoded) -> set[tuple[str, str]]:
    """Return item and field, as `items_of` names them, of each value that the reply lacks."""
    guesses = set()
    for number, item in enumerate(task.answer.items_of(decoded.answer)):
        for field_name in task.answer.fields:
            if decoded.is_guess(number, field_name):
                has_name = bool(task.answer.items)
                guesses.add((str(item["name"]), field_name) if has_name else ("", "class"))
    return guesses


def agreement(model: Field, classifier: Field) -> str:
    """Return which of `AGREEMENTS` two answers to one field have."""
    if set(model.predicted) == set(classifier.predicted):
        return "agree, right" if model.correct else "agree, wrong"
    if model.correct:
        return "differ, model right"
    return "differ, classifier right" if classifier.correct else "differ, both wrong"
