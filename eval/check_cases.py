"""Check a file of cases: every bad row with its place, and counts of what the file has."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from panjue.prompts.example import Example
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.rows import format_hint
from panjue.prompts.reader import Reader, Skipped
from panjue.prompts.task import Task

MAX_SHOWN = 15
"""Labels or groups of one kind that are shown, the most frequent first: all penalty classes."""


def check_cases(reader: Reader, path: Path) -> tuple[list[str], list[str]]:
    """Return the bad rows, as `FILE:PLACE: fault`, and a line for each kind of count."""
    way_out = "; to check a submission, add --cases CASES"
    if (path / "manifest.json").exists():
        raise UserError(f"{path}: is a run folder{way_out}")
    reader = replace(reader, on_bad_row="skip", skipped=Skipped())
    labels = reader.task.ask.labels(reader.read(path))
    cases, labelled, refused = 0, 0, list[str]()
    groups: dict[str, Counter[str]] = defaultdict(Counter)
    for example in reader.read(path):
        cases += 1
        labelled += example.answer is not None
        refused += _refused(reader.task, example, labels)
        for attribute, group in example.groups.items():
            groups[attribute][group] += 1
    bad = reader.skipped.rows
    if not cases and bad:
        [((_, place), reason), *_] = bad.items()
        hint = format_hint(path, reader.task.data.fields)
        raise UserError(f"{path}: no row is a case; the first, {place}: {reason}{hint}{way_out}")
    if not cases:
        raise UserError(f"{path}: has no cases")
    counts = [f"cases: {cases}, {labelled} with a gold answer, {cases - labelled} without"]
    if refused:
        counts.append(f"{len(refused)} gold answers that training refuses; the first: {refused[0]}")
    counts += [f"cases by {attribute}: {_counts(of)}" for attribute, of in groups.items()]
    counts += [
        f"{kind}: {len(of)} different, {sum(of.values())} in all; {_counts(of)}"
        for kind, of in labels.counts.items()
    ]
    return [f"{path}:{place}: {reason}" for (_, place), reason in bad.items()], counts


def _refused(task: Task, example: Example, labels: Labels) -> Iterator[str]:
    """Yield `id: reason` of the gold answers that no reply of the task can give."""
    for question in task.answer.training_examples(example) if example.answer else ():
        if repairs := task.ask.decode(task.ask.target(question), question, labels).repairs:
            yield f"{question.id}: {repairs[0]}"


def _counts(counts: Mapping[str, int]) -> str:
    """Return the most frequent ones: `264: 60, 266: 55, 2 others`."""
    shown = [f"{name}: {n}" for name, n in Counter(counts).most_common(MAX_SHOWN)]
    return ", ".join(shown + [f"{len(counts) - MAX_SHOWN} others"] * (len(counts) > MAX_SHOWN))
