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
from torch.nn.functional import cross_entropy

from panjue.finetune.data import balanced_sampler
from panjue.finetune.robust import Objective, pooled, slopes
from panjue.finetune.settings import RobustConfig
from panjue.finetune.trainer import Batch

from .conftest import ROBUST_STEPS, adapter_bytes, logged
from .conftest import main as sft

GROUPS = ("a", "b", "c")


def objective(method: str, **settings: Any) -> Objective:
    chosen = RobustConfig.model_validate({"method": method, "by": "g", **settings})
    return Objective(chosen, GROUPS, hidden=4)


def value(made: Objective, losses: Tensor, groups: list[int], step: int = 0, **more: Any) -> Tensor:
    places, none = torch.tensor(groups), torch.zeros(len(groups))
    made.set_weights(made.sums(losses, places, none, none.long()), step)
    return made(losses, places, none, none.long(), **more)


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


def test_slopes_are_the_derivative_by_a_factor_of_the_logits() -> None:
    logits, labels = torch.randn(5, 7), torch.tensor([0, 1, 2, 3, 6])
    for i in range(5):
        factor = torch.ones((), requires_grad=True)
        torch.autograd.backward(cross_entropy(logits[i : i + 1] * factor, labels[i : i + 1]))
        torch.testing.assert_close(slopes(logits, labels)[i], factor.grad)


def test_the_gradient_of_irm_is_that_of_the_product_of_two_halves() -> None:
    groups, weight, halves = [0, 0, 0, 1, 2, 2], 0.5, torch.tensor([0, 1, 0, 0, 0, 1])
    slope = torch.tensor([0.5, -0.1, 0.3, 0.7, 0.2, 0.4], requires_grad=True)
    made = objective("irm", weight=weight, warmup=2)
    losses, places = torch.zeros(6, requires_grad=True), torch.tensor(groups)

    def total(step: int) -> Tensor:
        made.set_weights(made.sums(losses, places, slope, halves), step)
        return made(losses, places, slope, halves)

    assert total(1).item() == 0, "no penalty yet"
    torch.autograd.backward(total(2))
    ours, slope.grad = slope.grad, None
    # The second group has one half in this step, hence no product.
    products = slope[[0, 2]].mean() * slope[1], slope[4] * slope[5]
    torch.autograd.backward(weight * torch.stack(products).sum() / 3)
    torch.testing.assert_close(ours, slope.grad)
    # (0.4 * -0.1 + 0.2 * 0.4) / 3 in the second call, nothing in the first.
    assert dict(made.log())["penalty"] == pytest.approx(0.04 / 3 / 2)


def test_the_weight_of_a_penalty_is_fairlexs_unless_it_is_set() -> None:
    found = {method: objective(method)._weight for method in ("vrex", "irm", "adversarial")}
    assert found == {"vrex": 0.5, "irm": 100.0, "adversarial": 1.0}
    assert objective("irm", weight=0)._weight == 0


def test_the_reversal_turns_the_encoders_gradient_and_not_the_adversarys() -> None:
    torch.manual_seed(0)
    encoder, states = torch.nn.Linear(4, 4), torch.randn(6, 4)
    made = objective("adversarial", weight=0.5)
    assert made.adversary is not None
    groups, weights = [0, 1, 2, 0, 1, 2], [encoder.weight, made.adversary.weight]
    plain_loss = cross_entropy(made.adversary(encoder(states)), torch.tensor(groups))
    plain = torch.autograd.grad(plain_loss, weights)
    assert plain[0].abs().max() > 0
    loss = value(made, torch.zeros(6), groups, states=encoder(states))
    turned = torch.autograd.grad(loss, weights)
    torch.testing.assert_close(turned[0], -0.5 * plain[0])
    torch.testing.assert_close(turned[1], plain[1])


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


def test_means_over_tokens_and_prompts_by_hand() -> None:
    asked = torch.tensor([[False, True, True], [True, False, False]])
    none = torch.tensor([])
    batch = Batch(none, asked, None, none, none, none, none)
    found = batch.per_example(torch.tensor([1.0, 3.0, 5.0]))
    torch.testing.assert_close(found, torch.tensor([2.0, 5.0]))
    states = torch.arange(8.0).reshape(1, 4, 2)
    torch.testing.assert_close(
        pooled(states, torch.tensor([[True, True, False, False]])), torch.tensor([[1.0, 2.0]])
    )


@pytest.mark.parametrize("method", ["erm", "group_uniform", "group_dro", "vrex", "irm"])
def test_batches_of_a_step_add_up_to_the_gradient_of_one(method: str) -> None:
    losses, groups = torch.tensor([0.5, 2.0, 1.0, 3.0, 4.0, 0.2]), torch.tensor([0, 0, 1, 1, 2, 1])

    def gradient(*parts: slice) -> Tensor:
        made, scale = objective(method, step=0.5, warmup=0), torch.ones(6, requires_grad=True)
        scaled, halves = losses * scale, torch.tensor([0, 1, 0, 1, 0, 0])
        pieces = [(scaled[p], groups[p], scaled[p], halves[p]) for p in parts]
        made.set_weights(torch.stack([made.sums(*piece) for piece in pieces]).sum(0), 0)
        for piece in pieces:
            torch.autograd.backward(made(*piece), retain_graph=True)
        assert scale.grad is not None
        return scale.grad

    whole = gradient(slice(0, 6))
    torch.testing.assert_close(gradient(*(slice(i, i + 1) for i in range(6))), whole)
    assert whole.abs().sum() > 0


@pytest.mark.parametrize(
    "method", ["erm", "group_uniform", "group_dro", "vrex", "irm", "adversarial"]
)
def test_real_steps_with_accumulation(method: str, courts: Path, tmp_path: Path) -> None:
    words = [f"run={tmp_path}/run", f"robust.method={method}", "robust.by=court"]
    sft(courts, [*ROBUST_STEPS, *words, "robust.warmup=2"])
    steps = logged(tmp_path / "run", "loss")
    assert len(steps) == 4
    assert all({"group_loss_high", "group_loss_low", "group_loss_-"} & s.keys() for s in steps)
    assert ("penalty" in steps[-1]) == (method in ("vrex", "irm", "adversarial"))
    assert ("group_weight_high" in steps[-1]) == (method == "group_dro")
    if method == "group_uniform":  # whatever the accumulation
        means = [value for key, value in steps[0].items() if key.startswith("group_loss_")]
        assert steps[0]["loss"] == pytest.approx(sum(means) / len(means), rel=0.05)


@pytest.mark.parametrize("method", ["group_dro", "adversarial"])
def test_a_resumed_run_ends_in_the_same_weights(method: str, courts: Path, tmp_path: Path) -> None:
    """Of its second epoch too: an epoch is two steps here; step 5 is of the moments of step 3."""
    run = tmp_path / "run"
    words = [*ROBUST_STEPS, f"run={run}", f"robust.method={method}", "robust.by=court"]
    words += ["batch=64", "trainer.per_device_train_batch_size=32", "trainer.save_steps=3"]
    words += ["trainer.max_steps=5"]
    sft(courts, words)
    whole = adapter_bytes(run)
    shutil.rmtree(run / "adapter")
    (run / "checkpoints/checkpoint-5/complete").unlink()
    sft(courts, words)
    assert adapter_bytes(run) == whole
