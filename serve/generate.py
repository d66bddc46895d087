"""Answer every case of a test file: one schema per case, finished rows streamed to disk."""

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from panjue.eval.answers import CASES
from panjue.eval.choice import Choice, choose, read_choice
from panjue.eval.decoding import decode_answers
from panjue.prompts.model import has_classifier, model_sha256, prompt_sha256
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import difference, dump, exclusive_lock, sha256
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
from panjue.serve.engines import Answering, answering
from panjue.serve.job import Job, make_job
from panjue.serve.output import Rest, answered_ids, load_rows
from panjue.serve.settings import RESOURCES, GenerateConfig

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

FOR_CHOICE = "to compare its replies with the text classifier"

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
    console = Console(soft_wrap=True, highlight=False)
    job = make_job(run, config)
    console.print("1/3 reading the cases")
    reader = Reader(job.task, on_bad_row=config.on_bad_row)
    cases = read_cases(test, reader, job.run / ANSWERS / (config.answers or test.stem))
    with exclusive_lock(cases.folder, other="answers=NAME"):
        with answering(job, console) as engine:
            answer_cases(run, job, cases, engine, console)
        console.print("3/3 decoding")
        decode(cases.folder)


def answer_cases(run: Run, job: Job, cases: Cases, engine: Answering, console: Console) -> None:
    if job.config.answer == "classifier":
        if not (job.trained and has_classifier(job.trained)):
            raise UserError(f"answer=classifier: the training of {run.folder} fitted none")
        claim_answers(job, cases, "classifier", "as answer=classifier says", console)
        return
    choice = choice_of(run, job, cases, engine, console)
    if isinstance(choice, str):
        ask_cases(job, cases, engine, choice, console)
        return
    console.print(str(choice), markup=False)
    if choice.answered_by == "classifier":
        claim_answers(job, cases, "classifier", str(choice), console)
        return
    ask_cases(job, cases, engine, str(choice), console)
    record = AnswersRecord.read(cases.folder)
    # On the cases that made the scaling, confidences would look better than they are.
    if record.test_sha256 != run.record.dev_sha256:
        record.model_copy(update={"scaling": choice.scaling}).write(cases.folder)


def choice_of(
    run: Run, job: Job, cases: Cases, engine: Answering, console: Console
) -> Choice | str:
    """Return the choice between model and text classifier, or why the model answers.

    If there is none yet, the held-out cases are asked; they are those of TEST if that is the
    training's own dev file.
    """
    if job.config.answer == "model":
        return "as answer=model says"
    if not chooses(job):
        return ""
    folder = held_out_folder(job, cases)
    if choice := read_choice(folder):
        return choice
    record = run.record
    if record.dev and sha256(cases.file) == record.dev_sha256:
        ask_cases(job, cases, engine, FOR_CHOICE, console)
        decode_answers(cases.folder)
        return choose(cases.folder, folder)
    held_out = held_out_cases(record, job, folder)
    if isinstance(held_out, str):
        return held_out
    with exclusive_lock(folder, wait=True):
        return read_choice(folder) or choice_on(job, held_out, engine, console)


def held_out_cases(record: RunRecord, job: Job, folder: Path) -> Cases | str:
    """Return the cases that a training held out, or why there are none."""
    file = Path(record.dev or record.train)
    if not file.is_file() or sha256(file) != (record.dev_sha256 or record.train_sha256):
        return f"no held-out cases to compare it on: {file} is missing, or was changed"
    reader = Reader(job.task, held_out=record.dev is None, on_bad_row=record.on_bad_row)
    try:
        return read_cases(file, reader, folder, for_choice=True)
    except NoCases:
        return "no case was held out to compare it on"


def choice_on(job: Job, held_out: Cases, engine: Answering, console: Console) -> Choice:
    console.print(
        f"first the {held_out.count} cases that training held out: they say who is better, the "
        "model or the text classifier"
    )
    ask_cases(job, held_out, engine, FOR_CHOICE, console)
    decode_answers(held_out.folder)
    return choose(held_out.folder, held_out.folder)


def chooses(job: Job) -> bool:
    """Say whether there is a text classifier that could answer in place of the fine-tuned model."""
    config = job.config
    trained = job.trained
    if trained is None or config.endpoint or config.adapter == "none":
        return False
    return bool(job.task.answer.fields) and has_classifier(trained)


