"""The stages of a training, as they are printed, and the command after it."""

import os
from pathlib import Path

from rich.console import Console

from panjue.eval.next_step import command
from panjue.finetune.settings import BaseConfig, SftConfig
from panjue.prompts.task import load_task


def fits_classifier(config: SftConfig) -> bool:
    """Say whether this training fits a text classifier: the task's answers have to be decided.

    A tiny base is there to be trained further, and needs none.
    """
    is_base = isinstance(config, BaseConfig)
    return config.classifier and not is_base and bool(load_task(config.task).answer.fields)


def stages(config: SftConfig) -> int:
    """Return the number of stages; a dry run ends after the second one."""
    return 2 if config.dry_run else 4


def print_stage(config: SftConfig, console: Console, number: int, text: str) -> None:
    """Print the number of a stage and what it does."""
    console.print(f"{number}/{stages(config)} {text}", highlight=False)


def next_command(config: SftConfig) -> str:
    """Return the command after training; empty if there is no config for it.

    Only make knows a test file. Without one, the held-out cases can be answered.
    """
    recorded = (config.run / "config.yaml").read_text("utf-8").partition("\n")[0]
    source = Path(recorded.removeprefix("# "))
    answering = source.parent.parent.parent / "serve/configs" / source.name
    if not answering.exists():
        return ""
    variables = os.environ.get("MAKEFLAGS", "").partition("-- ")[2]
    test = [word for word in variables.split() if word.startswith("TEST=")]
    if "MAKELEVEL" in os.environ and (test or not variables):
        return " ".join(["make generate", f"RUN={config.run}", *test])
    words = [f"run={config.run}", f"test={config.dev or config.train}"]
    words += [] if config.dev else ["held_out=true"]
    words += [f"task={config.task}"] if config.task != "judgment" else []
    words += ["on_bad_row=skip"] if config.on_bad_row == "skip" else []
    return command("generate", answering, *words)
