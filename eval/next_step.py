"""The command that a user is likely to want after answers or scores."""

import shlex
from pathlib import Path

from panjue.eval.answers import Run, open_run
from panjue.eval.decide import is_fitted_on
from panjue.prompts.model import has_classifier
from panjue.prompts.plumbing.files import generation, sha256


def after_answers(folder: Path) -> str:
    """Return the command that scores the answers in `folder`, or checks them if there is no gold.

    Raises:
        UserError: There are no answers.
    """
    run = open_run(folder)
    first = next(run.examples(), None)
    is_scored = first is not None and first.answer is not None
    skip = ["--on-bad-row", "skip"] if run.provenance.get("on_bad_row") == "skip" else []
    if not is_scored:
        return command("check", folder, "--cases", run.test, *skip)
    if _can_be_fitted(run):
        return command("tune", folder)
    if run.held_out:  # `score` would count the cases that training saw as unanswered
        return command("report", folder)
    return command("score", run.test, folder, *skip)


def _can_be_fitted(run: Run) -> bool:
    """Say whether `panjue tune` takes these answers and has not been fitted on them."""
    if not (run.task.answer.fields and run.is_of_adapter and run.held_out):
        return False
    has_beliefs = bool(run.provenance["samples"]) or has_classifier(run.trained)
    return has_beliefs and not is_fitted_on(run.trained, run.provenance)


def after_scores(folder: Path, gold: Path) -> str:
    """Return the command that shows every case; empty if `folder` is no folder of answers."""
    answered = generation(folder).get("test_sha256") if folder.is_dir() else None
    if answered is None:
        return ""
    return command("report", folder, *([] if answered == sha256(gold) else ["--gold", gold]))


def command(*words: object) -> str:
    """Return a command of panjue as it is typed in a shell."""
    return shlex.join(["panjue", *map(str, words)])
