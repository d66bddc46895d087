"""Words of short trainings, and what they wrote."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from panjue.finetune.settings import SftConfig, sft_settings
from panjue.prompts.plumbing.files import read_lines

UNEVALUATED = ("trainer.max_steps=1", "trainer.eval_strategy='no'", "trainer.save_strategy='no'")
EXACT = ("dtype=float32", "trainer.bf16=false")


def main(path: Path, words: Sequence[str] = ()) -> None:
    """Train with a config file and words, as the command does in one process."""
    from panjue.finetune.sft import train

    config = sft_settings(path, words)
    lend_rows(path.parent, config.run)
    train(config)


def lend_rows(workshop: Path, run: Path) -> None:
    """Spare a training its text classifier and token rows, if those of `trained` are the same."""
    for made in workshop.glob("run/rows/*/"):
        place = run / "rows" / made.name
        if not place.exists():
            shutil.copytree(made, place)


def a_config(**settings: object) -> SftConfig:
    """Return a config of files that nobody reads."""
    return SftConfig.model_validate({"run": "r", "model": "m", "train": "t.jsonl", **settings})


def adapter_bytes(run: Path) -> bytes:
    """Return the weights of a trained adapter as they are on disk."""
    return (run / "adapter/adapter_model.safetensors").read_bytes()


def logged(run: Path, key: str) -> list[dict[str, Any]]:
    """Return the entries of a training's log that have this key."""
    return [row for _, row in read_lines(run / "log.jsonl") if key in row]
