"""Several trainings vote on each field of each person; the answer of most of them wins."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from panjue.eval.metric_values import item_names, submission_rows
from panjue.prompts.labels import merged_labels
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import atomic_write, dump, exclusive_lock, sha256, write_json
from panjue.prompts.plumbing.ours import has_record, record_keys, refuse_claim
from panjue.prompts.plumbing.records import DECODING, MANIFEST, WHOLE, AnswersRecord
from panjue.prompts.plumbing.run import CASES_FILE, REPLACED_ANSWERS
from panjue.prompts.plumbing.version import panjue_version
from panjue.prompts.reader import text_hash
from panjue.prompts.task import Task
from panjue.prompts.tasks.metrics import Row
from panjue.serve.answers import Answered, check_complete
from panjue.serve.decoding import (
    UNFINISHED,
    delete_derived,
    earlier_decoding,
    edited,
    finished_before,
)


def vote(voters: Sequence[Answered], out: Path) -> Iterator[str]:
    """Write the answers of most voters to OUT, in a tie the first one's; yield lines to print.

    Scores and a report of another submission in OUT are deleted.
    """
    first = voters[0]
    task = first.task
    check_voters(voters, out)
    refuse_claim(out, (*REPLACED_ANSWERS, task.data.submission.name), "OUT")
    with exclusive_lock(out, other="OUT"):
        submission = out / task.data.submission.name
        earlier = earlier_decoding(out)
        hash_before = finished_before(submission, earlier)  # None if there is no submission yet
        merged_labels([voter.labels for voter in voters]).save(out)
        record_of_vote(voters, out).write(out)
        write_json(out / DECODING, {**earlier, UNFINISHED: True})  # until all is written
        tied = dict.fromkeys(task.answer.fields or [WHOLE], 0)  # `voted_row` counts ties in it
        rows_of = [submission_rows(task, voter.folder) for voter in voters]
        writing = task.data.submission.writing(submission)
        with atomic_write(out / CASES_FILE) as cases, writing as write:
            for example in first.examples():
                cases.write(dump({"id": example.id, "text_sha256": text_hash(example)}) + "\n")
                write(voted_row(task, [rows.get(example.id) or {} for rows in rows_of], tied))
        answered_by = f"vote of {len(voters)}: {', '.join(voter.name for voter in voters)}"
        is_another = hash_before not in (None, sha256(submission))
        is_by_others = earlier.get("answered_by") not in (None, answered_by)
        if is_another or is_by_others:
            what_was_there = delete_derived(out, earlier)
            yield f"{submission}: replaced: {what_was_there}"
        report = {
            "panjue": panjue_version(),
            "examples": len(rows_of[0]),
            "answered_by": answered_by,
            "tied": tied,
            "submission_sha256": sha256(submission),
        }
        write_json(out / DECODING, report)
    ties = ", ".join(f"{name} {count}" for name, count in tied.items())
    yield from (f"ties, in which {first.name} counts: {ties}", f"written: {submission}")


def check_voters(voters: Sequence[Answered], out: Path) -> None:
    """Refuse a single voter, a voter twice, other tasks or cases, ranked lists, OUT as voter."""
    places = [voter.folder.resolve() for voter in voters]
    if len(set(places)) < max(len(places), 2):
        raise UserError("give two runs or more, each once, after OUT")
    if out.resolve() in places:
        raise UserError(f"{out}: votes itself; OUT is a folder of its own")
    if has_record(out) and "voted" not in record_keys(out / MANIFEST):
        raise UserError(f"{out}: is no earlier vote, so it is kept; OUT comes second")
    first = voters[0]
    if first.task.ranking:
        raise UserError(f"{first.folder}: ranks lists, which cannot be voted on")
    for voter in voters:
        if (voter.record.task, voter.record.test_sha256) != (first.record.task, first.test_sha256):
            raise UserError(f"{voter.folder}: has no answers of the task to {first.test}")
        if voter.record.limit != first.record.limit:
            raise UserError(f"{voter.folder}: answers more or fewer cases than {first.folder}")
        voter.answers.refuse_changes()
        check_complete(voter)
        if reason := edited(voter.task.data.submission.find(voter.folder)):
            raise UserError(reason)


def record_of_vote(voters: Sequence[Answered], out: Path) -> AnswersRecord:
    """Return the record of the first answers, changed where a vote differs."""
    voted = {}
    for voter in voters:
        submission = voter.task.data.submission.find(voter.folder)
        voted[os.path.relpath(voter.folder, out)] = sha256(submission)
    versions = {**voters[0].record.versions, "panjue": panjue_version()}
    changes = {
        **dict.fromkeys(("trained", "trained_sha256", "endpoint")),
        "asked": False,
        "labels_sha256": sha256(out / "labels.json"),
        "voted": voted,
        "versions": versions,
    }
    return voters[0].record.model_copy(update=changes)


def voted_row(task: Task, rows: Sequence[Row], tied: dict[str, int]) -> Row:
    """Return a row of the values with most votes; without fields, the row with most votes.

    In `tied`, field -> number of ties, the ties of this row are added.
    """
    if not task.answer.fields:
        whole: Row = elected(rows, WHOLE, tied)
        return whole
    if any(item_names(task, row) != item_names(task, rows[0]) for row in rows):
        raise UserError(f"id {rows[0]['id']}: is not in the hand-in format; see `panjue check`")
    voted: list[dict[str, Any]] = []
    for items in zip(*[task.answer.items_of(row) for row in rows], strict=True):
        fields = {}
        for name in task.answer.fields:
            fields[name] = elected([item[name] for item in items], name, tied)
        voted.append({**items[0], **fields})
    return task.answer.with_items(rows[0], voted)


def elected(values: Sequence[Any], name: str, tied: dict[str, int]) -> Any:
    """Return the value with most votes; if several have most, the first, which `tied` counts."""
    ballots = [dump(sorted(v, key=dump)) if isinstance(v, list) else dump(v) for v in values]
    votes = Counter(ballots)
    best = [ballot for ballot, count in votes.items() if count == max(votes.values())]
    tied[name] += len(best) > 1
    return values[ballots.index(best[0])]
