"""Objectives that look at groups of examples, not at their mean alone (after FairLex and WILDS).

All work on one loss per example, the mean over its reply's tokens, and all but one are weighted
sums of the groups' mean losses: what differs is where the weights come from. The weights are
computed from all processes' examples and are constants to the gradient, which is exact for each.

A batch is what one forward pass sees: with gradient accumulation each part has its own weights.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import Sampler

from panjue.prompts.config import Config

STATE = "robust.safetensors"
"""In a checkpoint: what an objective has learnt of the groups."""

ADVERSARY_RATE = 1e-3
"""Learning rate of the adversary, a single linear layer under Adam."""


class RobustConfig(Config):
    """Which objective, over which groups."""

    method: Literal["erm", "group_uniform", "group_dro", "vrex", "irm", "adversarial"] = "erm"
    """Mean over examples; over groups; worst-case weights; variance of groups; one scale that is
    best for all groups; no group to be told from the prompt's states."""
    by: str
    """Attribute of the groups. Examples whose group nobody knows are a group of their own."""
    step: float = Field(0.01, gt=0)
    """Of group_dro: how fast the weights of groups with high losses grow."""
    weight: float = Field(0.5, ge=0)
    """Of the penalty of vrex, irm and adversarial."""
    warmup: int = Field(500, ge=0)
    """Of irm: optimizer steps before the penalty counts."""


class Objective:
    """The objective of one run, with what it keeps between steps."""

    def __init__(self, settings: RobustConfig, groups: Sequence[str], hidden: int) -> None:
        """Begin with equal weights.

        Args:
            settings: Which method.
            groups: Names of the groups, by their numbers.
            hidden: Size of the model's hidden states, for the adversary.
        """
        self._settings, self._groups = settings, groups
        self.weights = torch.full((len(groups),), 1 / len(groups), dtype=torch.float64)
        self._sums = torch.zeros(3, len(groups), dtype=torch.float64)
        self._penalties: list[float] = []
        self.adversary: torch.nn.Linear | None = None
        if settings.method == "adversarial":
            self.adversary = torch.nn.Linear(hidden, len(groups))
            self._optimizer = torch.optim.Adam(self.adversary.parameters(), lr=ADVERSARY_RATE)

    @property
    def is_balanced(self) -> bool:
        """Say whether groups are drawn equally often."""
        return self._settings.method != "erm"

    @property
    def wants_slopes(self) -> bool:
        """Say whether it needs the derivative of each loss by a factor of the logits."""
        return self._settings.method == "irm"

    def __call__(  # each is of another kind
        self,
        losses: Tensor,
        groups: Tensor,
        step: int,
        accelerator: Accelerator,
        *,
        slopes: Tensor | None = None,
        states: Tensor | None = None,
    ) -> Tensor:
        """Return what to minimize, scaled so that the mean over processes is the objective.

        Args:
            losses: Of the examples, [batch].
            groups: Their groups' numbers, [batch].
            step: Optimizer steps that were done.
            accelerator: Of the trainer.
            slopes: See `wants_slopes`, [batch].
            states: Mean hidden state of each prompt, [batch, hidden]; for the adversary.
        """
        counts, means = self._over_all(losses, groups, accelerator)
        self._sums += torch.stack([means * counts, counts, counts > 0]).double().cpu()
        share = accelerator.num_processes / counts.clamp(min=1)[groups]
        loss = (self._coefficients(means, counts)[groups] * share * losses).sum()
        weight = self._settings.weight
        if slopes is not None:
            _, slope = self._over_all(slopes, groups, accelerator)
            present = (counts > 0).sum()
            self._penalties.append(float((slope**2).sum() / present))
            if step >= self._settings.warmup:
                # The gradient of the mean of squares, each of a sum over processes.
                loss = loss + weight * (2 * slope[groups] / present * share * slopes).sum()
        if states is not None and self.adversary is not None:
            self.adversary.to(states.device)
            told = self.adversary(reverse(states.float(), weight))
            guess = cross_entropy(told, groups)
            self._penalties.append(float(guess.detach()))
            loss = loss + guess
        objective: Tensor = loss
        return objective

    def _over_all(
        self, values: Tensor, groups: Tensor, accelerator: Accelerator
    ) -> tuple[Tensor, Tensor]:
        """Return how many examples of each group all processes have, and their mean values."""
        size = len(self._groups)
        here = torch.zeros(2, size, dtype=torch.float32, device=values.device)
        here[0] = torch.bincount(groups, minlength=size)
        here[1].index_add_(0, groups, values.detach().float())
        counts, sums = accelerator.reduce(here, "sum")
        return counts, sums / counts.clamp(min=1)

    def _coefficients(self, means: Tensor, counts: Tensor) -> Tensor:
        """Return the weight of every group's mean loss in the objective, [groups]."""
        present = (counts > 0).float()
        uniform = present / present.sum()
        match self._settings.method:
            case "group_dro":
                self.weights = self.weights.to(means.device)
                grown = self.weights * torch.exp(self._settings.step * means.double())
                self.weights = grown / grown.sum()
                return self.weights.float()
            case "vrex":  # the gradient of mean + weight * population variance
                centred = (means - (uniform * means).sum()) * present
                return uniform + 2 * self._settings.weight * uniform * centred
            case "group_uniform" | "irm" | "adversarial":
                return uniform
            case _:
                return counts / counts.sum()

    def after_step(self, accelerator: Accelerator) -> None:
        """Let the adversary learn from an optimizer step's gradients, those of all processes."""
        if self.adversary is None:
            return
        for parameter in self.adversary.parameters():
            if parameter.grad is not None:
                parameter.grad = accelerator.reduce(parameter.grad, "mean")
        self._optimizer.step()
        self._optimizer.zero_grad()

    def log(self) -> Iterator[tuple[str, float]]:
        """Yield every group's mean loss, its weight, and the mean penalty since the last call."""
        sums, counts, _ = self._sums.tolist()
        for name, total, count in zip(self._groups, sums, counts, strict=True):
            if count:
                yield f"group_loss_{name}", total / count
        if self._settings.method == "group_dro":
            for name, weight in zip(self._groups, self.weights.tolist(), strict=True):
                yield f"group_weight_{name}", weight
        if self._penalties:
            yield "penalty", sum(self._penalties) / len(self._penalties)
        self._sums.zero_()
        self._penalties.clear()

    def save(self, checkpoint: Path) -> None:
        """Write into a checkpoint what going on from it needs."""
        tensors = {"weights": self.weights.cpu()}
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
        self.weights = tensors["weights"]
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


class Balanced(Sampler[int]):
    """Draws every group equally often: as many examples an epoch as there are, with replacement."""

    def __init__(self, groups: Sequence[int], seed: int) -> None:
        """Take the group's number of every example; draws depend on seed and epoch alone."""
        counts = torch.bincount(torch.tensor(groups)).double()
        self._chances = (1 / counts)[torch.tensor(groups)]
        self._seed, self._epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch is next, so that a resumed one is drawn as it was."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self._chances)

    def __iter__(self) -> Iterator[int]:
        """Yield places of examples."""
        generator = torch.Generator().manual_seed(self._seed * 100_003 + self._epoch)
        yield from torch.multinomial(self._chances, len(self), True, generator=generator).tolist()


def slopes(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the derivative of each token's loss by a factor of its logits, at 1: [tokens].

    In closed form, so that its own gradient costs no second backward pass.
    """
    expected = (logits.softmax(-1) * logits).sum(-1)
    return expected - logits.gather(-1, labels[:, None])[:, 0]
