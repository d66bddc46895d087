"""Ask the cases of several files with one engine, and write rows to `completions.jsonl`.

`prompts.cli_generate` decides who answers what, and what is made of the rows.
"""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from panjue.finetune.rules import shared_rules
from panjue.prompts.example import Example
from panjue.prompts.gpu import unused_device
from panjue.prompts.model import prompt_sha256
from panjue.prompts.names import NameCount
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import difference, refuse_pipe, sha256, stream
from panjue.prompts.plumbing.progress import meter
from panjue.prompts.plumbing.records import CASES, MANIFEST, REPLIES, AnswersRecord
from panjue.prompts.plumbing.run import has_answers
from panjue.prompts.plumbing.version import panjue_version
from panjue.prompts.reader import Reader
from panjue.serve.answers import Answered, Answers, without_resources
from panjue.serve.ask import Answerer, answer_all
from panjue.serve.job import Job
from panjue.serve.output import EarlierRows, Output, StopSignals, starting

if TYPE_CHECKING:
    from panjue.serve.engine import Engine
    from panjue.serve.ray import Fleet  # Ray may be missing

COMPLETIONS = "completions.jsonl"


@dataclass(frozen=True)
class Cases:
    """A file of cases to answer, and the folder of their answers."""

    file: Path
    sha256: str
    reader: Reader
    folder: Path
    count: int  # number of cases
    were_read: bool  # this process has read all cases, and so knows the skipped rows
    names: NameCount  # of the cases that were read


def read_cases(file: Path, reader: Reader, folder: Path) -> Cases:
    """Return the cases of a file after reading, and so checking, all of them once.

    If the folder has answers to the same cases of the same file, an earlier command has read them,
    and their number is in its record.
    """
    refuse_pipe(file)
    digest = sha256(file) if file.exists() else ""  # without a file, `reader.read` says so below
    known = cases_answered(digest, reader, folder)
    names = NameCount()
    # `names.of` passes each case on, and counts the names that its text lacks.
    count = sum(1 for _ in names.of(reader.read(file))) if known is None else known
    return Cases(file, digest, reader, folder, count, were_read=known is None, names=names)


def cases_answered(digest: str, reader: Reader, folder: Path) -> int | None:
    """Return the number of cases if the folder has answers to this file, read alike; else None."""
    if not (folder / MANIFEST).is_file():
        return None
    old = AnswersRecord.read(folder)
    is_same_file = old.test_sha256 == digest
    is_read_alike = all(getattr(old, name) == value for name, value in how_read(reader).items())
    return old.cases if is_same_file and is_read_alike else None


def how_read(reader: Reader) -> dict[str, Any]:
    """Return the entries of a record that say which cases of a file are read, and how."""
    return {
        "columns": dict(reader.columns),
        "limit": reader.limit,
        "held_out": reader.held_out,
        "highest_hash": reader.highest_hash,
        "half": reader.half,
        "on_bad_row": reader.on_bad_row,
    }


@contextmanager
def session(job: Job, console: Console) -> "Iterator[Session]":
    """Open a session for the block. If a question started an engine, it ends with the block."""
    with StopSignals() as signals, ExitStack() as stack:
        opened = Session(job, console, signals, stack)
        try:
            yield opened
        finally:
            opened.answerer = None  # vLLM's engine complains if it lives until Python exits


@dataclass
class Session:
    """Asks the model of a job. The first question starts the engine."""

    job: Job
    console: Console
    signals: StopSignals
    stack: ExitStack  # ends the engine
    answerer: "Answerer | Fleet | None" = None  # None while no case has needed an engine

    def ask(self, cases: Cases) -> Answered:
        """Ask the model about the cases, and return their answers with all replies.

        Write one row for each example to `completions.jsonl`; keep earlier rows.

        A row has the raw replies (`texts`: the first uses `sampling`, then the `samples` follow),
        why each ended (`finish`), token counts, and how many sentences were left out. If an example
        cannot be asked, its row has the reason as `refused` instead. If an example takes several
        calls, each call has a row.
        """
        record = claim(self.job, cases, self.console, asked=True)
        path = cases.folder / COMPLETIONS
        earlier = EarlierRows(path) if path.exists() else None
        done = earlier.answered(cases.reader, cases.file, self.job.labels) if earlier else set()
        if cases.reader.highest_hash or cases.reader.limit:
            # These read only a part of the file: texts up to this hash, or the first so many cases.
            # Earlier commands may have asked more.
            done &= {str(example.id) for example in cases.reader.read(cases.file)}
        if len(done) >= cases.count:
            self.console.print(f"{path}: all {cases.count} are answered already")
            return self._answered(cases, record)
        if earlier:
            self.console.print(f"continuing: {len(done)} of {cases.count} are answered already")
        # The steps are those of `panjue generate`: read, answer, decode.
        self.console.print(f"2/3 answering {cases.count - len(done)} cases")
        self.signals.folder = cases.folder
        answerer = self.answerer or self.start()
        todo = (example for example in cases.reader.read(cases.file) if str(example.id) not in done)
        with stream(path) as file, meter(self.console, cases.count, len(done)) as progress:
            out = Output(file, progress, answerer.status)

            async def answer(example: Example) -> None:
                old_rows = earlier.of(example) if earlier else {}
                await answerer.answer(example, out.write, old_rows)
                out.solved()

            work = answer_all(todo, answer, answerer.slots)
            answerer.runner.run(self.signals.until_stopped(work))
        return self._answered(cases, record)

    def without_asking(self, cases: Cases) -> Answered:
        """Return the answers to cases that the text classifier answers, so no model is asked."""
        record = claim(self.job, cases, self.console, asked=False)
        return self._answered(cases, record)

    def _answered(self, cases: Cases, record: AnswersRecord) -> Answered:
        """Return cases with their answers, which were made by the training as it is now."""
        job = self.job
        answers = Answers(cases.folder, record, job.trained, job.labels, changed="")
        return Answered(answers, cases.reader, cases.file, cases.sha256)

    def switch(self, job: Job) -> None:
        """From now on, ask with another unmerged adapter of the same base."""
        self.job = job
        # Otherwise there is no engine yet: the first question starts it with this adapter.
        # `panjue choose`, which alone switches adapters, takes no Ray, so there is no fleet.
        if isinstance(self.answerer, Answerer):
            from panjue.serve.engine import Engine  # imports vLLM

            served = job.with_model().served
            running = self.answerer.source
            assert served, "what has an adapter is a training"
            assert isinstance(running, Engine), "no endpoint has adapters of ours"
            running.switch(served)

    def start(self) -> "Answerer | Fleet":
        """Start what the settings say: an engine, replicas in a cluster, or an endpoint."""
        config = self.job.config
        if config.ray:
            from panjue.serve.ray import running_fleet

            fleet = running_fleet(self.job, self.signals, self.console)
            self.answerer = self.stack.enter_context(fleet)
            return self.answerer
        job = self.job.with_model()
        if config.endpoint:
            from panjue.serve.endpoint import Endpoint

            question_maker = job.question_maker()
            slots = config.slots()
            source: Engine | Endpoint = self.stack.enter_context(closing(Endpoint(config.endpoint)))
        else:
            from panjue.serve.engine import engine  # imports vLLM, which takes ten seconds

            if device := unused_device():
                self.console.print(f"answering on {device}")
            assert job.served, "without an endpoint, `make_job` has found a training"
            with starting(self.console, "the engine"):
                question_maker = job.question_maker()
                running = engine(job.served, config.engine, job.budget, config.seed)
                source = self.stack.enter_context(running)
                slots = config.slots(source.sequences)
        self.answerer = Answerer(source, question_maker, asyncio.Semaphore(slots), job.passes)
        return self.answerer


