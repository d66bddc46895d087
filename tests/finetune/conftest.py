"""Words of short trainings, and cases in groups."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from panjue.finetune.settings import SftConfig, sft_settings
from panjue.prompts.plumbing.files import dump, read_lines

ROBUST_STEPS = (
    "trainer.max_steps=4", "trainer.save_steps=2", "trainer.eval_strategy='no'",
    "trainer.logging_steps=1", "batch=16", "trainer.per_device_train_batch_size=8",
)  # fmt: skip
UNEVALUATED = ("trainer.max_steps=1", "trainer.eval_strategy='no'", "trainer.save_strategy='no'")
EXACT = ("dtype=float32", "trainer.bf16=false")


def main(path: Path, words: Sequence[str] = ()) -> None:
    """Train with a config file and words, as the command does in one process."""
    from panjue.finetune.sft import train

    train(sft_settings(path, words))


def a_config(**settings: object) -> SftConfig:
    """Return a config of files that nobody reads."""
    return SftConfig.model_validate({"run": "r", "model": "m", "train": "t.jsonl", **settings})


def adapter_bytes(run: Path) -> bytes:
    """Return the weights of a trained adapter as they are on disk."""
    return (run / "adapter/adapter_model.safetensors").read_bytes()


def logged(run: Path, key: str) -> list[dict[str, Any]]:
    """Return the entries of a training's log that have this key."""
    return [row for _, row in read_lines(run / "log.jsonl") if key in row]


def robust_words(method: str) -> list[str]:
    """Return the words of a training by a group objective that processes must not change."""
    objective = [f"robust.method={method}", "robust.by=court", "robust.weight=5", "robust.step=0.5"]
    once = ("trainer.max_steps=2", "trainer.save_strategy='no'", "batch=8")
    return [*ROBUST_STEPS, *once, *objective, *EXACT]


@pytest.fixture(scope="session")
def courts(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the config of a training on cases of three courts, one of them unknown."""
    folder = tmp_path_factory.mktemp("courts")
    lines = (workshop / "demo/train.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows:
        row["groups"] = {"court": ["high", "low", None][row["id"] % 3]}
    train = folder / "train.jsonl"
    train.write_text("".join(dump(row) + "\n" for row in rows), "utf-8")
    text = (workshop / "sft.yaml").read_text("utf-8")
    text = text.replace(str(workshop / "demo/train.jsonl"), str(train))
    (folder / "sft.yaml").write_text(text.replace(f"run: {workshop}/run", "run: nowhere"), "utf-8")
    return folder / "sft.yaml"
