"""Check a file of cases: every bad row with its place, and counts of what the file has."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from panjue.prompts.example import Example
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.rows import format_hint
from panjue.prompts.reader import Reader, Skipped

MAX_SHOWN = 15
"""Labels or groups of one kind that are shown, the most frequent first: all penalty classes."""

MAX_EXAMPLES = 3
"""Names that are not in the text, and notes on gold answers, that are shown."""


@dataclass
class CasesCheck:
    """What is in a file of cases.

    Attributes:
        faults: `FILE:PLACE: fault`, one for each bad row.
        labelled: Cases with a gold answer.
        names: Names of the persons that the answers are about, over all cases.
        absent: `id: name` of the names that are not in the text. That is no fault.
        notes: `id: note` on gold answers.
        refused: `id: reason` of gold answers that training refuses.
        groups: Attribute -> group -> cases.
        labels: The labels of the gold answers.
    """

    faults: list[str] = field(default_factory=list)
    cases: int = 0
    labelled: int = 0
    names: int = 0
    absent: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    groups: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    labels: Labels = field(default_factory=Labels)

    def add(self, example: Example) -> None:
        """Count one case."""
        self.cases += 1
        self.labelled += example.answer is not None
        if not example.turns:  # of a dialogue, each sentence has a name
            self.names += len(example.names)
            unseen = (name for name in example.names if name not in example.text)
            self.absent += [f"{example.id}: {name}" for name in unseen]
        self.notes += [f"{example.id}: {note}" for note in example.notes]
        for attribute, group in example.groups.items():
            self.groups[attribute][group] += 1

    def lines(self) -> Iterator[str]:
        """Yield the faults, then one line for each kind of count."""
        yield from self.faults
        unlabelled = self.cases - self.labelled
        yield f"cases: {self.cases}, {self.labelled} with a gold answer, {unlabelled} without"
        if self.names:
            absent = f", {_some('not in the text (no fault)', self.absent)}" if self.absent else ""
            yield f"names: {self.names}{absent}"
        if self.notes:
            yield _some("notes on gold answers", self.notes)
        if self.refused:
            yield _some("gold answers that training refuses", self.refused)
        for attribute, groups in self.groups.items():
            yield f"cases by {attribute}: {_counts(groups)}"
        for kind, counts in self.labels.counts.items():
            different = f"{len(counts)} different, {sum(counts.values())} in all"
            yield f"{kind}: {different}; {_counts(counts)}"


def check_cases(reader: Reader, path: Path) -> CasesCheck:
    """Read a file of cases to its end, bad rows included; count what it has."""
    way_out = "; to check a submission, add --cases CASES"
    if (path / "manifest.json").exists():
        raise UserError(f"{path}: is a run folder{way_out}")
    result = CasesCheck()
    reader = replace(reader, on_bad_row="skip", skipped=Skipped())
    examples = _counted(reader.read(path), result)
    result.labels = reader.task.ask.labels(examples)
    for _ in examples:  # a task without labels does not read them
        pass
    bad = reader.skipped.rows
    if not result.cases and bad:
        [((_, place), reason), *_] = bad.items()
        hint = format_hint(path, reader.task.data.fields)
        raise UserError(f"{path}: no row is a case; the first, {place}: {reason}{hint}{way_out}")
    if not result.cases:
        raise UserError(f"{path}: has no cases")
    result.refused = list(_refused(reader, path, result.labels))
    result.faults = [f"{path}:{place}: {reason}" for (_, place), reason in bad.items()]
    return result


def _refused(reader: Reader, path: Path, labels: Labels) -> Iterator[str]:
    """Yield `id: reason` of the gold answers that no reply of the task can give."""
    ask = reader.task.ask
    for example in reader.read(path):
        for question in reader.task.answer.training_examples(example) if example.answer else ():
            if repairs := ask.decode(ask.target(question), question, labels).repairs:
                yield f"{question.id}: {repairs[0]}"


def _counted(examples: Iterable[Example], result: CasesCheck) -> Iterator[Example]:
    for example in examples:
        result.add(example)
        yield example


def _counts(counts: Mapping[str, int]) -> str:
    """Return the most frequent ones: `264: 60, 266: 55, 2 others`."""
    shown = [f"{name}: {n}" for name, n in Counter(counts).most_common(MAX_SHOWN)]
    return ", ".join(shown + [f"{len(counts) - MAX_SHOWN} others"] * (len(counts) > MAX_SHOWN))


def _some(what: str, items: list[str]) -> str:
    more = "; …" if len(items) > MAX_EXAMPLES else ""
    return f"{len(items)} {what}: id {'; id '.join(items[:MAX_EXAMPLES])}{more}"
