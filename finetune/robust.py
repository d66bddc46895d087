"""Objectives that look at groups of examples, not at their mean alone (after FairLex and WILDS).

All work on one loss per example, the mean over its reply's tokens, and are weighted sums of them:
what differs is where the weights come from. They are computed from the groups of a whole optimizer
step, over all its batches and all processes, and are constants to the gradient, which is exact.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from panjue.finetune.settings import RobustConfig

Sums = Tensor
"""Of a step's examples by group, [3, groups]: how many, their losses, their slopes."""

STATE = "robust.safetensors"
"""In a checkpoint: what an objective has learnt of the groups."""

ADVERSARY_RATE = 1e-3
"""Learning rate of the adversary, a single linear layer under Adam."""


class Objective:
    """The objective of one run, with what it keeps between steps."""

    def __init__(
        self,
        settings: RobustConfig,
        groups: Sequence[str],
        hidden: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        """Begin with equal weights.

        Args:
            settings: Which method.
            groups: Names of the groups, by their numbers.
            hidden: Size of the model's hidden states, for the adversary.
            device: Where the model is.
        """
        self._settings, self._groups = settings, groups
        self.log_weights = torch.zeros(len(groups), dtype=torch.float64)
        self._seen = torch.zeros(2, len(groups), dtype=torch.float64)
        self._penalties: list[float] = []
        self.adversary: torch.nn.Linear | None = None
        if settings.method == "adversarial":
            self.adversary = torch.nn.Linear(hidden, len(groups)).to(device)
            self._optimizer = torch.optim.Adam(self.adversary.parameters(), lr=ADVERSARY_RATE)

    @property
    def is_balanced(self) -> bool:
        """Say whether groups are drawn equally often."""
        return self._settings.method != "erm"

    @property
    def wants_slopes(self) -> bool:
        """Say whether it needs the derivative of each loss by a factor of the logits."""
        return self._settings.method == "irm"

    def sums(self, losses: Tensor, groups: Tensor, slopes: Tensor | None = None) -> Sums:
        """Return what one batch gives to its step: its examples' losses and slopes, by group."""
        rows = [torch.ones_like(losses), losses, torch.zeros_like(losses)]
        if slopes is not None:
            rows[2] = slopes
        found = torch.zeros(3, len(self._groups), dtype=torch.float64, device=losses.device)
        return found.index_add_(1, groups, torch.stack(rows).detach().double())

    def begin(self, sums: Sums, step: int) -> None:
        """Weigh the groups for one optimizer step.

        Args:
            sums: Of all its batches and processes.
            step: Optimizer steps that were done.
        """
        counts, losses, slopes = sums
        divisor = counts.clamp(min=1)
        means, slope = losses / divisor, slopes / divisor
        self._seen += torch.stack([counts, losses]).cpu()
        present = (counts > 0).double()
        uniform = present / present.sum()
        weight, method = self._settings.weight, self._settings.method
        of_slopes = torch.zeros_like(means)
        if method == "erm":
            chosen = counts / counts.sum()
        elif method == "group_dro":
            self.log_weights = self.log_weights.to(means) + self._settings.step * means
            self.log_weights = self.log_weights.log_softmax(0)
            chosen = self.log_weights.exp()
        elif method == "vrex":  # the gradient of mean + weight * population variance
            centred = (means - (uniform * means).sum()) * present
            chosen = uniform + 2 * weight * uniform * centred
            self._penalties.append(float((uniform * centred**2).sum()))
        else:
            chosen = uniform
        if method == "irm":
            counts_now = step >= self._settings.warmup
            self._penalties.append(float((uniform * slope**2).sum()) * counts_now)
            of_slopes = 2 * weight * uniform * slope * counts_now
        self._per_loss, self._per_slope = chosen / divisor, of_slopes / divisor

    def __call__(
        self,
        losses: Tensor,
        groups: Tensor,
        *,
        slopes: Tensor | None = None,
        states: Tensor | None = None,
        batches: int = 1,
    ) -> Tensor:
        """Return what one batch gives to the step's objective; its gradients add up to that one's.

        The value itself is no more than a weighted loss.

        Args:
            losses: Of the examples, [batch].
            groups: Their groups' numbers, [batch].
            slopes: See `wants_slopes`, [batch].
            states: Mean hidden state of each prompt, [batch, hidden]; for the adversary.
            batches: How many the step has, over all processes.
        """
        loss: Tensor = (self._per_loss.to(losses)[groups] * losses).sum()
        if slopes is not None:
            loss = loss + (self._per_slope.to(slopes)[groups] * slopes).sum()
        if states is not None and self.adversary is not None:
            told = self.adversary(reverse(states.float(), self._settings.weight))
            guess = cross_entropy(told, groups)
            self._penalties.append(float(guess.detach()))
            loss = loss + guess / batches
        return loss

    def after_step(self, accelerator: Accelerator) -> None:
        """Let the adversary learn from an optimizer step's gradients, those of all processes."""
        if self.adversary is None:
            return
        for parameter in self.adversary.parameters():
            if parameter.grad is not None:
                parameter.grad = accelerator.reduce(parameter.grad, "sum")
        self._optimizer.step()
        self._optimizer.zero_grad()

    def log(self) -> Iterator[tuple[str, float]]:
        """Yield every group's mean loss and weight, and the mean penalty, since the last call.

        The penalty is the variance of vrex, the squared slope of irm once it counts, and, of the
        examples of this process, the adversary's loss.
        """
        for name, count, total in zip(self._groups, *self._seen.tolist(), strict=True):
            if count:
                yield f"group_loss_{name}", total / count
        if self._settings.method == "group_dro":
            weights = self.log_weights.softmax(0).tolist()
            yield from (
                (f"group_weight_{n}", w) for n, w in zip(self._groups, weights, strict=True)
            )
        if self._penalties:
            yield "penalty", sum(self._penalties) / len(self._penalties)
        self._seen.zero_()
        self._penalties.clear()

    def save(self, checkpoint: Path) -> None:
        """Write into a checkpoint what going on from it needs."""
        tensors = {"log_weights": self.log_weights.cpu()}
        if self.adversary is not None:
            tensors |= {f"adversary.{k}": v.cpu() for k, v in self.adversary.state_dict().items()}
            for i, state in self._optimizer.state_dict()["state"].items():
                tensors |= {f"adam.{i}.{k}": v.cpu() for k, v in state.items()}
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()}, checkpoint / STATE
        )

    def load(self, checkpoint: Path) -> None:
        """Take up what `save` wrote."""
        tensors = load_file(checkpoint / STATE)
        self.log_weights = tensors["log_weights"]
        if self.adversary is None:
            return
        self.adversary.load_state_dict(_under("adversary.", tensors))
        moments: dict[int, dict[str, Tensor]] = {}
        for key, tensor in _under("adam.", tensors).items():
            number, _, name = key.partition(".")
            moments.setdefault(int(number), {})[name] = tensor
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": moments})


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


class Reverse(torch.autograd.Function):
    """The identity, whose gradient is turned round (Ganin and Lempitsky, ICML 2015)."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: float) -> Tensor:
        """Return `states` as they are."""
        ctx.weight = weight
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient times minus the weight."""
        return -ctx.weight * gradients[0], None


def reverse(states: Tensor, weight: float) -> Tensor:
    """Return `states`; on the way back their gradient is multiplied by `-weight`."""
    reversed_states: Tensor = Reverse.apply(states, weight)  # type: ignore[no-untyped-call]
    return reversed_states


def slopes(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the derivative of each token's loss by a factor of its logits, at 1: [tokens].

    In closed form, so that its own gradient costs no second backward pass.
    """
    expected = (logits.softmax(-1) * logits).sum(-1)
    return expected - logits.gather(-1, labels[:, None])[:, 0]