def claim(job: Job, cases: Cases, console: Console, *, asked: bool) -> AnswersRecord:
    """Write the record, the labels and the skipped rows of the answers to their folder.

    `asked` says whether the model is asked. Earlier answers in the folder are resumed. Refuse the
    folder if its answers are to other cases or were made in another way.
    """
    folder = cases.folder
    record = record_of(job, cases, asked=asked)
    old = AnswersRecord.read(folder) if (folder / MANIFEST).exists() else None
    if old:
        check_resumes(old, record, folder)
        if old.asked and has_answers(folder):  # keep the versions of the earlier replies
            if changed := difference(old.versions, record.versions):
                console.print(f"resuming with other versions: {changed}")
            record = record.model_copy(update={"versions": old.versions, "asked": True})
    if record != old:
        record.write(folder)  # first, since it makes the folder ours
        job.labels.save(folder)
    if cases.were_read:
        skipped = cases.reader.skipped
        skipped.write(folder / "skipped-test.jsonl")
        skipped.show()
    return record


def check_resumes(old: AnswersRecord, record: AnswersRecord, folder: Path) -> None:
    """Refuse answers that are to other cases, or whose replies were made in another way.

    A record without any answer may be replaced: its command ended before the first reply.
    """
    if not has_answers(folder):
        return
    if old.held_out:  # more or fewer of the same held-out cases may be asked; rows are kept
        old = old.model_copy(update={"highest_hash": record.highest_hash})
    if old.test_sha256 != record.test_sha256:
        of = old.test if old.test != record.test else f"{old.test} as it was before"
        raise UserError(
            f"{folder}: has answers to another file, {of}; they are kept: name another folder for "
            f"those to {record.test} with answers=NAME"
        )
    # Entries of the record that affect the cases or the model's replies must be equal. If the model
    # was not asked, there are no replies. Memory and speed of the engine may always change.
    compared = (CASES, REPLIES) if old.asked else (CASES,)
    before = without_resources(old.part(*compared))
    if changed := difference(before, without_resources(record.part(*compared))):
        raise UserError(
            f"{folder}: has answers made with other settings ({changed}); they are kept: "
            "name another folder for these with answers=NAME"
        )


def record_of(job: Job, cases: Cases, *, asked: bool) -> AnswersRecord:
    """Return the record of what affects the answers; `check_resumes` compares two of them.

    `asked` says whether the model is asked; if not, the text classifier answers everything.
    """
    trained = job.trained
    # The record has only settings that affect replies: adapter, seed, sampling and so on.
    known = job.config.model_dump(include=set(AnswersRecord.model_fields))
    known |= {
        "task": job.task_name,
        "test": str(cases.file),
        "test_sha256": cases.sha256,
        "cases": cases.count,
        "prompt_sha256": prompt_sha256(job.task_name),
        "max_tokens": job.budget.usual,
        "asked": asked,
        **how_read(cases.reader),
        "solve": job.task.solve.settings.model_dump() if job.task.solve else {},
        "versions": {
            "panjue": panjue_version(),
            **{name: version(name) for name in ("llguidance", "transformers")},
            "prompt rules": shared_rules()[:8],  # the start of a hash, to print if it differs
        },
    }
    if trained:
        known["split_by"] = trained.record.split_by
        known["trained"] = str(trained.folder)
        known["trained_sha256"] = trained.sha256
        known["labels_sha256"] = trained.labels_sha256
    elif job.labels.counts:  # else the task has no labels, so there is no hash
        known["labels_sha256"] = job.labels.sha256
    return AnswersRecord(**known)
