"""Training that is killed at any moment gives the weights of one that was not, bit for bit."""

import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from panjue.finetune.checkpoints import newest_complete
from panjue.prompts.cli import app
from panjue.prompts.plumbing.files import read_lines

PANJUE = str(Path(sys.executable).with_name("panjue"))
LONGEST_S = 600
STEPS = 30
WORDS = [f"trainer.max_steps={STEPS}", "trainer.save_steps=2", "trainer.eval_strategy='no'"]


def kill(words: list[str], run: Path, draw: random.Random) -> bool:
    """Start the training and kill it at some moment; say whether it was faster than that."""
    checkpoints = run / "checkpoints"
    before = files_in(checkpoints)
    command = [PANJUE, "sft", *words, f"run={run}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as running:
        # Half of the kills come while a checkpoint is being written, file by file.
        files, began = draw.choice([0, draw.randint(1, 9)]), time.monotonic()
        pause = draw.uniform(1, 25) if not files else LONGEST_S
        while time.monotonic() - began < pause and running.poll() is None:
            if files and len(files_in(checkpoints) - before) >= files:
                break
            time.sleep(0.001)
        running.send_signal(signal.SIGKILL)
        _, said = running.communicate()
    assert running.returncode in (0, -signal.SIGKILL), said.decode()
    return running.returncode == 0


def files_in(checkpoints: Path) -> set[Path]:
    with suppress(FileNotFoundError):  # an old checkpoint goes while we look
        return set(checkpoints.glob("checkpoint-*/*"))
    return set()


@pytest.mark.parametrize("keep", [1, pytest.param(2, marks=pytest.mark.endurance)])
def test_a_killed_training_ends_in_the_same_weights(
    workshop: Path, tmp_path: Path, keep: int, full: bool
) -> None:
    run, draw, complete = tmp_path / "run", random.Random(keep), None
    order = "group_by_length" if keep == 1 else "random"
    limits = [f"trainer.save_total_limit={keep}", f"trainer.train_sampling_strategy={order}"]
    words = [str(workshop / "sft.yaml"), *WORDS, *limits]
    for _ in range(10 if full else 1):
        is_over = kill(words, run, draw)
        newest = newest_complete(run / "checkpoints")
        if complete is not None:
            assert newest is not None, "the last complete checkpoint is gone"
            assert step(newest) >= step(complete)
        if newest is not None:
            load_file(newest / "adapter_model.safetensors")
            torch.load(newest / "optimizer.pt", weights_only=True)
        complete = newest
        if is_over:
            break
    for place in (run, tmp_path / "once"):
        app(["sft", *words, f"run={place}"], standalone_mode=False)
    again, once = (
        load_file(place / "adapter/adapter_model.safetensors") for place in (run, tmp_path / "once")
    )
    assert all(torch.equal(again[name], once[name]) for name in once)
    steps = [row["step"] for _, row in read_lines(run / "log.jsonl") if "loss" in row]
    assert steps == list(range(1, STEPS + 1)), "one loss a step, in order"


def step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])
