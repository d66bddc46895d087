"""Who answers: the model or the text classifier, whichever is better on held-out cases."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from panjue.eval.compare import TIE, paired_differences
from panjue.eval.values import MetricValues, metric_values
from panjue.finetune.classifier.calibration import Judgment, Scaling, scaling_of
from panjue.finetune.classifier.opinions import Advisor, Answered, read_answer
from panjue.prompts.example import Example, is_same
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_json, write_json
from panjue.prompts.plumbing.progress import counted
from panjue.prompts.plumbing.run import AnsweredBy
from panjue.serve.answers import open_answers

CHOICE = "choice.json"
"""File beside the answers to the held-out cases, with the scores of both."""


@dataclass(frozen=True)
class Choice:
    """The scores of the model's replies and of the text classifier on the same held-out cases."""

    metric: str  # the task's headline metric
    cases: int
    model: float
    classifier: float
    difference: float  # the model's score less the classifier's
    low: float  # the ends of its 95% interval, from a paired bootstrap over cases
    high: float
    scaling: Scaling = field(default_factory=dict)  # of the confidences in the model's answers

    @property
    def answered_by(self) -> AnsweredBy:
        """Return who is better; the model if both are equal."""
        return "model" if self.difference >= -TIE else "classifier"

    def __str__(self) -> str:
        interval = ""
        if self.cases > 1:
            interval = f", 95% interval {self.low:+.4f} to {self.high:+.4f}"
        return (
            f"{self.metric} on {self.cases} held-out cases: model {self.model:.4f}, text "
            f"classifier {self.classifier:.4f} (difference {self.difference:+.4f}{interval})"
        )


def choose(folder: Path, into: Path) -> Choice:
    """Compare model and text classifier on the held-out cases of `folder`; write into `into`."""
    answered = open_answers(folder)
    task = answered.task
    advisor = answered.advisor()
    assert advisor, "where there is no classifier, nothing is chosen"
    judgments: list[tuple[Judgment, bool]] = []
    replies = answered.rows()
    of_model = MetricValues(task)
    of_classifier = MetricValues(task)
    for example in counted(answered.examples(), len(replies)):
        gold = task.gold(example)
        reply = answered.row(replies, {"id": example.id})
        read = read_answer(task, answered.labels, advisor, example, reply)
        alone = advisor.alone(example, read.opinions)
        for values, answer in ((of_model, read.answer), (of_classifier, alone)):
            row = task.data.write(example, answer)
            values.add(example, metric_values(task, gold, row, f"id {example.id}"))
        judgments += model_judgments(advisor, example, read)
    metric = task.score.headline
    compared = paired_differences(of_classifier, of_model)[metric]  # second less first
    choice = Choice(
        metric=metric,
        cases=len(of_model),
        model=compared.second,
        classifier=compared.first,
        difference=compared.mean,
        low=compared.low,
        high=compared.high,
        scaling=scaling_of(judgments),
    )
    into.mkdir(exist_ok=True)
    write_json(into / CHOICE, asdict(choice))
    return choice


def model_judgments(
    advisor: Advisor, example: Example, read: Answered
) -> Iterator[tuple[Judgment, bool]]:
    """Yield what the model itself answers about an example, and whether that is right."""
    assert example.answer, "cases without gold are refused before"
    gold = advisor.task.answer.items_of(example.answer)
    for judgment in advisor.judgments(read.decoded, read.answer, read.opinions):
        if judgment.agreement:
            gold_value = gold[judgment.item][judgment.field]
            yield judgment, is_same(gold_value, judgment.value)


def read_choice(folder: Path) -> Choice | None:
    """Return the choice that was made on the held-out cases of a folder, if there is one."""
    path = folder / CHOICE
    if not path.exists():
        return None
    try:
        return TypeAdapter(Choice).validate_python(read_json(path))
    except ValidationError:
        raise UserError(f"{path}: is of another version; delete it") from None
