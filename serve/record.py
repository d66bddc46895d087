"""The record of answers: written beside them, and compared before a run is resumed."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from panjue.prompts.model import model_sha256, prompt_sha256
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import delete, difference, sha256
from panjue.prompts.plumbing.run import MANIFEST, AnswersRecord, Run
from panjue.prompts.render import RULES
from panjue.serve.job import Job
from panjue.serve.settings import RESOURCES

DERIVED = ("decode.json", "confidence.jsonl", "scores.json", "report.html")
"""Files that are made from completions, besides the submission."""


def check_held_out(run: Run, test: Path) -> None:
    """Check that the training of a run held out a tenth of this test file."""
    record = run.record
    if record.dev_sha256:
        raise UserError(f"held_out: {run.folder} was trained with a dev file; name that file")
    if sha256(test) != record.train_sha256:
        raise UserError(f"held_out: name the training file of {run.folder}: {record.train}")


def record_of(job: Job, test: Path) -> AnswersRecord:
    """Return what the completions depend on; a run resumes only with an equal record."""
    config, trained = job.config, job.trained
    optional: dict[str, Any] = {"endpoint": config.endpoint} if config.endpoint else {}
    if config.on_bad_row == "skip":
        optional["on_bad_row"] = "skip"
    return AnswersRecord(
        task=job.task_name,
        test=str(test),
        test_sha256=sha256(test),
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
        held_out=config.held_out,
        **optional,
        **job.task.answer.provenance(),
        versions={
            "prompt rules": RULES,
            **{name: version(name) for name in ("llguidance", "transformers")},
        },
    )


def without_resources(record: AnswersRecord) -> AnswersRecord:
    """Return the record without the engine's settings of memory and speed."""
    engine = {key: value for key, value in record.engine.items() if key not in RESOURCES}
    return record.model_copy(update={"engine": engine})


def claim(job: Job, record: AnswersRecord, console: Console) -> None:
    """Write the record and the labels of the answers to their folder.

    Other library versions are allowed and printed. If the completions were deleted, the files made
    from them are deleted too, and named.
    """
    folder = job.folder
    if (folder / "completions.jsonl").exists():
        record = _resumed(folder, record, console)
    elif (folder / MANIFEST).exists():
        names = (job.task.data.submission.name, *DERIVED)
        stale = [folder / name for name in names if (folder / name).exists()]
        for file in stale:
            delete(file)
        if stale:
            deleted = ", ".join(file.name for file in stale)
            console.print(f"{folder}: deleted {deleted}: their completions are gone", markup=False)
    job.labels.save(folder)
    record.write(folder)


def _resumed(folder: Path, record: AnswersRecord, console: Console) -> AnswersRecord:
    """Return the new record with the versions of the rows that are there."""
    old = AnswersRecord.read(folder)
    if changed := without_resources(old).difference(without_resources(record)):
        raise UserError(
            f"{folder}: has answers made with other settings ({changed}); they are kept: "
            "name another folder for these with answers=NAME"
        )
    if changed := difference(old.versions, record.versions):
        console.print(f"resuming with other versions: {changed}", highlight=False, markup=False)
    return record.model_copy(update={"versions": old.versions})
