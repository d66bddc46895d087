"""Several trainings vote: of each field of each person, the answer that most of them give."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from panjue.eval.metric_values import item_names, submission_rows
from panjue.prompts.example import Example
from panjue.prompts.labels import Labels, merged_labels
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import (
    atomic_write,
    dump,
    exclusive_lock,
    read_object,
    sha256,
    write_json,
)
from panjue.prompts.plumbing.ours import has_record, refuse_claim
from panjue.prompts.plumbing.progress import counted
from panjue.prompts.plumbing.rows import Rows
from panjue.prompts.plumbing.run import (
    ANSWERS,
    MANIFEST,
    REPLACED_ANSWERS,
    AnswersRecord,
    Choice,
    find_answers,
)
from panjue.prompts.plumbing.version import panjue_version
from panjue.prompts.reader import text_hash
from panjue.prompts.task import Task
from panjue.prompts.tasks.metrics import Row
from panjue.serve.answers import (
    CASES_FILE,
    OpenedAnswers,
    check_complete,
    held_out_answers,
    open_answers,
)
from panjue.serve.decoding import DECODING, UNFINISHED, decoding_of, delete_derived, ranked

T = TypeVar("T")

USAGE = "panjue vote TEST OUT RUN RUN2"

WHOLE = "answer"
"""What is voted on where a task has no fields: the whole answer to a case."""

ALIKE = "alike"
MAJORITY = "by most votes"
TIED = "tied"
"""How an answer was found: in a tie several have most votes."""


@dataclass(frozen=True)
class Voter:
    """The stored answers of one run."""

    answered: OpenedAnswers
    rows: Rows  # of its submission
    held_out: Mapping[str, float]
    """Field -> its metric on the run's held-out cases, answered in the same way; empty without."""


@dataclass
class Votes:
    """What a vote has written, and how often the runs agreed."""

    submission: Path
    voters: Sequence[Voter]
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    """Field -> how its answers were found -> how many were found so."""
    replaced: str = ""  # what there was before of another submission

    def count(self, name: str, how: str) -> None:
        if name not in self.counts:
            self.counts[name] = Counter({ALIKE: 0, MAJORITY: 0, TIED: 0})
        self.counts[name][how] += 1

    def lines(self) -> Iterator[str]:
        """Yield what a person reads after a vote."""
        for name, counts in self.counts.items():
            found = ", ".join(f"{count} {how}" for how, count in counts.items())
            yield f"  {name}: {found}{self._decides_ties(name) if counts[TIED] else ''}"
        if self.replaced:
            yield f"{self.submission}: replaced: {self.replaced}"

    def _decides_ties(self, name: str) -> str:
        """Say which run counts most where votes are equal."""
        first = self.voters[by_merit(self.voters, name)[0]]
        if has_merits(self.voters, name):
            return f" (the better run counts: {first.answered.name}, {first.held_out[name]:.4f})"
        return f" (the run named first counts: not all have held-out scores of {name})"


def vote(test: Path, out: Path, runs: Sequence[Path]) -> Votes:
    """Write the folder of answers OUT, in which the answers of all RUNs to TEST have voted.

    Where votes are equal, the run counts that is better at the field on its held-out cases. Ranked
    lists are ranked by all replies of all runs.
    """
    if not test.exists():
        raise UserError(f"no file {test}")
    if (test / ANSWERS).is_dir() or (test / MANIFEST).is_file():
        raise UserError(f"{test}: has answers; the file of cases comes first: {USAGE}")
    if len(runs) < 2:
        raise UserError(f"give two runs or more, after OUT: {USAGE}")
    voters = [open_voter(run, test) for run in runs]
    check_voters(voters, out)
    check_out(out, voters[0].answered.task)
    labels = merged_labels([voter.answered.labels for voter in voters])
    with exclusive_lock(out, other="OUT"):
        if not has_record(out):
            record_of_vote(voters).write(out)  # it makes the folder ours
        return write_vote(voters, labels, out)


def open_voter(run: Path, test: Path) -> Voter:
    """Open the answers of a run to TEST; UserError: it has none, or not to all cases."""
    if not run.exists():
        raise UserError(f"{run}: there is no such folder")
    answers = find_answers(run, test)
    if answers is None or answers.record.test_sha256 != sha256(test):
        raise UserError(f"{run}: has no answers to {test}; make them: panjue generate {run} {test}")
    answered = open_answers(answers.folder, test)
    check_complete(answered)
    return Voter(
        answered=answered,
        rows=submission_rows(answered.task, answered.folder),
        held_out=held_out_scores(answered),
    )


def held_out_scores(answered: OpenedAnswers) -> dict[str, float]:
    """Return field -> its metric on held-out cases, for whoever answered the field here."""
    folder = held_out_answers(answered.folder, answered.record)
    choice = Choice.read(folder) if folder else None
    decoding = decoding_of(answered.task.data.submission.find(answered.folder))
    if choice is None or decoding is None:
        return {}
    scores = {}
    for name, who in decoding.get("by_field", {}).items():
        of_field = choice.fields[name]
        scores[name] = of_field.model if who == "model" else of_field.classifier
    return scores


def check_voters(voters: Sequence[Voter], out: Path) -> None:
    """Refuse runs of two tasks, the same answers twice, and OUT among them."""
    folders = [voter.answered.folder.resolve() for voter in voters]
    for folder, times in Counter(folders).items():
        if times > 1:
            raise UserError(f"{folder}: is given {times} times; each run has one vote")
    if out.resolve() in folders:
        raise UserError(f"{out}: votes itself; OUT is a folder of its own: {USAGE}")
    first, *others = (voter.answered for voter in voters)
    for other in others:
        one = first.record.task
        two = other.record.task
        if one != two:
            pair = f"{first.folder} and {other.folder}"
            raise UserError(f"{pair}: are runs of two tasks, {one} and {two}")


