"""Group-robust objectives: numbers by hand, gradients against autograd, resuming, real steps."""

import json
import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy

from panjue.finetune.robust import Balanced, Objective, RobustConfig, reverse, slopes
from panjue.finetune.sft import main as sft
from panjue.finetune.trainer import per_example, pooled
from panjue.prompts.errors import UserError
from panjue.prompts.files import dump

CPU = Accelerator(cpu=True)
GROUPS = ("a", "b", "c")


def objective(method: str, **settings: Any) -> Objective:
    chosen = RobustConfig.model_validate({"method": method, "by": "g", **settings})
    return Objective(chosen, GROUPS, hidden=4)


def value(made: Objective, losses: Tensor, groups: list[int], step: int = 0, **more: Any) -> Tensor:
    return made(losses, torch.tensor(groups), step, CPU, **more)


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
    torch.autograd.backward(means.mean() + 0.7 * means.var(unbiased=False))
    torch.testing.assert_close(ours, losses.grad, rtol=1e-3, atol=1e-5)


def test_group_dro_by_hand() -> None:
    made = objective("group_dro", step=0.5)
    found = value(made, torch.tensor([1.0, 3.0, 4.0]), [0, 0, 1])
    # Means 2 and 4, the third group has none: weights e^1, e^2 and e^0, scaled to 1.
    grown = torch.tensor([1.0, 2.0, 0.0]).exp()
    weights = grown / grown.sum()
    torch.testing.assert_close(made.weights.float(), weights)
    assert found.item() == pytest.approx(float(weights[0] * 2 + weights[1] * 4), rel=1e-5)
    value(made, torch.tensor([1.0]), [2])
    assert made.weights.sum().item() == pytest.approx(1)


def test_slopes_are_the_derivative_by_a_factor_of_the_logits() -> None:
    logits, labels = torch.randn(5, 7), torch.tensor([0, 1, 2, 3, 6])
    for i in range(5):
        factor = torch.ones((), requires_grad=True)
        torch.autograd.backward(cross_entropy(logits[i : i + 1] * factor, labels[i : i + 1]))
        torch.testing.assert_close(slopes(logits, labels)[i], factor.grad)


def test_the_gradient_of_irm_is_that_of_the_squares() -> None:
    groups, weight = [0, 0, 1], 0.5
    slope = torch.tensor([0.5, -0.1, 0.3], requires_grad=True)
    made = objective("irm", weight=weight, warmup=2)
    losses = torch.zeros(3, requires_grad=True)
    before = value(made, losses, groups, step=1, slopes=slope)
    assert before.item() == 0, "no penalty yet"
    torch.autograd.backward(value(made, losses, groups, step=2, slopes=slope))
    ours, slope.grad = slope.grad, None
    torch.autograd.backward(weight * (group_means(slope, groups) ** 2).mean())
    torch.testing.assert_close(ours, slope.grad)
    # (0.2² + 0.3²) / 2, in both calls.
    assert dict(made.log())["penalty"] == pytest.approx(0.065)


def test_the_reversal_turns_the_encoders_gradient_and_not_the_adversarys() -> None:
    torch.manual_seed(0)
    encoder, states = torch.nn.Linear(4, 4), torch.randn(6, 4)
    made = objective("adversarial", weight=0.5)
    assert made.adversary is not None
    groups = torch.tensor([0, 1, 2, 0, 1, 2])

    def gradients(turned: bool) -> tuple[Tensor, Tensor]:
        assert made.adversary is not None
        encoder.zero_grad()
        made.adversary.zero_grad()
        hidden = encoder(states)
        told = made.adversary(reverse(hidden, 0.5) if turned else hidden)
        torch.autograd.backward(cross_entropy(told, groups))
        assert encoder.weight.grad is not None
        assert made.adversary.weight.grad is not None
        return encoder.weight.grad.clone(), made.adversary.weight.grad.clone()

    plain, turned = gradients(turned=False), gradients(turned=True)
    assert plain[0].abs().max() > 0
    torch.testing.assert_close(turned[0], -0.5 * plain[0])
    torch.testing.assert_close(turned[1], plain[1])
    # The same through the objective itself.
    encoder.zero_grad()
    torch.autograd.backward(made(torch.zeros(6), groups, 0, CPU, states=encoder(states)))
    torch.testing.assert_close(encoder.weight.grad, turned[0])


def test_the_adversary_learns() -> None:
    torch.manual_seed(0)
    made = objective("adversarial")
    groups = torch.arange(30) % 3
    states = torch.nn.functional.one_hot(groups, 4).float()
    for _ in range(2000):
        torch.autograd.backward(made(torch.zeros(30), groups, 0, CPU, states=states))
        made.after_step(CPU)
        last = dict(made.log())["penalty"]
    assert last < 0.7 < torch.tensor(3.0).log()


@pytest.mark.parametrize("method", ["group_dro", "adversarial"])
def test_what_an_objective_has_learnt_survives(method: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    one, other = objective(method), objective(method)
    batch = (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 1, 2]))
    states = torch.randn(3, 4)

    def step(made: Objective) -> float:
        loss = made(*batch, 0, CPU, states=states if made.adversary else None)
        if made.adversary:
            torch.autograd.backward(loss)
        made.after_step(CPU)
        return loss.item()

    step(one)
    one.save(tmp_path)
    other.load(tmp_path)
    assert [step(one) for _ in range(3)] == [step(other) for _ in range(3)]


