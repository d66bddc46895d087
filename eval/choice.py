"""Decide who answers held-out cases best: one of several adapters, or model or classifier."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from panjue.eval.compare import TIE, paired_differences
from panjue.eval.metric_values import (
    MetricValues,
    metric_values,
    or_ones,
    summarize,
    without_nan,
)
from panjue.finetune.classifier.calibration import FieldAnswer, calibration_of
from panjue.finetune.classifier.opinions import Advisor, ModelLogprobs, Opinion, model_logprobs
from panjue.finetune.trained import made_from
from panjue.prompts.example import Decoded, Example, first_reply, is_same
from panjue.prompts.plumbing.intervals import NO_INTERVAL, interval_text
from panjue.prompts.plumbing.progress import counted
from panjue.prompts.plumbing.records import Best, Candidate, Choice, model_less_classifier
from panjue.prompts.plumbing.version import panjue_version
from panjue.prompts.reader import text_hash
from panjue.prompts.task import Task
from panjue.prompts.tasks.metrics import Row
from panjue.serve.answers import Answered

FEW = 30
"""With fewer cases that count, a choice depends on luck."""


def best_of(values: Mapping[str, MetricValues], metrics: Mapping[str, str]) -> Choice:
    """Return which candidate is best at each field, or at `WHOLE` cases, by the given metrics.

    The mean scores decide. Of candidates that differ by no more than `TIE`, the first is best.

    Args:
        values: Candidate -> the metric values of its answers to the same cases.
        metrics: Field, or `WHOLE` -> the metric that decides.
    """
    first, *others = values
    summaries = {name: summarize(of_candidate) for name, of_candidate in values.items()}
    compared = {name: paired_differences(values[first], values[name]) for name in others}
    best = {}
    for name, metric in metrics.items():
        means = {candidate: summary.mean[metric] for candidate, summary in summaries.items()}
        highest = max(means.values())
        winner = next(candidate for candidate, mean in means.items() if mean >= highest - TIE)
        less_first = {}  # candidate -> its score minus that of the first candidate, with interval
        for candidate, differences in compared.items():
            difference = differences[metric]
            with_ends = (difference.mean, difference.low, difference.high)
            less_first[candidate] = without_nan(with_ends)
        best[name] = Best(candidate=winner, metric=metric, less_first=less_first)
    candidates = {}
    for name, summary in summaries.items():
        interval = without_nan(summary.interval)
        candidates[name] = Candidate(metrics=summary.mean, interval=interval)
    weights = or_ones(values[first].weights)
    return Choice(
        candidates=candidates,
        best=best,
        panjue=panjue_version(),
        cases=len(weights),
        counted=int(np.count_nonzero(weights)),
    )


def best_by_field(answered: Answered) -> Choice:
    """Return who is better at each field on held-out cases, the model or the text classifier.

    `answered` has the model's replies to these cases. The choice records the model, the cases by
    their hashes, how the model was asked, and the calibration of confidences.
    """
    answered.answers.refuse_changes()
    task = answered.task
    advisor = answered.advisor
    assert advisor, "where there is no classifier, nothing is chosen"
    values = {"model": MetricValues(task), "classifier": MetricValues(task)}
    field_answers: list[tuple[FieldAnswer, bool]] = []
    text_hashes = []
    replies = answered.rows()
    for example in counted(answered.examples(), len(replies)):
        reply = answered.row(replies, {"id": example.id})
        decoded = task.ask.decode(first_reply(reply), example, answered.labels)
        opinions = advisor.opinions(example, reply)
        rows = {
            "model": row_of_reply(task, example, decoded),
            "classifier": task.data.write(example, advisor.alone(example, opinions)),
        }
        gold = task.gold(example)
        for name, row in rows.items():
            values[name].add(example, metric_values(task, gold, row, f"id {example.id}"))
        logprobs = model_logprobs(reply, decoded, task.answer)
        field_answers += model_judgments(advisor, example, decoded, opinions, logprobs)
        text_hashes.append(text_hash(example))
    metrics = {name: task.score.metric_of(name) for name in task.answer.fields}
    choice = best_of(values, metrics)
    choice = choice.of_model(answered.record.trained_sha256 or "")
    updates = {
        **made_from(answered.record),
        "calibration": calibration_of(field_answers),
        "texts": tuple(text_hashes),
    }
    return choice.model_copy(update=updates)


def row_of_reply(task: Task, example: Example, decoded: Decoded) -> Row | None:
    """Return the submission row of the model alone: fields that its reply lacks are empty.

    Return None if nothing could be read.
    """
    if not decoded.readable:
        return None
    row = task.data.write(example, decoded.answer)
    if not decoded.from_fallback:
        return row
    if not task.answer.items:  # the reply lacks its only field
        return None
    items: list[dict[str, Any]] = [dict(item) for item in task.answer.items_of(row)]
    for number, name in decoded.from_fallback:
        items[number][name] = [] if name in task.answer.sets else None
    return {**row, task.answer.items: items}


def model_judgments(
    advisor: Advisor,
    example: Example,
    decoded: Decoded,
    opinions: Sequence[Opinion],
    logprobs: ModelLogprobs,
) -> Iterator[tuple[FieldAnswer, bool]]:
    """Yield the model's answer to each field that its reply has, and whether the answer is right.

    Confidences are calibrated on these answers.
    """
    assert example.answer, "cases without gold are refused before"
    gold = advisor.task.answer.items_of(example.answer)
    answer = advisor.complete(decoded, opinions)
    for field_answer in advisor.judgments(decoded, answer, opinions, logprobs):
        # `agree` or `differ` if both answered; empty if the reply lacks the field, so that the
        # value is the classifier's.
        if field_answer.agreement:
            gold_value = gold[field_answer.item][field_answer.field]
            yield field_answer, is_same(gold_value, field_answer.value)


def choice_lines(choice: Choice) -> Iterator[str]:
    """Yield the comparison in words, one line for each field, and a warning if cases are few.

    A case does not count if its weight in the metric is 0.
    """
    counted = f"{choice.counted} of them count" if choice.counted < choice.cases else "all count"
    yield f"{choice.cases} held-out cases compare model and text classifier; {counted}"
    for name, best in choice.best.items():
        mean, low, high = model_less_classifier(best)
        difference = f"difference {mean:+.4f}"
        if (interval := interval_text((low, high), "+.4f", " to ")) != NO_INTERVAL:
            difference += f", 95% interval {interval}"
        yield (
            f"  {name}: {best.metric} model {choice.score(name, 'model'):.4f}, text classifier "
            f"{choice.score(name, 'classifier'):.4f} ({difference}): {best.candidate}"
        )
    if choice.counted < FEW:
        yield f"  under {FEW} cases count, so who is better may be luck"
