"""Answer every case of a test file: one schema per case, finished rows streamed to disk."""

import asyncio
import hashlib
import shutil
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from panjue.eval.choice import Choice, choose, read_choice
from panjue.prompts.example import Example
from panjue.prompts.model import has_classifier, model_sha256, prompt_sha256
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import difference, dump, exclusive_lock, sha256, stream
from panjue.prompts.plumbing.progress import meter
from panjue.prompts.plumbing.run import (
    ANSWERS,
    HELD_OUT,
    MANIFEST,
    AnsweredBy,
    AnswersRecord,
    Run,
    RunRecord,
)
from panjue.prompts.reader import Reader
from panjue.prompts.render import RULES
from panjue.serve.answers import CASES
from panjue.serve.ask import Answerer, answer_all
from panjue.serve.decoding import decode_answers
from panjue.serve.endpoint import Endpoint
from panjue.serve.engine import Engine, engine
from panjue.serve.job import Job, make_job
from panjue.serve.output import EarlierRows, Output, StopSignals, starting
from panjue.serve.settings import RESOURCES, GenerateConfig

if TYPE_CHECKING:
    from panjue.serve.ray import Fleet  # Ray may be missing

# Made from completions, besides the submission.
DERIVED = (CASES, "decode.json", "confidence.jsonl", "scores.json", "report.html")

SHAPE = {
    "trained_sha256",
    "labels_sha256",
    "prompt_sha256",
    "adapter",
    "constrained",
    "max_tokens",
    "seed",
    "engine",
    "sampling",
    "solve",
}
"""Entries of a record that shape replies, apart from the cases."""

Decode = Callable[[Path], object]


@dataclass(frozen=True)
class Cases:
    """A file of cases to answer, and the folder of the answers.

    Attributes:
        for_choice: They are asked only to compare the model with the text classifier.
    """

    file: Path
    reader: Reader
    folder: Path
    count: int
    for_choice: bool = False


def generate(run: Run, test: Path, config: GenerateConfig, decode: Decode) -> None:
    """Answer `test` into RUN/answers/NAME, then `decode` that folder.

    If `answer` is auto, the cases that training held out are asked first, in the same engine:
    whoever is better there, the model or the text classifier, answers `test`.
    """
    console = Console(soft_wrap=True, highlight=False, markup=False)
    job = make_job(run, config)
    console.print("1/3 reading the cases")
    reader = Reader(job.task, on_bad_row=config.on_bad_row)
    cases = read_cases(test, reader, run.folder / ANSWERS / (config.answers or test.stem))
    if not cases.count:
        skipped = f"; {reader.skipped}" if reader.skipped.rows else ""
        raise UserError(f"{test}: has no cases{skipped}")
    with exclusive_lock(cases.folder, other="answers=NAME"):
        with StopSignals() as signals, ExitStack() as stack:
            Generation(job, console, signals, stack).answer(cases)
        console.print("3/3 decoding")
        decode(cases.folder)


