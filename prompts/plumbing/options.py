"""Arguments that several commands of the command line take, and what they do with them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from panjue.prompts.plumbing.errors import Unreadable, UserError
from panjue.prompts.plumbing.files import OF_A_RUN, generation
from panjue.prompts.reader import OnBadRow, Skipped

Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, e.g. trainer.max_steps=10")]

URL = "http://127.0.0.1:8000"

Size = Annotated[int, typer.Option(min=1, help="cases")]

OnBad = Annotated[OnBadRow, typer.Option(help="at a row that is no case")]

HandedIn = Annotated[Path, typer.Argument(help="a submission, or the run folder that has it")]

TaskName = Annotated[str, typer.Option(help="a folder in prompts/tasks/")]

TaskOf = Annotated[str | None, typer.Option(help="else that of the run folder, else judgment")]

Embeddings = Annotated[
    str, typer.Option(help="dialogues: what compares texts; ngrams, a model's folder, or URL#MODEL")
]

JudgeName = Annotated[
    str, typer.Option(help="dialogues: who says that two alike events are one; agree, or URL#MODEL")
]


def task_of(name: str | None, handed_in: Path) -> tuple[str, str]:
    """Return which task a hand-in is of, and what errors say where no run folder says so.

    Raises:
        UserError: The run folder says another task.
    """
    folder = handed_in if (handed_in / "manifest.json").exists() else handed_in.parent
    known = generation(folder).get("task")
    if known is None:
        name = name or "judgment"
        return name, f" (read as task {name!r}: is that right?)"
    if name not in (None, known):
        raise UserError(f"{folder}: is a run of the task {known!r}, not {name!r}")
    return known, ""


@contextmanager
def guarded(
    skipped: Skipped, *outputs: Path | None, inputs: Sequence[Path | None], told: str = ""
) -> Iterator[None]:
    """Refuse to write over an input; say with an error what was skipped before it, and `told`."""
    kept = {path.resolve() for path in inputs if path}
    for path in outputs:
        if path and (path.resolve() in kept or (path.exists() and path.name in OF_A_RUN)):
            raise UserError(f"{path}: is read here or belongs to a run; write somewhere else")
    try:
        yield
    except UserError as error:
        more = f"; {skipped}" if skipped.rows else ""
        of = "" if isinstance(error, Unreadable) else told
        raise UserError(f"{error}{of}{more}") from None
