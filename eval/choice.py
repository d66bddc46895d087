"""Who answers better, field by field: the model or the text classifier, on held-out cases."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from panjue.eval.compare import TIE, paired_differences
from panjue.eval.metric_values import MetricValues, metric_values, or_ones
from panjue.finetune.classifier.calibration import FieldAnswer, calibration_of
from panjue.finetune.classifier.opinions import Advisor
from panjue.prompts.example import Decoded, Example, first_reply, is_same
from panjue.prompts.plumbing.files import write_json
from panjue.prompts.plumbing.progress import counted
from panjue.prompts.plumbing.run import CHOICE, Choice, FieldChoice
from panjue.prompts.plumbing.version import panjue_version
from panjue.prompts.task import Task
from panjue.prompts.tasks.metrics import Row
from panjue.serve.answers import open_answers

FEW = 30
"""Cases that count, below which a choice rests on luck."""


def choose(folder: Path) -> Choice:
    """Compare both on the decoded answers to held-out cases; write `choice.json` beside them.

    The point estimate of a field's own metric decides; if both are equal, the model answers.
    """
    answered = open_answers(folder)
    answered.refuse_changes()
    task = answered.task
    advisor = answered.advisor()
    assert advisor, "where there is no classifier, nothing is chosen"
    of_model = MetricValues(task)
    of_classifier = MetricValues(task)
    field_answers: list[tuple[FieldAnswer, bool]] = []
    replies = answered.rows()
    for example in counted(answered.examples(), len(replies)):
        reply = answered.row(replies, {"id": example.id})
        decoded = task.ask.decode(first_reply(reply), example, answered.labels)
        opinions = advisor.opinions(example, reply)
        alone = task.data.write(example, advisor.alone(example, opinions))
        gold = task.gold(example)
        for values, row in (
            (of_model, row_of_reply(task, example, decoded)),
            (of_classifier, alone),
        ):
            values.add(example, metric_values(task, gold, row, f"id {example.id}"))
        field_answers += model_judgments(advisor, example, decoded, opinions)
    compared = paired_differences(of_classifier, of_model)  # second less first
    fields = {}
    for name in task.answer.fields:
        metric = task.score.metric_of(name)
        difference = compared[metric]
        fields[name] = FieldChoice(
            answered_by="model" if difference.mean >= -TIE else "classifier",
            metric=metric,
            model=difference.second,
            classifier=difference.first,
            low=difference.low,
            high=difference.high,
        )
    choice = Choice(
        cases=len(of_model),
        counted=int(np.count_nonzero(or_ones(of_model.weights))),
        panjue=panjue_version(),
        fields=fields,
        calibration=calibration_of(field_answers),
    )
    write_json(folder / CHOICE, choice.model_dump(mode="json"))
    return choice


def row_of_reply(task: Task, example: Example, decoded: Decoded) -> Row | None:
    """Return the submission row of what a reply itself has; what it leaves out is empty.

    None if nothing could be read.
    """
    if not decoded.readable:
        return None
    row = task.data.write(example, decoded.answer)
    if not decoded.from_fallback:
        return row
    if not task.answer.items:  # its only field is left out
        return None
    items: list[dict[str, Any]] = [dict(item) for item in task.answer.items_of(row)]
    for number, name in decoded.from_fallback:
        items[number][name] = [] if name in task.answer.sets else None
    return {**row, task.answer.items: items}


def model_judgments(
    advisor: Advisor, example: Example, decoded: Decoded, opinions: Any
) -> Iterator[tuple[FieldAnswer, bool]]:
    """Yield what the model itself answers about an example, and whether that is right."""
    assert example.answer, "cases without gold are refused before"
    gold = advisor.task.answer.items_of(example.answer)
    answer = advisor.complete(decoded, opinions)
    for field_answer in advisor.judgments(decoded, answer, opinions):
        if field_answer.agreement:
            gold_value = gold[field_answer.item][field_answer.field]
            yield field_answer, is_same(gold_value, field_answer.value)


def choice_lines(choice: Choice) -> Iterator[str]:
    """Yield the comparison in words, a line for each field, and a warning about few cases."""
    counted = f"{choice.counted} of them count" if choice.counted < choice.cases else "all count"
    yield f"{choice.cases} held-out cases compare model and text classifier; {counted}"
    for name, of_field in choice.fields.items():
        difference = of_field.model - of_field.classifier
        yield (
            f"  {name}: {of_field.metric} model {of_field.model:.4f}, text classifier "
            f"{of_field.classifier:.4f} (difference {difference:+.4f}, 95% interval "
            f"{of_field.low:+.4f} to {of_field.high:+.4f}): {of_field.answered_by}"
        )
    if choice.counted < FEW:
        yield f"  under {FEW} cases count: who is better there may be luck"