@dataclass
class Generation:
    """Answers files of cases, all with one engine: the first that needs it starts it.

    Attributes:
        stack: The engine ends with it.
        answerer: The running engine and what asks it; None if no case has needed it.
    """

    job: Job
    console: Console
    signals: StopSignals
    stack: ExitStack
    answerer: "Answerer | Fleet | None" = None

    def answer(self, cases: Cases) -> None:
        """Have the model or the text classifier answer, as the setting `answer` says."""
        job = self.job
        if job.config.answer == "classifier":
            if not (job.run.result and has_classifier(job.run.result)):
                raise UserError(f"answer=classifier: the training of {job.run.folder} fitted none")
            self.claim(cases, "classifier", "as answer=classifier says")
        elif job.config.answer == "model":
            self.ask(cases, "as answer=model says")
        elif can_choose(job):
            self.answer_by_the_better(cases)
        else:
            self.ask(cases, "")

    def answer_by_the_better(self, cases: Cases) -> None:
        """Have the model or the text classifier answer: whoever is better on held-out cases."""
        try:
            choice = self.choice(cases)
        except NoHeldOutCases as reason:
            self.ask(cases, str(reason))
            return
        self.console.print(str(choice))
        if choice.answered_by == "classifier":
            self.claim(cases, "classifier", str(choice))
            return
        self.ask(cases, str(choice))

    def choice(self, cases: Cases) -> Choice:
        """Return the choice between model and text classifier; NoHeldOutCases if there is none.

        If it was not made before, the held-out cases are asked; they are those of TEST if that is
        the training's own dev file.
        """
        job = self.job
        folder = held_out_folder(job, record_of(job, cases, "model", ""))
        if choice := read_choice(folder):
            return choice
        record = job.run.record
        if record.dev and sha256(cases.file) == record.dev_sha256:
            return self.compare(cases, folder)
        held_out = held_out_cases(record, job, folder)
        with exclusive_lock(folder, wait=True):
            return read_choice(folder) or self.compare(held_out, folder)

    def compare(self, held_out: Cases, into: Path) -> Choice:
        """Compare the model with the text classifier on held-out cases."""
        self.console.print(
            f"{held_out.count} held-out cases say who is better, the model or the text classifier"
        )
        self.ask(held_out, "to compare its replies with the text classifier")
        decode_answers(held_out.folder)
        return choose(held_out.folder, into)

    def ask(self, cases: Cases, because: str) -> None:
        """Write one row per example to `completions.jsonl`; rows that are there are kept.

        A row has the raw replies (`texts`: the first one uses `sampling`, then come the `samples`),
        why each ended (`finish`), token counts and how many sentences were left out. An example
        that cannot be asked has `refused`, the reason, instead. If an example takes several calls,
        each call has a row.
        """
        self.claim(cases, "model", because)
        path = cases.folder / "completions.jsonl"
        earlier = EarlierRows(path) if path.exists() else None
        done = earlier.answered(cases.reader, cases.file, self.job.labels) if earlier else set()
        if len(done) >= cases.count:
            self.console.print(f"{path}: all {cases.count} are answered already")
            return
        if earlier:
            self.console.print(f"continuing: {len(done)} of {cases.count} are answered already")
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

    def start(self) -> "Answerer | Fleet":
        """Start what the settings name: an engine, replicas in a cluster, or an endpoint."""
        config = self.job.config
        if config.ray:
            from panjue.serve.ray import running_fleet

            fleet = running_fleet(self.job, self.signals, self.console)
            self.answerer = self.stack.enter_context(fleet)
            return self.answerer
        job = self.job.with_model()
        if config.endpoint:
            asker = job.asker()
            source: Engine | Endpoint = self.stack.enter_context(closing(Endpoint(config.endpoint)))
        else:
            assert job.served, "without an endpoint, `make_job` has found a training"
            with starting(self.console, "the engine"):
                asker = job.asker()
                running = engine(job.served, config.engine, job.budget, config.seed)
                source = self.stack.enter_context(running)
        self.answerer = Answerer(source, asker, asyncio.Semaphore(config.slots), job.passes)
        return self.answerer

    def claim(self, cases: Cases, answered_by: AnsweredBy, because: str) -> None:
        """Write the record, the labels and the skipped rows of the answers to their folder.

        Earlier answers there are resumed or replaced; if they differ too much, this is refused.
        """
        folder = cases.folder
        record = record_of(self.job, cases, answered_by, because)
        choice = read_choice(held_out_folder(self.job, record)) if can_choose(self.job) else None
        if choice:  # also if the classifier answers: `panjue serve` takes the scaling from here
            record = record.model_copy(update={"scaling": choice.scaling})
        if (folder / "completions.jsonl").exists():
            record = self.resumed(folder, record)
        elif (folder / MANIFEST).exists():
            self.replace_answers(folder, record)
        self.job.labels.save(folder)
        record.write(folder)
        skipped = cases.reader.skipped
        skipped.write(folder / "skipped-test.jsonl")
        skipped.show()

    def resumed(self, folder: Path, record: AnswersRecord) -> AnswersRecord:
        """Return the new record with the library versions of the replies that are kept."""
        old = AnswersRecord.read(folder)
        if changed := without_resources(old).difference(without_resources(record)):
            raise UserError(
                f"{folder}: has answers made with other settings ({changed}); they are kept: "
                "name another folder for these with answers=NAME"
            )
        if old.answered_by != record.answered_by:
            self.delete_derived(folder)
        if changed := difference(old.versions, record.versions):
            self.console.print(f"resuming with other versions: {changed}")
        return record.model_copy(update={"versions": old.versions})

    def replace_answers(self, folder: Path, record: AnswersRecord) -> None:
        """Delete answers without replies; refuse if the classifier gave them to another file."""
        old = AnswersRecord.read(folder)
        if old.answered_by == record.answered_by == "classifier" and not old.difference(record):
            return  # it gives the same answers again
        if old.answered_by == "classifier" and old.test_sha256 != record.test_sha256:
            raise UserError(
                f"{folder}: has answers to another file, {old.test}; they are kept: name another "
                "folder for these with answers=NAME"
            )
        self.delete_derived(folder)

    def delete_derived(self, folder: Path) -> None:
        """Delete the files made from earlier answers, and name them."""
        names = (self.job.task.data.submission.name, *DERIVED)
        stale = [name for name in names if (folder / name).exists()]
        for name in stale:
            if (folder / name).is_dir():  # the submission of some tasks
                shutil.rmtree(folder / name)
            else:
                (folder / name).unlink()
        if stale:
            what = f"{folder}: deleted {', '.join(stale)}: they belong to earlier answers"
            self.console.print(what)