def test_groups_are_drawn_alike_and_the_same_in_every_run() -> None:
    groups = [0] * 900 + [1] * 90 + [2] * 10
    drawn = Counter(groups[i] for i in Balanced(groups, seed=0))
    assert sum(drawn.values()) == 1000
    assert all(abs(n - 1000 / 3) < 60 for n in drawn.values())  # four standard deviations
    again, later = Balanced(groups, seed=0), Balanced(groups, seed=0)
    later.set_epoch(1)
    assert list(again) == list(again) == list(Balanced(groups, seed=0)) != list(later)


def test_means_over_tokens_and_prompts_by_hand() -> None:
    asked = torch.tensor([[False, True, True], [True, False, False]])
    found = per_example(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([1.0, 3.0, 2.0]), asked)
    torch.testing.assert_close(found, torch.tensor([2.5, 5.0]))
    states = torch.arange(8.0).reshape(1, 4, 2)
    torch.testing.assert_close(
        pooled(states, torch.tensor([[True, True, False]])), torch.tensor([[1.0, 2.0]])
    )


HALVES = """
import os, torch
from accelerate import Accelerator
from panjue.finetune.robust import Objective, RobustConfig

losses = torch.tensor([0.5, 2.0, 1.0, 3.0, 4.0, 0.2])
groups = torch.tensor([0, 0, 1, 1, 2, 1])
mine = [slice(0, 2), slice(2, 6)][int(os.environ["RANK"])]
both = Accelerator(cpu=True)
assert both.num_processes == 2


class Alone:
    num_processes = 1
    reduce = staticmethod(lambda tensor, how: tensor)


def gradient(method, part, accelerator):
    chosen = RobustConfig(method=method, by="g", step=0.5, warmup=0)
    scale = torch.ones(6, requires_grad=True)
    slopes = (losses * scale)[part] if method == "irm" else None
    made = Objective(chosen, ("a", "b", "c"), 4)
    loss = made((losses * scale)[part], groups[part], 0, accelerator, slopes=slopes)
    torch.autograd.backward(loss)
    return scale.grad


for method in ("erm", "group_uniform", "group_dro", "vrex", "irm"):
    ours = both.reduce(gradient(method, mine, both), "mean")
    torch.testing.assert_close(ours, gradient(method, slice(0, 6), Alone), msg=method)
"""


def test_two_processes_have_the_gradient_of_one(tmp_path: Path) -> None:
    (tmp_path / "halves.py").write_text(HALVES, "utf-8")
    both = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    running = [
        subprocess.Popen(
            [sys.executable, tmp_path / "halves.py"],
            env={**os.environ, **both, "RANK": str(i), "LOCAL_RANK": str(i)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    said = [process.communicate(timeout=300)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], said


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@pytest.fixture
def config(workshop: Path, tmp_path: Path) -> Path:
    """Return a config of few steps on cases of three courts, one without."""
    lines = (workshop / "demo/train.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows:
        court = ["high", "low", None][row["id"] % 3]
        row["groups"] = {"court": court}
    train = tmp_path / "train.jsonl"
    train.write_text("".join(dump(row) + "\n" for row in rows), "utf-8")
    text = (workshop / "sft.yaml").read_text("utf-8")
    text = text.replace(str(workshop / "demo/train.jsonl"), str(train))
    path = tmp_path / "sft.yaml"
    path.write_text(text.replace(f"run: {workshop}/run", f"run: {tmp_path}/run"), "utf-8")
    return path


STEPS = (
    "trainer.max_steps=4", "trainer.save_steps=2", "trainer.eval_strategy='no'",
    "trainer.logging_steps=1", "trainer.gradient_accumulation_steps=2", "score_examples=0",
)  # fmt: skip


@pytest.mark.parametrize(
    "method", ["erm", "group_uniform", "group_dro", "vrex", "irm", "adversarial"]
)
def test_real_steps_with_accumulation(method: str, config: Path, tmp_path: Path) -> None:
    sft(config, [*STEPS, f"robust.method={method}", "robust.by=court", "robust.warmup=2"])
    log = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    steps = [entry for entry in log if "loss" in entry]
    assert len(steps) == 4
    assert all({"group_loss_high", "group_loss_low", "group_loss_-"} & s.keys() for s in steps)
    assert ("penalty" in steps[-1]) == (method in ("irm", "adversarial"))
    assert ("group_weight_high" in steps[-1]) == (method == "group_dro")
    # The reported loss is of one example's size whatever the accumulation.
    means = [v for s in steps for k, v in s.items() if k.startswith("group_loss_")]
    if method in ("erm", "group_uniform"):
        assert min(means) * 0.9 <= steps[0]["loss"] <= max(means) * 1.1


def test_a_resumed_run_ends_in_the_same_weights(config: Path, tmp_path: Path) -> None:
    words = [*STEPS, "robust.method=group_dro", "robust.by=court"]
    sft(config, words)
    whole = (tmp_path / "run/adapter/adapter_model.safetensors").read_bytes()
    (tmp_path / "run/adapter").rename(tmp_path / "first")
    (tmp_path / "run/checkpoints/checkpoint-4/complete").unlink()
    sft(config, words)
    assert (tmp_path / "run/adapter/adapter_model.safetensors").read_bytes() == whole


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["robust.by=judge"], "no example to train on has a group by 'judge'"),
        (["robust.by=court", "trainer.packing=true"], "robust: packs hold examples"),
        (["robust.by=court", "robust.method=dro"], "robust.method"),
        (["robust.by=court", "groups=nowhere.jsonl"], "groups: no file"),
    ],
)
def test_what_cannot_be(config: Path, words: list[str], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        sft(config, [*STEPS, *words])
