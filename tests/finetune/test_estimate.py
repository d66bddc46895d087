"""The estimate of a training's time changes nothing, and counts what is trained."""

from typing import Any

import pytest
import torch

from panjue.finetune import estimate
from panjue.finetune.estimate import evaluations, training_seconds

from .test_trainer import examples, made, maker, trainer  # noqa: F401  # fixtures


def test_weights_and_random_numbers_stay_as_they_are(trainer: Any) -> None:  # noqa: F811
    weights = {name: weight.clone() for name, weight in trainer.model.named_parameters()}
    state = torch.get_rng_state()
    seconds = training_seconds(trainer)
    assert seconds is not None
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

    def seconds(_: Any, places: list[int]) -> float:
        tries.append(len(places))
        tokens: int = sum(made[place]["length"] for place in places)
        return tokens * of_token * (1.0 if torch.is_grad_enabled() else 0.25)

    monkeypatch.setattr(estimate, "seconds_of", seconds)
    trainer.args.eval_strategy = "epoch"
    trainer.args.per_device_train_batch_size = 2
    tokens = sum(row["length"] for row in made)
    steps = 9  # two a step, three epochs
    expected = (steps * 2 / 6 * tokens + 3 * tokens * evaluating) * of_token
    assert training_seconds(trainer) == pytest.approx(expected)
    assert tries == ([1, 2, 2] if of_token < 1 else [1])
