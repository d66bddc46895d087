"""The text classifier's opinion on a case. Prompts show it, and it answers what a reply lacks.

After PLJP (Wu et al., "Precedent-Enhanced Legal Judgment Prediction with LLM and Domain-Model
Collaboration", EMNLP 2023): a small domain model proposes candidates, and the language model
decides.
"""

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any, NamedTuple

from panjue.finetune.classifier.calibration import Calibration, FieldAnswer, confidence_in
from panjue.finetune.classifier.classifier import Classifier
from panjue.finetune.classifier.label_sets import (
    Probabilities,
    best_sets,
    highest_first,
    set_chances,
)
from panjue.prompts.example import Answer, Decoded, Example, LabelFields, first_reply, is_same
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.decode import load_json
from panjue.prompts.plumbing.records import Choice, weighs_model
from panjue.prompts.task import Task

SHOWN_FROM = 0.08
"""Least probability of a label that a prompt shows, unless the classifier answers it."""

MAX_LABELS = 4
MAX_CLASSES = 3
"""Most labels of a set that a prompt shows, unless the classifier answers more; and classes."""


@dataclass(frozen=True)
class Opinion:
    """The classifier's opinion on one item of an answer."""

    probabilities: Mapping[str, Probabilities]
    """Field -> label -> probability. They sum to 1 for a class, not for a label set."""
    answer: Mapping[str, Any]  # field -> the classifier's own answer: labels, or one class


class FinalAnswer(NamedTuple):
    """The answer of a reply. Without a text classifier, opinions and confidence are empty."""

    decoded: Decoded  # the reply after repair
    answer: Answer  # complete: the classifier answers what the reply lacks
    opinions: Sequence[Opinion] = ()
    confidence: Sequence[Mapping[str, float]] = ()  # see `Advisor.confidence`


ModelLogprobs = Mapping[tuple[int, str], float]
"""Number of an item and field -> the model's log-probability of its value in the reply."""

EMPTY_REPLY: Mapping[str, Any] = {"texts": [""]}
"""A row without a reply, so that the fallback answers everything."""


