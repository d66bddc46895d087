"""The numbers of single examples, from which a score is made."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from panjue.eval.baselines import Baselines
from panjue.eval.calibration import Certainty, Judged
from panjue.eval.means import gold_row, metric_values
from panjue.prompts.example import Example
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.rows import Rows
from panjue.prompts.reader import Reader, Share
from panjue.prompts.tasks.metrics import Numbers


class Scored(NamedTuple):
    """The numbers of one example."""

    id: str
    groups: Mapping[str, str]
    weight: float
    values: Numbers
    baselines: dict[str, Numbers]
    judged: Judged | None
    missing: bool
    faulty: bool
    notes: list[str]


class Part(NamedTuple):
    """The numbers of one block."""

    examples: list[Scored]
    unknown_labels: int


@dataclass(frozen=True)
class Scoring:
    """What an example is scored with."""

    reader: Reader
    gold: Path
    submission: Path
    rows: Rows
    labels: Labels | None
    baselines: Baselines
    certainty: Certainty | None

    def parts(self, share: Share) -> Iterator[Part]:
        """Score the blocks of a share of the gold file."""
        for examples in self.reader.blocks(self.gold, share):
            scored = [self._scored(example) for example in examples]
            yield Part(scored, self._unknown_labels(examples))

    def _scored(self, example: Example) -> Scored:
        task, row = self.reader.task, self.rows.get(example.id)
        gold = gold_row(task, self.gold, example)
        return Scored(
            str(example.id),
            example.groups,
            task.score.weight(example),
            metric_values(task, gold, row, f"{self.submission}: id {example.id}"),
            self.baselines.values(example),
            self.certainty.judge(example, gold, row) if self.certainty else None,
            missing=row is None,
            faulty=row is not None and any(task.data.check(example, row, None)),
            notes=[f"{example.id}: {note}" for note in example.notes],
        )

    def _unknown_labels(self, examples: list[Example]) -> int:
        """Count the gold labels that training never saw; they are scored as missed."""
        if not self.labels or not self.reader.task.answer.fields:
            return 0
        known = self.labels.counts
        return sum(
            n
            for field, counts in self.reader.task.ask.labels(examples).counts.items()
            for label, n in counts.items()
            if label not in known.get(field, ())
        )
