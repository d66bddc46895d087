"""A training that is stopped or killed goes on as if nobody had disturbed it."""

import signal
from collections.abc import Iterator
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGTERM, Signals
from typing import Any, NamedTuple

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from panjue.finetune.checkpoints import newest_complete
from panjue.finetune.trainer import ReplyTrainer
from panjue.prompts.plumbing.errors import Stopped

from .conftest import adapter_bytes, logged, main

AT_THE_END = ["trainer.max_steps=8", "trainer.eval_strategy='no'", "trainer.save_steps=8"]
BY_LENGTH = [*AT_THE_END, "trainer.train_sampling_strategy=group_by_length"]
BY_EPOCH = ["trainer.max_steps=14", "trainer.eval_strategy=epoch", "trainer.save_strategy=epoch"]
DROPOUT = "lora.lora_dropout=0.2"
"""Without the random state of the checkpoint, the steps after it would differ."""
OFTEN = [DROPOUT, "trainer.max_steps=9", "trainer.eval_steps=3", "trainer.save_steps=3"]


class Killed(BaseException):
    """Ends a training as SIGKILL does: nothing more is saved. `make torture` has real ones."""


@pytest.fixture
def handlers() -> Iterator[None]:
    """Give signals back to pytest: a killed training cannot."""
    before = {number: signal.getsignal(number) for number in (SIGTERM, SIGINT)}
    signal.signal(SIGINT, signal.default_int_handler)  # `make test &` ignores it
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def losses(run: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["eval_loss"]) for row in logged(run, "eval_loss")]


def steps_of(run: Path, tag: str) -> list[int]:
    """Return the steps of a curve as TensorBoard reads its files."""
    read = EventAccumulator(str(run / "tensorboard"), {"scalars": 0})
    read.Reload()
    return [event.step for event in read.Scalars(tag)] if tag in read.Tags()["scalars"] else []


class Disturbance(NamedTuple):
    """A signal in a method of the trainer at a step, and what is left: the newest checkpoint."""

    method: str
    step: int
    signal: Signals
    checkpoint: int
    words: list[str]


DISTURBANCES = {
    "stopped": Disturbance("log", 2, SIGTERM, 3, AT_THE_END),
    "interrupted": Disturbance("log", 2, SIGINT, 3, BY_LENGTH),
    "stopped-in-evaluation": Disturbance("evaluation_loop", 3, SIGTERM, 4, OFTEN),
    "killed-in-evaluation": Disturbance("evaluation_loop", 6, SIGKILL, 3, OFTEN),
    "killed-in-the-last": Disturbance("evaluation_loop", 14, SIGKILL, 13, BY_EPOCH),
}


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("name", DISTURBANCES)
def test_a_disturbed_training_goes_on_from_its_newest_checkpoint(
    name: str,
    workshop: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    method, step, number, checkpoint, words = DISTURBANCES[name]
    plain = getattr(ReplyTrainer, method)

    def disturbed(self: ReplyTrainer, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == step:
            if number == SIGKILL:
                raise Killed
            signal.raise_signal(number)
            signal.raise_signal(number)  # `make` and launchers pass on what all got
        return plain(self, *args, **kwargs)

    run, once = tmp_path / "run", tmp_path / "once"
    monkeypatch.setattr(ReplyTrainer, method, disturbed)
    with pytest.raises((Killed, Stopped)) as ended:
        main(workshop / "sft.yaml", [f"run={run}", *words])
    monkeypatch.undo()
    if isinstance(ended.value, Stopped):
        assert ended.value.exit_code == 128 + number
        assert "which is saved; run the same command to resume" in str(ended.value)
        assert capfd.readouterr().err.count("stopping after this step is saved") == 1
    assert not (run / "adapter").exists()
    assert newest_complete(run / "checkpoints") == run / f"checkpoints/checkpoint-{checkpoint}"
    for folder in (run, once):
        main(workshop / "sft.yaml", [f"run={folder}", *words])
    assert adapter_bytes(run) == adapter_bytes(once)
    assert losses(run) == losses(once)
    for event, key in (("train/loss", "loss"), ("eval/loss", "eval_loss")):
        steps = [row["step"] for row in logged(run, key)]
        assert steps_of(run, event) == steps, "what is made again is in the curve once"