@dataclass(frozen=True)
class Advisor:
    """The classifier of a training, and the settings by which it gives opinions and answers."""

    task: Task
    labels: Labels
    classifier: Classifier
    known: Mapping[str, str] = field(default_factory=dict)
    """`case_key` -> opinions on the cases that the classifier was fitted on, as prompts show them.
    They come from classifiers that were fitted without the case."""
    in_prompts: bool = True  # whether prompts show the opinions
    answers: Collection[str] = ()  # fields that the classifier answers, whatever the reply says
    calibration: Calibration = field(default_factory=dict)
    """Corrects the classifier's probability of what the model answers; may be empty."""

    @property
    def needs_logprobs(self) -> bool:
        """Say whether the model's log-probabilities count in the confidence in any of its answers.

        The model answers the fields that are not in `self.answers`.
        """
        by_model = self.calibration.keys() - set(self.answers)
        return weighs_model(self.calibration[name] for name in by_model)

    def opinions(self, example: Example, row: Mapping[str, Any] = EMPTY_REPLY) -> list[Opinion]:
        """Return the opinion on every item of the answer.

        `row` is the example's row of completions. It may contain the opinions that its prompt
        showed; otherwise the classifier is asked now.
        """
        if "opinions" in row:
            return [Opinion(**of_item) for of_item in row["opinions"]]
        return self.with_answers(self.classifier.probabilities(example))

    def opinions_on(self, examples: Sequence[Example]) -> list[list[Opinion]]:
        """Return the opinions on the items of each example: probabilities and own answers.

        For some hundred examples at once, this is far faster than `opinions` of one by one.
        """
        predictions = self.classifier.predict(examples)
        opinions = iter(self.with_answers(list(chain.from_iterable(predictions))))
        return [list(islice(opinions, len(items))) for items in predictions]

    def opinions_of(
        self, examples: Sequence[Example], rows: Sequence[Mapping[str, Any]]
    ) -> list[list[Opinion]]:
        """Return `opinions` of each example and its row; the classifier is asked once."""
        unknown = [one for one, row in zip(examples, rows, strict=True) if "opinions" not in row]
        predicted = iter(self.opinions_on(unknown))
        found = []
        for example, row in zip(examples, rows, strict=True):
            is_kept = "opinions" in row
            found.append(self.opinions(example, row) if is_kept else next(predicted))
        return found

    def with_answers(self, items: Sequence[Mapping[str, Probabilities]]) -> list[Opinion]:
        """Return opinions made of the items' probabilities, each with the classifier's answer.

        The answer is the set with the highest expected F1, or the likeliest class.
        """
        label_fields = self.task.answer
        answers: list[dict[str, Any]] = [{} for _ in items]
        for name in label_fields.fields:
            of_items = [item[name] for item in items]
            for answer, value in zip(answers, self._values(name, of_items), strict=True):
                answer[name] = value
        return [Opinion(item, answer) for item, answer in zip(items, answers, strict=True)]

    def _values(self, name: str, items: Sequence[Probabilities]) -> Sequence[Any]:
        """Return the classifier's answers to a field: one class or label set for each item."""
        label_fields = self.task.answer
        if name in label_fields.classes:
            # The likeliest class. An item is both: its keys are the labels to order by its values.
            return [highest_first(item, item)[0] for item in items]
        size_weights = self.classifier.fields[name].sizes
        max_size = self.labels.most[label_fields.kind(name)]  # the largest set in training
        return best_sets(size_weights, items, max_size)

    def show(self, example: Example, opinions: Sequence[Opinion] | None = None) -> Example:
        """Return the example with the opinions in its prompt, if prompts show them.

        Cases in `self.known` are training cases. Their opinions there come from classifiers that
        were fitted without them.
        """
        if not self.in_prompts:
            return example
        text = self.known.get(case_key(example))
        if text is None:
            text = opinion_text(example, opinions or self.opinions(example), self.task.answer)
        return replace(example, inputs={**example.inputs, "opinions": text})

    def alone(self, example: Example, opinions: Sequence[Opinion]) -> Answer:
        """Return the classifier's own answer."""
        nothing = self.task.ask.decode("", example, self.labels)
        return self.complete(nothing, opinions)

    def complete(self, decoded: Decoded, opinions: Sequence[Opinion]) -> Answer:
        """Return the complete answer of a reply: the classifier answers what the reply lacks."""
        label_fields = self.task.answer
        items = [dict(item) for item in label_fields.items_of(decoded.answer)]
        for number, opinion in enumerate(opinions):
            for name, value in opinion.answer.items():
                if decoded.is_fallback(number, name):
                    items[number][name] = value
        return label_fields.with_items(decoded.answer, items)

    def judgments(
        self,
        decoded: Decoded,
        answer: Answer,
        opinions: Sequence[Opinion],
        logprobs: ModelLogprobs,
    ) -> Iterator[FieldAnswer]:
        """Yield each field of each item of a complete answer, with its probabilities."""
        for number, item in enumerate(self.task.answer.items_of(answer)):
            opinion = opinions[number]
            for name, probabilities in opinion.probabilities.items():
                value = item[name]
                agreement = "agree" if is_same(value, opinion.answer[name]) else "differ"
                logprob = logprobs.get((number, name))
                if decoded.is_fallback(number, name):
                    agreement = ""
                    logprob = None
                chance = self._chance_of(value, name, probabilities)
                yield FieldAnswer(number, name, value, agreement, chance, logprob)

    def confidence(
        self,
        decoded: Decoded,
        answer: Answer,
        opinions: Sequence[Opinion],
        logprobs: ModelLogprobs,
    ) -> list[dict[str, float]]:
        """Return for each item: field -> the probability that exactly its value is right."""
        confidence: list[dict[str, float]] = [{} for _ in opinions]
        for field_answer in self.judgments(decoded, answer, opinions, logprobs):
            confidence[field_answer.item][field_answer.field] = confidence_in(
                self.calibration, field_answer
            )
        return confidence

    def _chance_of(self, value: Any, name: str, probabilities: Probabilities) -> float:
        """Return the probability that exactly this value of field `name` is right."""
        if name in self.task.answer.classes:
            return probabilities.get(value, 0.0)
        # The chance that a set has exactly these labels depends on how likely each size is.
        sizes = self.classifier.fields[name].sizes
        [chance] = set_chances(sizes, probabilities, [frozenset(value)])
        return chance


