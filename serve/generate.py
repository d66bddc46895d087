"""Answer every case of a test file: one schema per case, finished rows streamed to disk."""

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from panjue.eval.answers import CASES
from panjue.eval.choice import Choice, choose, read_choice, shape_of
from panjue.eval.decoding import decode_answers
from panjue.prompts.model import has_classifier, model_sha256, prompt_sha256
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import difference, dump, exclusive_lock, sha256
from panjue.prompts.plumbing.run import ANSWERS, HELD_OUT, MANIFEST, AnsweredBy, AnswersRecord, Run
from panjue.prompts.reader import Reader
from panjue.prompts.render import RULES
from panjue.serve.engines import Answering, answering
from panjue.serve.job import Job, make_job
from panjue.serve.output import Rest, answered_ids, load_rows
from panjue.serve.settings import RESOURCES, GenerateConfig

# Made from completions, besides the submission.
DERIVED = (CASES, "decode.json", "confidence.jsonl", "scores.json", "report.html")

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
    if config.held_out:
        check_held_out(run, test)
    cases = read_cases(job, test, config.answers or test.stem, held_out=config.held_out)
    with exclusive_lock(cases.folder):
        with answering(job, console) as engine:
            answer_cases(run, job, cases, engine, console)
        console.print("3/3 decoding")
        decode(cases.folder)


def answer_cases(run: Run, job: Job, cases: Cases, engine: Answering, console: Console) -> None:
    """Have the model or the text classifier answer the cases."""
    if job.config.answer == "classifier":
        if not (job.trained and has_classifier(job.trained)):
            raise UserError(f"answer=classifier: the training of {run.folder} fitted none")
        claim(job, cases, "classifier", "as answer=classifier says", console)
        return
    held_out = held_out_cases(run, job, cases)
    if isinstance(held_out, str):
        ask(job, cases, engine, held_out, console)
        return
    if held_out is cases:  # TEST is the training's own dev file
        ask(job, cases, engine, "to compare its replies with the text classifier", console)
        decode_answers(cases.folder)
        choice = choose(cases.folder)
    else:
        choice = choice_on(job, held_out, engine, console)
    console.print(str(choice), markup=False)
    if choice.answered_by == "model":
        ask(job, cases, engine, str(choice), console)
    else:
        claim(job, cases, "classifier", str(choice), console)


def choice_on(job: Job, held_out: Cases, engine: Answering, console: Console) -> Choice:
    """Return the choice between model and text classifier; ask the held-out cases if need be."""
    made_of = shape_of(record_of(job, held_out, "model", ""))
    if choice := read_choice(job.run, made_of):
        return choice
    console.print(
        f"first the {held_out.count} cases that training held out: they say who is better, the "
        "model or the text classifier"
    )
    with exclusive_lock(held_out.folder):
        ask(job, held_out, engine, "to compare its replies with the text classifier", console)
        decode_answers(held_out.folder)
        return choose(held_out.folder)


def held_out_cases(run: Run, job: Job, cases: Cases) -> Cases | str:
    """Return the cases on which model and classifier are compared, or why the model answers."""
    if job.config.answer == "model":
        return "as answer=model says"
    if not chooses(job):
        return ""
    record = run.record
    file = Path(record.dev or record.train)
    if not file.is_file() or sha256(file) != (record.dev_sha256 or record.train_sha256):
        return f"no held-out cases to compare it on: {file} is not the file of the training"
    if record.dev and sha256(cases.file) == record.dev_sha256:
        return cases
    try:
        name = held_out_name(job.config)
        return replace(read_cases(job, file, name, held_out=record.dev is None), for_choice=True)
    except NoCases:
        return "no case was held out to compare it on"


def chooses(job: Job) -> bool:
    """Say whether there is a text classifier that could answer in place of the fine-tuned model."""
    config, trained = job.config, job.trained
    if trained is None or config.endpoint or config.adapter == "none" or config.held_out:
        return False
    return bool(job.task.answer.fields) and has_classifier(trained)


def held_out_name(config: GenerateConfig) -> str:
    """Return the name of the answers to the held-out cases; it depends on how replies are made."""
    if not config.sampling and config.constrained:
        return HELD_OUT
    made = dump({**config.sampling, "constrained": config.constrained})
    return f"{HELD_OUT}-{hashlib.sha256(made.encode()).hexdigest()[:8]}"


class NoCases(UserError):
    """A file has no cases."""


