"""Who answers: the model or the text classifier, whichever is better on held-out cases."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from panjue.eval.answers import open_answers
from panjue.eval.compare import TIE, paired_differences
from panjue.eval.values import MetricValues, metric_values, score_rows
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_json, write_json
from panjue.prompts.plumbing.run import ANSWERS, AnsweredBy, AnswersRecord

CHOICE = "choice.json"
"""File in RUN/answers with the scores of both on the held-out cases."""


@dataclass(frozen=True)
class Choice:
    """The scores of the model's replies and of the text classifier on the same held-out cases.

    Attributes:
        made_of: What shaped the replies, from `shape_of`.
        metric: The task's headline metric.
        difference: The model's score less the classifier's.
        low, high: Its 95% interval, from a paired bootstrap over cases.
    """

    made_of: dict[str, Any]
    metric: str
    cases: int
    model: float
    classifier: float
    difference: float
    low: float
    high: float

    @property
    def answered_by(self) -> AnsweredBy:
        """Return who is better; the model if both are equal."""
        return "model" if self.difference >= -TIE else "classifier"

    def __str__(self) -> str:
        """Return both scores in one line."""
        return (
            f"{self.metric} on {self.cases} held-out cases: model {self.model:.4f}, text "
            f"classifier {self.classifier:.4f} (difference {self.difference:+.4f}, 95% interval "
            f"{self.low:+.4f} to {self.high:+.4f})"
        )


def shape_of(record: AnswersRecord) -> dict[str, Any]:
    """Return what shaped replies, apart from the cases."""
    return record.model_dump(
        mode="json", include={"trained_sha256", "adapter", "sampling", "constrained"}
    )


def choose(folder: Path) -> Choice:
    """Compare both on the answers to the held-out cases in `folder`, and record the result.

    The folder has a submission of the model's replies.
    """
    answered = open_answers(folder)
    task = answered.task
    advisor = answered.advisor()
    assert advisor, "where there is no classifier, nothing is chosen"
    submission = task.data.submission.index(task.data.submission.find(folder))
    of_model, of_classifier = MetricValues(task), MetricValues(task)
    for example, gold, _ in score_rows(answered.reader, answered.test, submission, of_model):
        row = task.data.write(example, advisor.alone(example))
        of_classifier.add(example, metric_values(task, gold, row, f"id {example.id}"))
    metric = task.score.names[-1]
    scores = paired_differences(of_classifier, of_model)[metric]
    choice = Choice(
        made_of=shape_of(answered.record),
        metric=metric,
        cases=len(of_model),
        model=scores.second,
        classifier=scores.first,
        difference=scores.mean,
        low=scores.low,
        high=scores.high,
    )
    write_json(folder.parent / CHOICE, asdict(choice))
    return choice


def read_choice(run: Path, made_of: dict[str, Any]) -> Choice | None:
    """Return the recorded choice of a run for replies of this shape, if there is one."""
    path = run / ANSWERS / CHOICE
    if not path.exists():
        return None
    try:
        choice = TypeAdapter(Choice).validate_python(read_json(path))
    except ValidationError:
        raise UserError(f"{path}: is of another version; delete it") from None
    return choice if choice.made_of == made_of else None
