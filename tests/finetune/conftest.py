"""Trainings in processes of their own: what takes seconds, their imports, is done once for all."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from panjue.prompts.plumbing.files import dump

SIDE_BY_SIDE = """
import json, os, signal, sys
from pathlib import Path
import torch
from torch.distributed.distributed_c10d import _get_default_group
from panjue.finetune import sft
from panjue.finetune.trainer import ReplyTrainer
from panjue.prompts.plumbing.errors import Stopped

for words in json.loads(sys.argv[2]):
    sft.main(Path(sys.argv[1]), words)

def signalled(self, *given, **more):
    if os.environ["RANK"] == "1" and self.state.global_step == 1:
        ReplyTrainer.training_loss = lose
        os.kill(os.getpid(), signal.SIGTERM)
    return lose(self, *given, **more)

*scored, run = json.loads(sys.argv[3])
lose, ReplyTrainer.training_loss = ReplyTrainer.training_loss, signalled
try:
    sft.main(Path(sys.argv[1]), [*scored, f"run={run}-stopped"])
except Stopped as stopped:
    print("process", os.environ["RANK"], stopped)
for name in ("stopped", "once"):
    sft.main(Path(sys.argv[1]), [*scored, f"run={run}-{name}"])

options = _get_default_group()._get_backend(torch.device("cpu")).options
print("waited at most", options._timeout.total_seconds(), "seconds")
"""
WAITS = "trainer.ddp_timeout=4321"
ROBUST_STEPS = (
    "trainer.max_steps=4", "trainer.save_steps=2", "trainer.eval_strategy='no'",
    "trainer.logging_steps=1", "trainer.gradient_accumulation_steps=2", "score_examples=0",
)  # fmt: skip
EXACT = ("trainer.save_strategy='no'", "dtype=float32", "trainer.bf16=false")


def robust_words(method: str) -> list[str]:
    """Return the words of a training by a group objective that processes must not change."""
    objective = [f"robust.method={method}", "robust.by=court", "robust.weight=5", "robust.step=0.5"]
    return [*ROBUST_STEPS, *objective, *EXACT]


PLAIN_WORDS = ["trainer.max_steps=4", "trainer.eval_strategy='no'", *EXACT[:1], *EXACT[2:]]
"""The words of a training by the mean over tokens, of which the same holds."""

SCORED_WORDS = (
    "trainer.max_steps=4", "trainer.eval_steps=2", "trainer.save_steps=2", "score_examples=3",
    "trainer.load_best_model_at_end=false", *EXACT[1:],
)  # fmt: skip
"""The words of a training in which one of two processes gets a signal."""


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


@dataclass(frozen=True)
class Trained:
    """What two processes trained together: a run folder each, named after its objective."""

    folder: Path
    said: str


@pytest.fixture(scope="session")
def two_processes(courts: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return the trainings of one launch of two processes that meet over gloo."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "train.py").write_text(SIDE_BY_SIDE, "utf-8")
    half, many = "trainer.per_device_train_batch_size", "trainer.gradient_accumulation_steps"
    trainings = [
        [f"run={folder}/plain", *PLAIN_WORDS, f"{half}=4", WAITS],
        *(
            [f"run={folder}/{method}", *robust_words(method), f"{half}=2", f"{many}=2"]
            for method in ("vrex", "group_dro")
        ),
    ]
    # accelerate's --cpu starts a single process unless there is MPI; its launcher for several
    # GPUs starts them, and on a CPU they meet over gloo.
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
    launch += ["--num_processes=2", "--num_machines=1", "--mixed_precision=no"]
    launch += ["--dynamo_backend=no", "--main_process_port=0"]
    scored = [*SCORED_WORDS, f"{half}=4", f"{folder}/scored"]
    words = [str(folder / "train.py"), str(courts), json.dumps(trainings), json.dumps(scored)]
    done = subprocess.run([*launch, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Trained(folder, done.stdout)