def by_choice(advisor: Advisor, choice: Choice) -> Advisor:
    """Return an advisor that answers the fields that a choice gives it, with its calibration."""
    own = [name for name, who in choice.answered_by.items() if who == "classifier"]
    return replace(advisor, answers=own, calibration=choice.calibration)


def read_answer(
    task: Task,
    labels: Labels,
    advisor: Advisor | None,
    example: Example,
    row: Mapping[str, Any],
    opinions: Sequence[Opinion] | None = None,
) -> FinalAnswer:
    """Return the answer of the row of an example that takes one call.

    Opinions are taken from the argument, or else from the row; without both the classifier is
    asked.
    """
    decoded = task.ask.decode(first_reply(row), example, labels)
    if advisor is None:
        return FinalAnswer(decoded, decoded.answer)
    if opinions is None:
        opinions = advisor.opinions(example, row)
    # What the classifier answers in any case counts as missing in the reply.
    of_model = decoded.without(advisor.answers, len(opinions))
    answer = advisor.complete(of_model, opinions)
    logprobs = model_logprobs(row, decoded, task.answer)
    confidence = advisor.confidence(of_model, answer, opinions, logprobs)
    return FinalAnswer(decoded, answer, opinions, confidence)


def model_logprobs(
    row: Mapping[str, Any], decoded: Decoded, label_fields: LabelFields
) -> ModelLogprobs:
    """Return the model's log-probabilities of the values in the reply of a row.

    `row["logprobs"]` has for each item as written: field -> a number for each of its labels. Values
    are absent that have no number, that repair has changed, or whose person stands elsewhere in the
    list.
    """
    if not (row.get("logprobs") and decoded.readable):
        return {}
    reply = load_json(first_reply(row))
    if not isinstance(reply, dict):
        return {}
    written = reply.get(label_fields.items) if label_fields.items else [reply]
    if not isinstance(written, list):
        return {}
    logprobs = {}
    answered = label_fields.items_of(decoded.answer)
    items = zip(row["logprobs"], written, answered, strict=False)  # a reply may lack items
    for number, (of_item, item, answer) in enumerate(items):
        if not isinstance(item, dict) or item.get("name") != answer.get("name"):
            continue  # of another person
        for name, of_labels in of_item.items():
            if are_labels(item[name]) and is_same(answer[name], item[name]):  # not repaired
                logprobs[number, name] = sum(of_labels)
    return logprobs


def are_labels(value: Any) -> bool:
    """Say whether a value is one text or a list of texts."""
    labels = value if isinstance(value, list) else [value]
    return all(isinstance(label, str) for label in labels)


def case_key(example: Example) -> str:
    """Return a key made of a case's text and names, since two files may use the same id."""
    text = "\n".join((*example.names, example.text))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def opinion_text(example: Example, opinions: Sequence[Opinion], label_fields: LabelFields) -> str:
    """Return the opinions for a prompt, one line for each item: its name, if any, and its fields.

    In each field, the labels that the classifier answers come first, or a dash if it answers none.
    So the model can agree by copying. The other labels follow after a bar.
    """
    lines = ["; ".join(_field_texts(opinion)) for opinion in opinions]
    if label_fields.items:
        lines = [f"{name}: {line}" for name, line in zip(example.names, lines, strict=True)]
    return "\n".join(lines)


def _field_texts(opinion: Opinion) -> Iterator[str]:
    """Yield the opinion on each field of an item, such as `盗窃罪 90% | 诈骗罪 30%`.

    The classifier's answer comes before the bar, and other likely labels after it, up to
    `MAX_LABELS` in all for a set and `MAX_CLASSES` for a class.
    """
    for name, probabilities in opinion.probabilities.items():
        answered = opinion.answer[name]
        most = MAX_LABELS
        if isinstance(answered, str):  # a class
            answered = [answered]
            most = MAX_CLASSES
        likely = [label for label, p in probabilities.items() if p >= SHOWN_FROM]
        others = highest_first(set(likely).difference(answered), probabilities)
        room = max(0, most - len(answered))
        text = _with_percent(answered, probabilities) or "-"
        if others[:room]:
            text += f" | {_with_percent(others[:room], probabilities)}"
        yield text


def _with_percent(labels: Sequence[str], probabilities: Probabilities) -> str:
    """Return labels with their probabilities: `盗窃罪 90%, 诈骗罪 30%`."""
    return ", ".join(f"{label} {probabilities[label]:.0%}" for label in labels)