def read_cases(job: Job, file: Path, name: str, *, held_out: bool) -> Cases:
    """Return the cases of a file, which must have some."""
    reader = Reader(job.task, held_out=held_out, on_bad_row=job.config.on_bad_row)
    count = sum(1 for _ in reader.read(file))
    if not count:
        skipped = f"; {reader.skipped}" if reader.skipped.rows else ""
        raise NoCases(f"{file}: has no cases{skipped}")
    return Cases(file, reader, job.run / ANSWERS / name, count)


def ask(job: Job, cases: Cases, engine: Answering, because: str, console: Console) -> None:
    """Write one row per example to `completions.jsonl`; rows that are there are kept.

    A row has the raw replies (`texts`: the first one uses `sampling`, then come the `samples`), why
    each ended (`finish`), token counts and how many sentences were left out. An example that cannot
    be asked has `refused`, the reason, instead. If an example takes several calls, each call has a
    row.
    """
    claim(job, cases, "model", because, console)
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


def check_held_out(run: Run, test: Path) -> None:
    """Check that the training of a run held out a tenth of this test file."""
    record = run.record
    if record.dev_sha256:
        raise UserError(f"held_out: {run.folder} was trained with a dev file; name that file")
    if sha256(test) != record.train_sha256:
        raise UserError(f"held_out: name the training file of {run.folder}: {record.train}")


def record_of(job: Job, cases: Cases, answered_by: AnsweredBy, because: str) -> AnswersRecord:
    """Return what the answers depend on; a run resumes only with an equal record."""
    config, trained = job.config, job.trained
    optional: dict[str, Any] = {"endpoint": config.endpoint} if config.endpoint else {}
    if config.on_bad_row == "skip":
        optional["on_bad_row"] = "skip"
    return AnswersRecord(
        task=job.task_name,
        test=str(cases.file),
        test_sha256=sha256(cases.file),
        trained=str(trained) if trained else None,
        trained_sha256=model_sha256(trained) if trained else None,
        labels_sha256=sha256(trained / "labels.json") if trained else None,
        prompt_sha256=prompt_sha256(job.task_name),
        adapter=config.adapter,
        constrained=config.constrained,
        max_tokens=job.max_tokens,
        seed=config.seed,
        engine=config.engine,
        sampling=config.sampling,
        samples=config.samples,
        held_out=cases.reader.held_out,
        for_choice=cases.for_choice,
        answered_by=answered_by,
        because=because,
        **optional,
        **job.task.answer.provenance(),
        versions={
            "prompt rules": RULES,
            **{name: version(name) for name in ("llguidance", "transformers")},
        },
    )


def claim(job: Job, cases: Cases, answered_by: AnsweredBy, because: str, console: Console) -> None:
    """Write the record, the labels and the skipped rows of the answers to their folder.

    Other library versions are allowed and printed. If there are no completions, files made from
    earlier answers are deleted, and named.
    """
    folder = cases.folder
    record = record_of(job, cases, answered_by, because)
    if (folder / "completions.jsonl").exists():
        record = _resumed(folder, record, console)
    elif (folder / MANIFEST).exists():
        _delete_derived(job, folder, console)
    job.labels.save(folder)
    record.write(folder)
    skipped = cases.reader.skipped
    skipped.write(folder / "skipped-test.jsonl")
    if skipped.rows:
        console.print(str(skipped), markup=False)


def _delete_derived(job: Job, folder: Path, console: Console) -> None:
    """Delete the files made from earlier answers."""
    names = (job.task.data.submission.name, *DERIVED)
    stale = [folder / name for name in names if (folder / name).exists()]
    for file in stale:
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    if stale:
        deleted = ", ".join(file.name for file in stale)
        console.print(f"{folder}: deleted {deleted}: they belong to earlier answers", markup=False)


def _resumed(folder: Path, record: AnswersRecord, console: Console) -> AnswersRecord:
    """Return the new record with the versions of the rows that are there."""
    old = AnswersRecord.read(folder)
    both = []
    for one in (old, record):  # settings of memory and speed may differ
        kept = {key: value for key, value in one.engine.items() if key not in RESOURCES}
        both.append(one.model_copy(update={"engine": kept}))
    if changed := both[0].difference(both[1]):
        raise UserError(
            f"{folder}: has answers made with other settings ({changed}); they are kept: "
            "name another folder for these with answers=NAME"
        )
    if changed := difference(old.versions, record.versions):
        console.print(f"resuming with other versions: {changed}", highlight=False, markup=False)
    return record.model_copy(update={"versions": old.versions})
