"""The estimate of a training's time changes nothing, and counts what is trained."""

import subprocess
import sys
from typing import Any

import pytest
import torch

from panjue.finetune.estimate import Timed, busy, estimate, evaluations, timed, waited_s

from .test_trainer import examples, made, maker, trainer  # noqa: F401  # fixtures


def test_weights_and_random_numbers_stay_as_they_are(trainer: Any) -> None:  # noqa: F811
    weights = {name: weight.clone() for name, weight in trainer.model.named_parameters()}
    state = torch.get_rng_state()
    estimated = estimate(trainer)
    assert estimated is not None
    seconds, _ = estimated
    assert seconds > 0
    assert torch.equal(torch.get_rng_state(), state)
    for name, weight in trainer.model.named_parameters():
        assert torch.equal(weight, weights[name])
        assert weight.grad is None
    assert trainer.state.num_input_tokens_seen == 0


@pytest.mark.parametrize(
    ("strategy", "every", "times"),
    [("no", None, 0), ("epoch", None, 3), ("steps", 2, 1), ("steps", 0.5, 1), ("steps", 1, 3)],
)
def test_evaluations_are_counted(
    strategy: str,
    every: float | None,
    times: int,
    trainer: Any,  # noqa: F811
) -> None:
    # Six examples, eight a step, three epochs: three steps.
    trainer.args.eval_strategy = strategy
    trainer.args.eval_steps = every
    assert evaluations(trainer) == times


@pytest.mark.parametrize(("of_token", "evaluating"), [(0.001, 0.25), (1.0, 0.5)])
def test_the_time_is_that_of_all_tokens(
    of_token: float,
    evaluating: float,
    trainer: Any,  # noqa: F811
    made: list[dict[str, Any]],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A quarter of the time to evaluate, as is measured; half where a row alone takes long."""
    tries = []

    def step(_: Any, places: list[int]) -> Timed:
        tries.append(len(places))
        tokens: int = sum(made[place]["length"] for place in places)
        return Timed(tokens * of_token * (1.0 if torch.is_grad_enabled() else 0.25))

    monkeypatch.setattr("panjue.finetune.estimate.timed", step)
    trainer.args.eval_strategy = "epoch"
    trainer.args.per_device_train_batch_size = 2
    tokens = sum(row["length"] for row in made)
    steps = 9  # two a step, three epochs
    expected = (steps * 2 / 6 * tokens + 3 * tokens * evaluating) * of_token
    estimated = estimate(trainer)
    assert estimated is not None
    seconds, _ = estimated
    assert seconds == pytest.approx(expected)
    assert tries == ([1, 2, 2] if of_token < 1 else [1])


SAID = "busy: 2 threads got 20% of their time, other programs have the rest; OMP_NUM_THREADS=1"


@pytest.mark.parametrize(
    ("step", "threads", "said"),
    [
        (Timed(seconds=10.0, processor_s=4.0, waited_s=12.0), 2, SAID),
        (Timed(seconds=10.0, processor_s=11.9, waited_s=3.0), 2, "busy: 2 threads got 60%"),
        (Timed(seconds=10.0, processor_s=12.0, waited_s=7.0), 2, ""),
        (Timed(seconds=10.0, processor_s=2.0, waited_s=8.0), 1, ""),  # it has one thread already
        (Timed(seconds=10.0, processor_s=90.0, waited_s=1.0), 64, ""),  # idle cores, small products
    ],
)
def test_a_busy_machine_is_named(step: Timed, threads: int, said: str) -> None:
    line = busy(step, threads)
    assert line.startswith(said)
    assert bool(line) == bool(said)


def test_the_processor_time_of_a_step_is_that_of_this_process(
    trainer: Any,  # noqa: F811
) -> None:
    """Beside busy processes; nothing is asserted of how long anything takes."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        before = waited_s()
        step = timed(trainer, [0, 1])
        after = waited_s()
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert step.processor_s > 0
    assert 0 <= step.waited_s <= after - before
    assert isinstance(busy(step, torch.get_num_threads()), str)
