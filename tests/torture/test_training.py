"""Training that is killed at any moment gives the weights of one that was not, bit for bit."""

import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from panjue.finetune.checkpoints import newest_complete
from panjue.finetune.sft import main

PANJUE = str(Path(sys.executable).with_name("panjue"))
LONGEST_S = 600
STEPS = 30
WORDS = [f"trainer.max_steps={STEPS}", "trainer.save_steps=2", "trainer.eval_strategy='no'"]


def kill(config: Path, run: Path, draw: random.Random) -> bool:
    """Start the training and kill it at some moment; say whether it was faster than that."""
    checkpoints = run / "checkpoints"
    before = files_in(checkpoints)
    words = [PANJUE, "sft", str(config), f"run={run}", *WORDS]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as running:
        # Half of the kills come while a checkpoint is being written, file by file.
        files, began = draw.choice([0, draw.randint(1, 9)]), time.monotonic()
        pause = draw.uniform(1, 25) if not files else LONGEST_S
        while time.monotonic() - began < pause and running.poll() is None:
            if files and len(files_in(checkpoints) - before) >= files:
                break
            time.sleep(0.001)
        running.send_signal(signal.SIGKILL)
        _, told = running.communicate()
    assert running.returncode in (0, -signal.SIGKILL), told.decode()
    return running.returncode == 0


def files_in(checkpoints: Path) -> set[Path]:
    with suppress(FileNotFoundError):  # an old checkpoint goes while we look
        return set(checkpoints.glob("checkpoint-*/*"))
    return set()


@pytest.mark.promise("training survives kill -9")
@pytest.mark.parametrize("keep", [1, 2])
def test_kills(
    workshop: Path, trained: Path, tmp_path: Path, keep: int, promise: Any, full: bool
) -> None:
    config, draw = tmp_path / "sft.yaml", random.Random(keep)
    text = (workshop / "sft.yaml").read_text("utf-8")
    order = "group_by_length" if keep == 1 else "random"
    more = f"    save_total_limit: {keep}\n    train_sampling_strategy: {order}\n"
    config.write_text(text + more, "utf-8")
    complete = None
    for _ in range(10 if full else 1):
        with promise.attempt():
            over = kill(config, tmp_path / "run", draw)
            newest = newest_complete(tmp_path / "run/checkpoints")
            if complete is not None:
                assert newest is not None, "the last complete checkpoint is gone"
                assert _step(newest) >= _step(complete)
            if newest is not None:
                load_file(newest / "adapter_model.safetensors")
                torch.load(newest / "optimizer.pt", weights_only=True)
            complete = newest
            if over:
                break
    with promise.attempt():
        main(config, [f"run={tmp_path}/run", *WORDS])
        main(config, [f"run={tmp_path}/once", *WORDS])
        again, once = (
            load_file(tmp_path / name / "adapter/adapter_model.safetensors")
            for name in ("run", "once")
        )
        assert all(torch.equal(again[name], once[name]) for name in once)
        steps = [row["step"] for row in _log(tmp_path / "run") if "loss" in row]
        assert steps == list(range(1, STEPS + 1)), "one loss a step, in order"


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def _log(run: Path) -> list[dict[str, Any]]:
    from panjue.prompts.plumbing.files import read_lines

    return [row for _, row in read_lines(run / "log.jsonl")]
