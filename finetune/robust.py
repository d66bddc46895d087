"""Training objectives that weight groups of examples (after FairLex and WILDS).

Each example has one loss, the mean over its reply tokens. Each objective is a weighted sum of these
losses; only the weights differ. The weights are computed once per optimizer step, from the group
losses over all its batches and processes. They are constants in the backward pass; nevertheless the
gradient of the objective is exact.
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
from panjue.finetune.trainer import Batch, ReplyTrainer

Sums = Tensor
"""[3, 2, groups]: of each half of each group in one step, the number of examples and the sums of
their losses and `slopes`."""

WEIGHTS = {"vrex": 0.5, "irm": 100.0, "adversarial": 1.0}
"""Method -> default weight of its penalty, from FairLex (configs/algorithm.py)."""

STATE_FILE = "robust.safetensors"

ADVERSARY_RATE = 1e-3
"""Learning rate of the adversary, one linear layer trained with Adam."""


class Objective:
    """The objective of one run, with its state between steps."""

    def __init__(
        self,
        settings: RobustConfig,
        groups: Sequence[str],
        hidden: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        """Start with equal weights; `hidden` is the size of the model's hidden states."""
        self.settings = settings
        self.groups = groups
        self.is_balanced = settings.method != "erm"  # groups are sampled equally often
        self.needs_slopes = settings.method == "irm"
        self._weight = settings.weight
        if self._weight is None:
            self._weight = WEIGHTS.get(settings.method, 0.0)
        self.log_weights = torch.zeros(len(groups), dtype=torch.float64)
        self._totals = torch.zeros(2, len(groups), dtype=torch.float64)
        self._penalties: list[float] = []
        self.adversary: torch.nn.Linear | None = None
        if settings.method == "adversarial":
            self.adversary = torch.nn.Linear(hidden, len(groups)).to(device)
            self._optimizer = torch.optim.Adam(self.adversary.parameters(), lr=ADVERSARY_RATE)

    def sums(self, losses: Tensor, groups: Tensor, slopes: Tensor, halves: Tensor) -> Sums:
        """Return the sums of one batch; `halves` has 0 or 1 for each example."""
        size = len(self.groups)
        values = torch.stack([torch.ones_like(losses), losses, slopes]).detach().double()
        totals = torch.zeros(3, 2 * size, dtype=torch.float64, device=losses.device)
        totals.index_add_(1, groups + size * halves, values)
        return totals.reshape(3, 2, size)

    def set_weights(self, sums: Sums, step: int) -> None:
        """Compute the weights of a step from its totals over all batches and processes.

        `step` is the number of optimizer steps before this one.
        """
        slopes = sums[2] / sums[0].clamp(min=1)
        counts, losses, _ = sums.sum(1)
        divisor = counts.clamp(min=1)
        means = losses / divisor
        self._totals += torch.stack([counts, losses]).cpu()
        present = (counts > 0).double()
        uniform = present / present.sum()
        weight = self._weight
        method = self.settings.method
        slope_weights = torch.zeros_like(slopes)
        if method == "erm":
            loss_weights = counts / counts.sum()
        elif method == "group_dro":
            self.log_weights = self.log_weights.to(means) + self.settings.step * means
            self.log_weights = self.log_weights.log_softmax(0)
            loss_weights = self.log_weights.exp()
        elif method == "vrex":  # the gradient of mean + weight * variance (unbiased)
            distance = (means - (uniform * means).sum()) * present
            centred = distance / (present.sum() - 1).clamp(min=1)
            loss_weights = uniform + 2 * weight * centred
            self._penalties.append(float((centred * means).sum()))
        else:
            loss_weights = uniform
        if method == "irm":
            # The product of two halves: the square of one mean would count its noise too.
            is_warm = step >= self.settings.warmup
            penalty = (uniform * slopes.prod(0)).sum()
            self._penalties.append(float(penalty) * is_warm)
            slope_weights = weight * uniform * slopes.flip(0) * is_warm / sums[0].clamp(min=1)
        self._loss_weights = loss_weights / divisor
        self._slope_weights = slope_weights

    def __call__(
        self,
        losses: Tensor,
        groups: Tensor,
        slopes: Tensor,
        halves: Tensor,
        *,
        states: Tensor | None = None,
        batches: int = 1,
    ) -> Tensor:
        """Return a loss of one batch, [batch] -> []; over a step its gradients add up to ours.

        `states`, for the adversary, are the prompts' mean hidden states, [batch, hidden]; `batches`
        counts those of the step, over all processes.
        """
        loss: Tensor = (self._loss_weights.to(losses)[groups] * losses).sum()
        if self.needs_slopes:
            loss = loss + (self._slope_weights.to(slopes)[halves, groups] * slopes).sum()
        if states is not None and self.adversary is not None:
            logits = self.adversary(reverse(states.float(), self._weight))
            adversary_loss = cross_entropy(logits, groups)
            self._penalties.append(float(adversary_loss.detach()))
            loss = loss + adversary_loss / batches
        return loss

    def after_step(self, accelerator: Accelerator) -> None:
        """Update the adversary with an optimizer step's gradients, summed over all processes."""
        if self.adversary is None:
            return
        for parameter in self.adversary.parameters():
            if parameter.grad is not None:
                parameter.grad = accelerator.reduce(parameter.grad, "sum")
        self._optimizer.step()
        self._optimizer.zero_grad()

    def log(self) -> Iterator[tuple[str, float]]:
        """Yield each group's mean loss, its weight, and the mean penalty since the last call.

        That is the variance, the product of slopes, or the adversary's loss in this process.
        """
        for name, count, total in zip(self.groups, *self._totals.tolist(), strict=True):
            if count:
                yield f"group_loss_{name}", total / count
        if self.settings.method == "group_dro":
            weights = self.log_weights.softmax(0).tolist()
            for name, weight in zip(self.groups, weights, strict=True):
                yield f"group_weight_{name}", weight
        if self._penalties:
            yield "penalty", sum(self._penalties) / len(self._penalties)
        self._totals.zero_()
        self._penalties.clear()

    def save(self, checkpoint: Path) -> None:
        """Write the state into a checkpoint."""
        tensors = {"log_weights": self.log_weights.cpu()}
        if self.adversary is not None:
            for name, tensor in self.adversary.state_dict().items():
                tensors[f"adversary.{name}"] = tensor.cpu()
            for i, state in self._optimizer.state_dict()["state"].items():
                for name, tensor in state.items():
                    tensors[f"adam.{i}.{name}"] = tensor.cpu()
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, checkpoint / STATE_FILE)

    def load(self, checkpoint: Path) -> None:
        """Read the state from a checkpoint."""
        tensors = load_file(checkpoint / STATE_FILE)
        self.log_weights = tensors["log_weights"]
        if self.adversary is None:
            return
        self.adversary.load_state_dict(_with_prefix("adversary.", tensors))
        moments: dict[int, dict[str, Tensor]] = {}
        for key, tensor in _with_prefix("adam.", tensors).items():
            number, _, name = key.partition(".")
            moments.setdefault(int(number), {})[name] = tensor
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": moments})


