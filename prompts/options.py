"""Arguments that several commands share, and functions for them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from panjue.prompts.plumbing.errors import Unreadable, UserError
from panjue.prompts.plumbing.files import RUN_FILES
from panjue.prompts.plumbing.run import find_answers
from panjue.prompts.reader import OnBadRow, Skipped

Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, e.g. trainer.max_steps=10")]

URL = "http://127.0.0.1:8000"

Size = Annotated[int, typer.Option(min=1, help="cases")]

OnBad = Annotated[OnBadRow, typer.Option(help="what to do with a bad row")]

SubmissionPath = Annotated[Path, typer.Argument(help="a submission, or its run folder")]

OptionalTask = Annotated[
    str | None, typer.Option(help="default: that of the run folder, else judgment")
]

Embeddings = Annotated[str, typer.Option(help="dialogues: embeddings; ngrams, or URL#MODEL")]

JudgeName = Annotated[
    str, typer.Option(help="dialogues: judge of equal events; agree, or URL#MODEL")
]


def submission_of(path: Path, gold: Path | None, name: str | None) -> tuple[Path, str, str]:
    """Return the submission or the folder of answers that is meant, its task, and a note.

    The note is for errors, if no run folder states the task.
    """
    answers = find_answers(path, gold)
    if answers is None:
        name = name or "judgment"
        return path, name, f" (read as task {name!r}: is that right?)"
    task = answers.record.task
    if name not in (None, task):
        raise UserError(f"{answers.folder}: is a run of the task {task!r}, not {name!r}")
    return answers.folder if path.is_dir() else path, task, ""


@contextmanager
def protect_inputs(
    skipped: Skipped, *outputs: Path | None, inputs: Sequence[Path | None], note: str = ""
) -> Iterator[None]:
    """Refuse to overwrite an input; append `note` and the skipped rows to an error's message."""
    protected = {path.resolve() for path in inputs if path}
    for path in outputs:
        if path and (path.resolve() in protected or (path.exists() and path.name in RUN_FILES)):
            raise UserError(f"{path}: is an input or belongs to a run; choose another output")
    try:
        yield
    except UserError as error:
        suffix = f"; {skipped}" if skipped.rows else ""
        if not isinstance(error, Unreadable):
            suffix = f"{note}{suffix}"
        raise UserError(f"{error}{suffix}") from None
