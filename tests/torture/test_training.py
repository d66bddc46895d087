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
from tests.finetune.conftest import adapter_bytes

PANJUE = str(Path(sys.executable).with_name("panjue"))
STEPS = 30
WORDS = [f"trainer.max_steps={STEPS}", "trainer.save_steps=2"]
EVALUATIONS = {1: ["trainer.eval_steps=2", f"patience={STEPS}"], 2: ["trainer.eval_strategy='no'"]}


def kill(words: list[str], run: Path, draw: random.Random) -> None:
    """Start the training; kill it while a checkpoint is written, file by file, or soon after."""
    before = files_in(run / "checkpoints")
    wanted = draw.randint(0, 9)
    command = [PANJUE, "sft", *words, f"run={run}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as running:
        while running.poll() is None and len(files_in(run / "checkpoints") - before) < wanted:
            time.sleep(0.001)
        time.sleep(draw.choice([0, draw.uniform(0, 5)]))
        running.kill()
        _, said = running.communicate()
    assert running.returncode in (0, -signal.SIGKILL), said.decode()


def files_in(checkpoints: Path) -> set[Path]:
    with suppress(FileNotFoundError):  # an old checkpoint goes while we look
        return set(checkpoints.glob("checkpoint-*/*"))
    return set()


@pytest.mark.endurance
@pytest.mark.parametrize("keep", [1, 2])
def test_a_killed_training_ends_in_the_same_weights(
    workshop: Path, tmp_path: Path, keep: int
) -> None:
    run = tmp_path / "run"
    draw = random.Random(keep)
    complete = None
    order = "group_by_length" if keep == 1 else "random"
    limits = [f"trainer.save_total_limit={keep}", f"trainer.train_sampling_strategy={order}"]
    words = [str(workshop / "sft.yaml"), *WORDS, *EVALUATIONS[keep], *limits]
    for _ in range(10):
        kill(words, run, draw)
        newest = newest_complete(run / "checkpoints")
        if complete is not None:
            assert newest is not None, "the last complete checkpoint is gone"
            assert step(newest) >= step(complete)
        if newest is not None:
            load_file(newest / "adapter_model.safetensors")
            torch.load(newest / "optimizer.pt", weights_only=True)
        complete = newest
    for place in (run, tmp_path / "once"):
        app(["sft", *words, f"run={place}"], standalone_mode=False)
    assert adapter_bytes(run) == adapter_bytes(tmp_path / "once")
    steps = [row["step"] for _, row in read_lines(run / "log.jsonl") if "loss" in row]
    assert steps == list(range(1, STEPS + 1)), "one loss a step, in order"


def step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])