def _with_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def reverse(states: Tensor, weight: float) -> Tensor:
    """Return `states`; the backward pass multiplies their gradient by `-weight`.

    The gradient reversal layer of Ganin and Lempitsky (ICML 2015).
    """
    turned = states.view_as(states)
    if turned.requires_grad:
        turned.register_hook(lambda gradient: -weight * gradient)  # type: ignore[no-untyped-call]
    return turned


def slopes(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the derivative of each token's loss by a scale of its logits, at scale 1: [tokens].

    In closed form, so that its gradient needs no second backward pass.
    """
    expected = (logits.softmax(-1) * logits).sum(-1)
    return expected - logits.gather(-1, labels[:, None])[:, 0]


class GroupTrainer(ReplyTrainer):
    """Minimizes an objective over groups instead of the mean over tokens."""

    def __init__(self, *args: Any, objective: Objective, **kwargs: Any) -> None:
        """Prepare the trainer."""
        self.objective = objective
        self._batches = 1
        super().__init__(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute a batch's gradients; after the last batch of a step update the adversary."""
        loss: Tensor = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients:
            self.objective.after_step(self.accelerator)
        return loss

    def training_loss(self, batch: Batch, num_items_in_batch: Tensor | int | None) -> Tensor:
        """Return the batch's share of its step's objective."""
        examples = self._by_example(batch)
        if self._batches == 1:  # otherwise `get_batch_samples` has begun the step
            self._begin(self.objective.sums(*examples))
        world = self.accelerator.num_processes
        states = None
        if self.objective.adversary is not None:
            states = pooled(batch.hidden, batch.prompt_mask)
        loss = self.objective(*examples, states=states, batches=self._batches * world)
        scaled: Tensor = loss * world  # DDP divides by it
        return scaled

    def _by_example(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return each example's mean loss, group, mean slope (if needed, else 0), and half.

        The length of the prompt decides the half, so that batches and processes change nothing.
        """
        assert batch.groups is not None, "rows of finetune.data have a group"
        losses = batch.per_example(batch.losses)
        halves = batch.prompt_mask.sum(1) % 2
        of_examples = torch.zeros_like(losses)
        if self.objective.needs_slopes:
            of_examples = batch.per_example(slopes(batch.logits, batch.labels))
        return losses, batch.groups, of_examples, halves

    def _begin(self, sums: Tensor) -> None:
        totals = self.accelerator.reduce(sums.to(self.args.device), "sum")
        self.objective.set_weights(totals, self.state.global_step)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Return a step's batches. If there are several, compute all their losses first.

        This costs one more forward pass: group weights depend on the losses of the whole step.
        """
        batches, items = super().get_batch_samples(*args, **kwargs)
        self._batches = len(batches)
        if len(batches) == 1:
            return batches, items
        sums = []
        self.model.eval()  # no dropout: the random state stays as it is
        with torch.no_grad(), self.compute_loss_context_manager():
            for inputs in batches:
                batch = self.forward_pass(self.model, self._prepare_inputs(dict(inputs)))
                sums.append(self.objective.sums(*self._by_example(batch)))
        self.model.train()
        self._begin(torch.stack(sums).sum(0))
        return batches, items

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the objective's values."""
        if self.model.training:
            logs.update(self.objective.log())
        super().log(logs, start_time)

    def save_extra_state(self, checkpoint: Path) -> None:
        """Write the objective's state."""
        self.objective.save(checkpoint)

    def resume_from(self, checkpoint: Path) -> None:
        """Resume training from a checkpoint."""
        self.objective.load(checkpoint)
        super().resume_from(checkpoint)


def pooled(states: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of the states where `mask` is true: [batch, positions, n] -> [batch, n]."""
    weights = mask[:, :, None].to(states.dtype)
    mean: Tensor = (states * weights).sum(1) / weights.sum(1).clamp(min=1)
    return mean