def check_out(out: Path, task: Task) -> None:
    """Refuse a folder with anything else than an earlier vote."""
    refuse_claim(out, (*REPLACED_ANSWERS, task.data.submission.name), "OUT")
    if has_record(out) and not is_vote(out):
        raise UserError(f"{out}: is no earlier vote, so it is kept; OUT comes second: {USAGE}")


def is_vote(folder: Path) -> bool:
    manifest = folder / MANIFEST
    return manifest.is_file() and bool(read_object(manifest).get("voted"))


def record_of_vote(voters: Sequence[Voter]) -> AnswersRecord:
    """Return the record of the first run's answers, changed where a vote is something else."""
    changes = {
        "trained": None,
        "trained_sha256": None,
        "endpoint": None,
        "asked": False,
        "labels_sha256": None,
        "test": str(voters[0].answered.test),
        "voted": {str(voter.answered.folder): sha256(voter.rows.path) for voter in voters},
    }
    record = voters[0].answered.record
    changes["versions"] = {**record.versions, "panjue": panjue_version()}
    return record.model_copy(update=changes)


def write_vote(voters: Sequence[Voter], labels: Labels, out: Path) -> Votes:
    """Write the submission, the hashes of the cases' texts, and decode.json."""
    first = voters[0].answered
    task = first.task
    submission = out / task.data.submission.name
    before = sha256(submission) if submission.exists() else None
    decoding = out / DECODING
    earlier = read_object(decoding) if decoding.exists() else {}
    votes = Votes(submission, voters)
    replies = [voter.answered.rows() for voter in voters] if task.ranking else []
    with (
        atomic_write(out / CASES_FILE) as cases,
        task.data.submission.writing(submission) as write,
    ):
        for example in counted(first.examples(), len(voters[0].rows)):
            cases.write(dump({"id": example.id, "text_sha256": text_hash(example)}) + "\n")
            if task.ranking:
                write(ranked_by_all(task, voters, replies, example, labels))
            else:
                write(voted_row(task, votes, example))
        # Before the submission is replaced: `check` and `score` refuse it until all is written.
        write_json(decoding, {**earlier, UNFINISHED: True})
    after = sha256(submission)
    labels.save(out)
    record = record_of_vote(voters)
    record.model_copy(update={"labels_sha256": sha256(out / "labels.json")}).write(out)
    if UNFINISHED in earlier or before not in (None, after):
        votes.replaced = delete_derived(out, earlier)
    names = ", ".join(voter.answered.name for voter in voters)
    report = {
        "panjue": panjue_version(),
        "examples": len(voters[0].rows),
        "answered_by": f"vote of {len(voters)}: {names}",
        "votes": votes.counts,
        "submission_sha256": after,
    }
    write_json(decoding, report)
    return votes


def ranked_by_all(
    task: Task, voters: Sequence[Voter], replies: Sequence[Rows], example: Example, labels: Labels
) -> Row:
    """Return the row whose list is ranked by the replies of all runs."""
    texts: list[str] = []
    for voter, rows in zip(voters, replies, strict=True):
        texts += voter.answered.row(rows, {"id": example.id}).get("texts", ())
    return task.data.write(example, ranked(task, example, texts, labels))


def voted_row(task: Task, votes: Votes, example: Example) -> Row:
    """Return the row of the fields that have most votes; of a task without fields, such a row."""
    rows = [row for voter in votes.voters if (row := voter.rows.get(example.id))]
    assert len(rows) == len(votes.voters), "all runs have a row for every case"
    if not task.answer.fields:
        whole, how = elected(rows)
        votes.count(WHOLE, how)
        return whole
    names = item_names(task, rows[0])
    for voter, row in zip(votes.voters, rows, strict=True):
        if item_names(task, row) != names:
            place = f"{voter.rows.path}: id {example.id}"
            raise UserError(f"{place} is not in the hand-in format; see `panjue check`")
    items_of_runs = [task.answer.items_of(row) for row in rows]
    voted = [dict(item) for item in items_of_runs[0]]
    for name in task.answer.fields:
        order = by_merit(votes.voters, name)
        for number, item in enumerate(voted):
            item[name], how = elected([items_of_runs[run][number][name] for run in order])
            votes.count(name, how)
    return task.answer.with_items(rows[0], voted)


def elected(values: Sequence[T]) -> tuple[T, str]:
    """Return the value with most votes, and how it was found; if several have most, the first."""
    ballots = [ballot(value) for value in values]
    counts = Counter(ballots)
    most = max(counts.values())
    best = [value for value, times in counts.items() if times == most]
    value = values[ballots.index(best[0])]
    if len(counts) == 1:
        return value, ALIKE
    return value, TIED if len(best) > 1 else MAJORITY


def ballot(value: Any) -> str:
    """Return a text that is equal for equal answers; the order of a label set plays no part."""
    return dump(sorted(value, key=dump)) if isinstance(value, list) else dump(value)


def by_merit(voters: Sequence[Voter], name: str) -> list[int]:
    """Return the places of the runs, first the best at a field on its held-out cases.

    Where not all have such a score, they stay as they were named.
    """
    places = list(range(len(voters)))
    if has_merits(voters, name):
        places.sort(key=lambda place: -voters[place].held_out[name])
    return places


def has_merits(voters: Sequence[Voter], name: str) -> bool:
    return all(name in voter.held_out for voter in voters)
