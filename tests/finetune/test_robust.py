"""Group-robust objectives: numbers by hand, gradients against autograd, resuming, real steps."""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from panjue.finetune.data import balanced_sampler
from panjue.finetune.robust import Objective
from panjue.finetune.settings import RobustConfig
from panjue.finetune.trainer import Batch

from .conftest import ROBUST_STEPS, adapter_bytes, logged
from .conftest import main as sft

GROUPS = ("a", "b", "c")


def objective(method: str, **settings: Any) -> Objective:
    chosen = RobustConfig.model_validate({"method": method, "by": "g", **settings})
    return Objective(chosen, GROUPS)


def value(made: Objective, losses: Tensor, groups: list[int]) -> Tensor:
    places = torch.tensor(groups)
    made.set_weights(made.sums(losses, places))
    return made(losses, places)


def group_means(losses: Tensor, groups: list[int]) -> Tensor:
    places = torch.tensor(groups)
    return torch.stack([losses[places == g].mean() for g in sorted(set(groups))])


BATCHES = st.lists(st.tuples(st.floats(0.1, 5), st.integers(0, 2)), min_size=1, max_size=9)


@given(BATCHES)
def test_erm_is_the_mean_over_examples_and_uniform_that_over_groups(
    batch: list[tuple[float, int]],
) -> None:
    losses, groups = torch.tensor([x for x, _ in batch]), [g for _, g in batch]
    assert value(objective("erm"), losses, groups).item() == pytest.approx(losses.mean().item())
    found = value(objective("group_uniform"), losses, groups).item()
    assert found == pytest.approx(group_means(losses, groups).mean().item(), rel=1e-4)


@given(BATCHES)
def test_the_gradient_of_vrex_is_that_of_mean_and_variance(batch: list[tuple[float, int]]) -> None:
    losses = torch.tensor([x for x, _ in batch], requires_grad=True)
    groups = [g for _, g in batch]
    torch.autograd.backward(value(objective("vrex", weight=0.7), losses, groups))
    ours, losses.grad = losses.grad, None
    means = group_means(losses, groups)
    variance = means.var() if len(means) > 1 else means.sum() * 0
    torch.autograd.backward(means.mean() + 0.7 * variance)
    torch.testing.assert_close(ours, losses.grad, rtol=1e-3, atol=1e-5)


def test_group_dro_by_hand() -> None:
    made = objective("group_dro", step=0.5)
    found = value(made, torch.tensor([1.0, 3.0, 4.0]), [0, 0, 1])
    # Means 2 and 4, the third group has none: weights e^1, e^2 and e^0, scaled to 1.
    weights = torch.tensor([1.0, 2.0, 0.0]).softmax(0)
    torch.testing.assert_close(made.log_weights.exp().float(), weights)
    assert found.item() == pytest.approx(float(weights[0] * 2 + weights[1] * 4), rel=1e-5)
    value(made, torch.tensor([1000.0]), [2])
    assert made.log_weights.exp().tolist() == pytest.approx([0, 0, 1]), "no overflow"


def test_every_step_has_all_groups_and_every_run_the_same_order() -> None:
    groups = [0] * 900 + [1] * 90 + [2] * 10
    places = list(balanced_sampler(groups, seed=0))
    assert len(places) == 1000
    for start in range(0, 999, 3):
        assert {groups[i] for i in places[start : start + 3]} == {0, 1, 2}, "in every step"
    times = Counter(i for i in places if groups[i] == 1)
    assert set(times.values()) <= {3, 4}
    assert len(times) == 90, "no example of a group more often than another"
    again, later = balanced_sampler(groups, seed=0), balanced_sampler(groups, seed=0)
    later.epoch = 1
    assert list(again) == list(again) == list(balanced_sampler(groups, seed=0)) != list(later)


def test_means_over_tokens_by_hand() -> None:
    asked = torch.tensor([[False, True, True], [True, False, False]])
    batch = Batch(torch.tensor([1.0, 3.0, 5.0]), asked, torch.tensor([0, 1]))
    torch.testing.assert_close(batch.per_example(), torch.tensor([2.0, 5.0]))


METHODS = ("erm", "group_uniform", "group_dro", "vrex")


@pytest.mark.parametrize("method", METHODS)
def test_batches_of_a_step_add_up_to_the_gradient_of_one(method: str) -> None:
    losses, groups = torch.tensor([0.5, 2.0, 1.0, 3.0, 4.0, 0.2]), torch.tensor([0, 0, 1, 1, 2, 1])

    def gradient(*parts: slice) -> Tensor:
        made, scale = objective(method, step=0.5), torch.ones(6, requires_grad=True)
        scaled = losses * scale
        made.set_weights(torch.stack([made.sums(scaled[p], groups[p]) for p in parts]).sum(0))
        for part in parts:
            torch.autograd.backward(made(scaled[part], groups[part]), retain_graph=True)
        assert scale.grad is not None
        return scale.grad

    whole = gradient(slice(0, 6))
    torch.testing.assert_close(gradient(*(slice(i, i + 1) for i in range(6))), whole)
    assert whole.abs().sum() > 0


@pytest.mark.parametrize("method", METHODS)
def test_real_steps_with_accumulation(method: str, courts: Path, tmp_path: Path) -> None:
    words = [f"run={tmp_path}/run", f"robust.method={method}", "robust.by=court"]
    sft(courts, [*ROBUST_STEPS, *words])
    steps = logged(tmp_path / "run", "loss")
    assert len(steps) == 4
    assert all({"group_loss_high", "group_loss_low", "group_loss_-"} & s.keys() for s in steps)
    assert ("penalty" in steps[-1]) == (method == "vrex")
    assert ("group_weight_high" in steps[-1]) == (method == "group_dro")
    if method == "group_uniform":  # whatever the accumulation
        means = [value for key, value in steps[0].items() if key.startswith("group_loss_")]
        assert steps[0]["loss"] == pytest.approx(sum(means) / len(means), rel=0.05)


def test_a_resumed_run_ends_in_the_same_weights(courts: Path, tmp_path: Path) -> None:
    """Of its second epoch too: an epoch is two steps here."""
    run = tmp_path / "run"
    words = [*ROBUST_STEPS, f"run={run}", "robust.method=group_dro", "robust.by=court"]
    words += ["batch=64", "trainer.per_device_train_batch_size=32", "trainer.save_steps=3"]
    words += ["trainer.max_steps=5"]
    sft(courts, words)
    whole = adapter_bytes(run)
    shutil.rmtree(run / "adapter")
    (run / "checkpoints/checkpoint-5/complete").unlink()
    sft(courts, words)
    assert adapter_bytes(run) == whole
