"""Panjue in Python: read cases, decode replies, score submissions, ask a trained model.

Each function imports what it needs when it is called, so that `import panjue` takes no time and
changes nothing. Errors that the user can fix are a `UserError`, whose message is one line.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from panjue.prompts.plumbing.errors import UserError

if TYPE_CHECKING:
    from panjue.prompts.example import Decoded, Example
    from panjue.prompts.labels import Labels
    from panjue.prompts.task import Task
    from panjue.serve.local import LocalJudge

__version__ = "0.1.0"
__all__ = ["UserError", "__version__", "decode", "load", "load_task", "read_cases", "score"]


def load_task(name: str = "judgment") -> "Task":
    """Return a task by the name of its folder in `prompts/tasks/`.

    Raises:
        UserError: There is no such task.
    """
    from panjue.prompts import task

    return task.load_task(name)


def read_cases(path: str | Path, task: "str | Task" = "judgment") -> "Iterator[Example]":
    """Yield the cases of a file, each id once.

    Raises:
        UserError: The file cannot be read, or a row is no valid case; names the row.
    """
    from panjue.prompts.reader import Reader

    return Reader(_task(task)).read(Path(path))


def decode(
    reply: str, example: "Example", labels: "str | Path | Labels", task: "str | Task" = "judgment"
) -> "Decoded":
    """Return the answer in a model's reply, with the repairs that it took; never fails on a reply.

    Args:
        reply: The text that a model wrote.
        example: The case that it was asked about.
        labels: The known labels, or the `labels.json` of an adapter or of answers.
        task: The task, or its name.

    Raises:
        UserError: There is no such task or labels file.
    """
    from panjue.prompts.labels import load_labels

    known = load_labels(Path(labels)) if isinstance(labels, str | Path) else labels
    return _task(task).ask.decode(reply, example, known)


def score(gold: str | Path, submission: str | Path, task: str | None = None) -> dict[str, Any]:
    """Return the numbers that `panjue score GOLD SUBMISSION --json FILE` writes.

    Args:
        gold: Cases with their outcomes.
        submission: A submission, or its run folder.
        task: Name of the task; by default that of the run folder, else `judgment`.

    Raises:
        UserError: A file is missing or broken, or a case of `gold` has no outcome.
    """
    from panjue.eval.score import score as compute
    from panjue.prompts.plumbing.files import answers_in, sha256
    from panjue.prompts.plumbing.options import task_of
    from panjue.prompts.reader import Reader

    path = answers_in(Path(submission), Path(gold))
    reader = Reader(load_task(task_of(task, path)[0]))
    scores = compute(reader, Path(gold), path)
    return {
        **scores.to_json(),
        "skipped_rows": len(reader.skipped.rows),
        "submission_sha256": sha256(reader.task.data.submission.find(path)),
    }


def load(
    run: str | Path, settings: Mapping[str, Any] | None = None
) -> "AbstractContextManager[LocalJudge]":
    """Load the model of a run; its engine runs until the end of the `with` block.

    A script must call it below `if __name__ == "__main__":`, since the engine's processes import
    the script; a notebook need not. Warnings of libraries go to `debug.log` in the run folder.

    Args:
        run: The run folder of a training.
        settings: Settings of `panjue serve`, e.g. `{"engine": {"dtype": "float32"}}`.

    Raises:
        UserError: A setting is wrong, nothing trained is there, or the engine does not start.
    """
    from panjue.prompts.plumbing.debug import debug_log

    folder = Path(run)
    # Some libraries warn when they are imported; a folder that is misspelt must not appear.
    with debug_log(folder) if folder.is_dir() else nullcontext():
        from panjue.serve.local import load_judge
    return load_judge(folder, settings or {})


def _task(task: "str | Task") -> "Task":
    return load_task(task) if isinstance(task, str) else task
