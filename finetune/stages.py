"""The stages of a training, as they are printed."""

from rich.console import Console

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