def held_out_folder(job: Job, cases: Cases) -> Path:
    """Return the folder of the answers to the held-out cases: one for each way to make replies."""
    record = record_of(job, cases, "model", "")
    made = record.model_dump(mode="json", include=SHAPE)
    made["engine"] = without_resources(made["engine"])
    digest = hashlib.sha256(dump(made).encode()).hexdigest()
    return job.run / ANSWERS / f"{HELD_OUT}-{digest[:8]}"


def without_resources(engine: dict[str, Any]) -> dict[str, Any]:
    """Return the engine settings that shape replies; those of memory and speed may differ."""
    return {key: value for key, value in engine.items() if key not in RESOURCES}


class NoCases(UserError):
    """A file has no cases."""


def read_cases(file: Path, reader: Reader, folder: Path, *, for_choice: bool = False) -> Cases:
    count = sum(1 for _ in reader.read(file))
    if not count:
        skipped = f"; {reader.skipped}" if reader.skipped.rows else ""
        raise NoCases(f"{file}: has no cases{skipped}")
    return Cases(file, reader, folder, count, for_choice)


def ask_cases(job: Job, cases: Cases, engine: Answering, because: str, console: Console) -> None:
    """Write one row per example to `completions.jsonl`; rows that are there are kept.

    A row has the raw replies (`texts`: the first one uses `sampling`, then come the `samples`), why
    each ended (`finish`), token counts and how many sentences were left out. An example that cannot
    be asked has `refused`, the reason, instead. If an example takes several calls, each call has a
    row.
    """
    claim_answers(job, cases, "model", because, console)
    path = cases.folder / "completions.jsonl"
    old_rows = load_rows(path)
    done = set[str]()
    if old_rows:
        done = answered_ids(cases.reader, cases.file, job.labels, old_rows)
    if len(done) >= cases.count:
        console.print(f"{path}: all {cases.count} are answered already")
        return
    if old_rows:
        console.print(f"continuing: {len(done)} of {cases.count} are answered already")
    console.print(f"2/3 answering {cases.count - len(done)} cases")
    todo = (example for example in cases.reader.read(cases.file) if str(example.id) not in done)
    engine.answer(cases.folder, Rest(todo, old_rows, len(done), cases.count))


def record_of(job: Job, cases: Cases, answered_by: AnsweredBy, because: str) -> AnswersRecord:
    """Return what the answers depend on; a run resumes only with an equal record."""
    trained = job.trained
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


def claim_answers(
    job: Job, cases: Cases, answered_by: AnsweredBy, because: str, console: Console
) -> None:
    """Write the record, the labels and the skipped rows of the answers to their folder.

    Other library versions are allowed and printed. If there are no completions, files made from
    earlier answers are deleted, and named.
    """
    folder = cases.folder
    record = record_of(job, cases, answered_by, because)
    if (folder / "completions.jsonl").exists():
        if AnswersRecord.read(folder).answered_by != answered_by:
            _delete_derived(job, folder, console)
        record = _resumed(folder, record, console)
    elif (folder / MANIFEST).exists():
        old = AnswersRecord.read(folder)
        if old.answered_by == "classifier" and old.test_sha256 != record.test_sha256:
            raise UserError(
                f"{folder}: has answers to another file, {old.test}; they are kept: name another "
                "folder for these with answers=NAME"
            )
        _delete_derived(job, folder, console)
    job.labels.save(folder)
    record.write(folder)
    skipped = cases.reader.skipped
    skipped.write(folder / "skipped-test.jsonl")
    if skipped.rows:
        console.print(str(skipped), markup=False)


def _delete_derived(job: Job, folder: Path, console: Console) -> None:
    names = (job.task.data.submission.name, *DERIVED)
    stale = [folder / name for name in names if (folder / name).exists()]
    for file in stale:
        if file.is_dir():
            shutil.rmtree(file)
        else:
            file.unlink()
    if stale:
        deleted = ", ".join(file.name for file in stale)
        console.print(f"{folder}: deleted {deleted}: they belong to earlier answers", markup=False)


def _resumed(folder: Path, record: AnswersRecord, console: Console) -> AnswersRecord:
    """Return the new record with the versions of the rows that are there."""
    old = AnswersRecord.read(folder)
    both = []
    for one in (old, record):
        both.append(one.model_copy(update={"engine": without_resources(one.engine)}))
    if changed := both[0].difference(both[1]):
        raise UserError(
            f"{folder}: has answers made with other settings ({changed}); they are kept: "
            "name another folder for these with answers=NAME"
        )
    if changed := difference(old.versions, record.versions):
        console.print(f"resuming with other versions: {changed}", highlight=False, markup=False)
    return record.model_copy(update={"versions": old.versions})
