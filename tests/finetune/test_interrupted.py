"""A training that is stopped or killed goes on as if nobody had disturbed it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGTERM, Signals
from typing import NamedTuple

import pytest

from panjue.finetune.checkpoints import newest_complete

from .conftest import adapter_bytes, lend_classifier, logged, main

AT_THE_END = ["trainer.max_steps=8", "trainer.eval_strategy='no'", "trainer.save_steps=8"]
BY_LENGTH = [*AT_THE_END, "trainer.train_sampling_strategy=group_by_length"]
BY_EPOCH = ["trainer.max_steps=20", "trainer.eval_strategy=epoch", "trainer.save_strategy=epoch"]
DROPOUT = "lora.lora_dropout=0.2"
"""Without the random state of the checkpoint, the steps after it would differ."""
OFTEN = [DROPOUT, "trainer.eval_steps=3", "trainer.save_steps=3"]


class Disturbance(NamedTuple):
    """A signal in a method of the training at a step, and what is left: the newest checkpoint."""

    method: str
    step: int
    signal: Signals
    checkpoint: int
    words: list[str]


DISTURBANCES = {
    "stopped": Disturbance("on_log", 2, SIGTERM, 3, AT_THE_END),
    "interrupted": Disturbance("on_log", 2, SIGINT, 3, BY_LENGTH),
    "stopped-in-evaluation": Disturbance("evaluation_loop", 6, SIGTERM, 7, [DROPOUT]),
    "killed-in-evaluation": Disturbance("evaluation_loop", 6, SIGKILL, 3, OFTEN),
    "killed-in-the-last": Disturbance("evaluation_loop", 20, SIGKILL, 14, BY_EPOCH),
}

FORKS = """
import json, os, sys
from panjue.finetune.journal import Journal
from panjue.finetune.trainer import ReplyTrainer
from panjue.prompts.cli import main

def train(method, step, number, words):
    place = Journal if method == "on_log" else ReplyTrainer
    plain = getattr(place, method)

    def disturbed(self, *args, **kwargs):
        state = args[1] if method == "on_log" else self.state
        if state.global_step == step:  # twice: `make` and launchers pass on what all got
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
        return plain(self, *args, **kwargs)

    setattr(place, method, disturbed)
    sys.argv[1:] = ["sft", *words]
    main()

ends = []
for errors, *disturbance in json.loads(sys.argv[1]):
    if not (child := os.fork()):
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
        train(*disturbance)
        sys.exit(0)
    ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(ends))
"""
"""Each training is a process of its own, forked from one that has imported torch for all."""


class Ended(NamedTuple):
    """How the process of a training ended."""

    run: Path
    code: int
    errors: str


@pytest.fixture(scope="module")
def ended(
    trained: Path, workshop: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Ended]:
    """Return how the disturbed trainings ended, by name."""
    folder = tmp_path_factory.mktemp("ended")
    tries = []
    for name, (method, step, number, _, words) in DISTURBANCES.items():
        lend_classifier(workshop, folder / name)
        command = [f"{workshop}/sft.yaml", f"run={folder}/{name}", *words]
        tries.append((f"{folder}/{name}.err", method, step, number, command))
    command = [sys.executable, "-c", FORKS, json.dumps(tries)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout.splitlines()[-1])
    ends = {}
    for name, code in zip(DISTURBANCES, codes, strict=True):
        ends[name] = Ended(folder / name, code, (folder / f"{name}.err").read_text("utf-8"))
    return ends


Undisturbed = Callable[[list[str]], Path]


@pytest.fixture(scope="module")
def undisturbed(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Return what gives the run folder of a training with these words that nobody disturbed."""
    folder, made = tmp_path_factory.mktemp("undisturbed"), dict[tuple[str, ...], Path]()

    def once(words: list[str]) -> Path:
        run = made.setdefault(tuple(words), folder / str(len(made)))
        main(workshop / "sft.yaml", [f"run={run}", *words])  # a finished one is left alone
        return run

    return once


def losses(run: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["eval_loss"]) for row in logged(run, "eval_loss")]


@pytest.mark.parametrize("name", DISTURBANCES)
def test_a_disturbed_training_goes_on_from_its_newest_checkpoint(
    name: str, ended: dict[str, Ended], undisturbed: Undisturbed, workshop: Path
) -> None:
    _, _, number, checkpoint, words = DISTURBANCES[name]
    run, code, errors = ended[name]
    if number == SIGKILL:
        assert code == -SIGKILL, errors
    else:
        assert code == 128 + number, errors
        assert errors.count("stopping after this step is saved") == 1
        assert "which is saved; run the same command to resume" in errors.splitlines()[-1]
    assert "Traceback" not in errors
    assert not (run / "adapter").exists()
    newest = newest_complete(run / "checkpoints")
    assert newest is not None
    assert newest.name == f"checkpoint-{checkpoint}"
    main(workshop / "sft.yaml", [f"run={run}", *words])
    once = undisturbed(words)
    assert adapter_bytes(run) == adapter_bytes(once)
    assert losses(run) == losses(once)