def can_choose(job: Job) -> bool:
    """Say whether there is a text classifier that could answer in place of the fine-tuned model."""
    trained = job.run.result
    if trained is None or job.config.endpoint or job.config.adapter == "none":
        return False
    return bool(job.task.answer.fields) and has_classifier(trained)


def held_out_folder(job: Job, record: AnswersRecord) -> Path:
    """Return the folder of the answers to the held-out cases: one for each way to make replies."""
    made = without_resources(record).model_dump(mode="json", include=SHAPE)
    digest = hashlib.sha256(dump(made).encode()).hexdigest()
    return job.run.folder / ANSWERS / f"{HELD_OUT}-{digest[:8]}"


class NoHeldOutCases(Exception):
    """There is no case to compare model and text classifier on; the message says why."""


def held_out_cases(record: RunRecord, job: Job, folder: Path) -> Cases:
    """Return the cases that a training held out: its dev file, or some of its training file."""
    file = Path(record.dev or record.train)
    if not file.is_file() or sha256(file) != (record.dev_sha256 or record.train_sha256):
        reason = f"{file} is missing, or was changed"
        raise NoHeldOutCases(f"no held-out cases to compare it on: {reason}")
    reader = Reader(job.task, held_out=record.dev is None, on_bad_row=record.on_bad_row)
    cases = read_cases(file, reader, folder)
    if not cases.count:
        raise NoHeldOutCases("no case was held out to compare it on")
    return replace(cases, for_choice=True)


def read_cases(file: Path, reader: Reader, folder: Path) -> Cases:
    return Cases(file, reader, folder, count=sum(1 for _ in reader.read(file)))


def without_resources(record: AnswersRecord) -> AnswersRecord:
    """Return the record without the engine settings of memory and speed, which may differ."""
    engine = {key: value for key, value in record.engine.items() if key not in RESOURCES}
    return record.model_copy(update={"engine": engine})


def record_of(job: Job, cases: Cases, answered_by: AnsweredBy, because: str) -> AnswersRecord:
    """Return what the answers are made from; a run resumes if this shapes the same replies."""
    trained = job.run.result
    # Of the settings the record has those that shape replies: adapter, seed, sampling and so on.
    known = job.config.model_dump(include=set(AnswersRecord.model_fields))
    known |= {
        "task": job.task_name,
        "test": str(cases.file),
        "test_sha256": sha256(cases.file),
        "prompt_sha256": prompt_sha256(job.task_name),
        "max_tokens": job.budget.usual,
        "held_out": cases.reader.held_out,
        "for_choice": cases.for_choice,
        "on_bad_row": cases.reader.on_bad_row,
        "solve": job.task.solve.settings.model_dump() if job.task.solve else {},
        "answered_by": answered_by,
        "because": because,
        "versions": {name: version(name) for name in ("llguidance", "transformers")},
    }
    known["versions"]["prompt rules"] = RULES
    if trained:
        known["trained"] = str(trained)
        known["trained_sha256"] = model_sha256(trained)
        known["labels_sha256"] = sha256(trained / "labels.json")
    return AnswersRecord(**known)
