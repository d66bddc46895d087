"""Arguments that several commands share, and functions for them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from panjue.prompts.plumbing.errors import Unreadable, UserError
from panjue.prompts.plumbing.run import find_answers
from panjue.prompts.reader import Reader, Skipped
from panjue.prompts.task import BUILT_IN, load_task

Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, e.g. trainer.max_steps=10")]

SubmissionPath = Annotated[Path, typer.Argument(help="a submission, or its run folder")]

OptionalTask = Annotated[
    str | None, typer.Option(help="default: that of the run folder, else judgment")
]

TextWords = Annotated[
    list[str] | None,
    typer.Argument(help="dialogues: embeddings=URL#MODEL judge=URL#MODEL compare texts"),
]


def text_comparison(words: Sequence[str]) -> tuple[str, str]:
    """Return the embeddings and the judge that words name; the built-in ones by default."""
    chosen = dict(zip(("embeddings", "judge"), BUILT_IN, strict=True))
    for word in words:
        name, _, value = word.partition("=")
        if name not in chosen or not value:
            raise UserError(f"{word!r}: write embeddings=URL#MODEL or judge=URL#MODEL")
        chosen[name] = value
    return chosen["embeddings"], chosen["judge"]


def submission_of(path: Path, gold: Path | None, name: str | None) -> tuple[Path, Reader, str]:
    """Return the submission or the folder of answers that is meant, its reader, and a note.

    Task and treatment of bad rows are those of the run folder. If there is none, the note is for
    errors.
    """
    answers = find_answers(path, gold)
    if answers is None:
        name = name or "judgment"
        return path, Reader(load_task(name)), f" (read as task {name!r}: is that right?)"
    record = answers.record
    if name not in (None, record.task):
        raise UserError(f"{answers.folder}: is a run of the task {record.task!r}, not {name!r}")
    reader = Reader(load_task(record.task), on_bad_row=record.on_bad_row)
    return answers.folder if path.is_dir() else path, reader, ""


@contextmanager
def protect_inputs(
    skipped: Skipped, *outputs: Path | None, inputs: Sequence[Path | None] = (), note: str = ""
) -> Iterator[None]:
    """Refuse to overwrite an input; append `note` and the skipped rows to an error's message."""
    protected = {path.resolve() for path in inputs if path}
    for path in filter(None, outputs):
        if path.resolve() in protected:
            raise UserError(f"{path}: is an input; choose another output")
    try:
        yield
    except UserError as error:
        suffix = f"; {skipped}" if skipped.rows else ""
        if not isinstance(error, Unreadable):
            suffix = f"{note}{suffix}"
        raise UserError(f"{error}{suffix}") from None
