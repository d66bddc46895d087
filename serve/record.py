"""What earlier runs have answered, the record that it must match, and the rest."""

import shutil
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from panjue.prompts.example import Decoded, Example, call_key, first_reply, run_steps
from panjue.prompts.labels import Labels
from panjue.prompts.model import model_sha256, prompt_sha256
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import difference, sha256, stream
from panjue.prompts.plumbing.rows import Rows
from panjue.prompts.plumbing.run import MANIFEST, AnswersRecord, Run
from panjue.prompts.reader import Reader
from panjue.prompts.render import RULES
from panjue.prompts.task import Task
from panjue.serve.job import Job
from panjue.serve.rows import Row
from panjue.serve.settings import RESOURCES

# Made from completions, besides the submission.
DERIVED = ("decode.json", "confidence.jsonl", "scores.json", "report.html")


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
            if file.is_dir():
                shutil.rmtree(file)
            else:
                file.unlink()
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


@dataclass
class Rest:
    """The examples of a run that have no answer yet."""

    examples: Iterator[Example]
    rows: Rows | None  # of an earlier run; some calls of an example may have rows already
    done: int  # examples that have their answer
    total: int

    def find_row(self, key: str) -> Row | None:
        """Return the row of a call from an earlier run, if there is one."""
        return self.rows.get(key) if self.rows else None

    def rows_of(self, example: Example) -> dict[str, Row]:
        """Return all rows of an example from an earlier run, by the key of their call."""
        keys = self._keys.get(str(example.id), ())
        return {key: row for key in keys if (row := self.find_row(key))}

    @cached_property
    def _keys(self) -> dict[str, list[str]]:
        """Id -> keys, for tasks of several calls."""
        keys: dict[str, list[str]] = defaultdict(list)
        for key in self.rows.ids() if self.rows else ():
            if " " in key:
                keys[key.rpartition(" ")[0]].append(key)
        return keys


def load_rows(path: Path) -> Rows | None:
    """Return the rows of an earlier run, without an incomplete last line; None if there is none."""
    if not path.exists():
        return None
    with stream(path):
        pass  # opening it drops an incomplete last line
    return Rows(path, key=call_key)


def answered_ids(reader: Reader, test: Path, labels: Labels, rows: Rows) -> set[str]:
    """Return the ids of the examples whose calls all have rows."""
    task = reader.task
    if not task.answer.several_calls:
        return rows.ids()
    return {str(e.id) for e in reader.read(test) if is_answered(task, e, labels, rows)}


class MissingRow(Exception):
    """A call has no row yet."""


def is_answered(task: Task, example: Example, labels: Labels, rows: Rows) -> bool:
    """Say whether the rows are enough to compute an example's answer."""

    def reply(call: int, question: Example) -> Decoded:
        row = rows.get(call_key({"id": example.id, "call": call}))
        if row is None:
            raise MissingRow
        return task.ask.decode(first_reply(row), question, labels)

    try:
        run_steps(task.answer.solving(example), reply)
    except MissingRow:
        return False
    return True
