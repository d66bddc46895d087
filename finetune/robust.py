"""Training objectives that weight groups of examples (after FairLex and WILDS).

Each example has one loss, the mean over its reply tokens. Each objective is a weighted sum of these
losses; only the weights differ. The weights are computed once per optimizer step, from the group
losses over all its batches and processes. They are constants in the backward pass; nevertheless the
gradient of the objective is exact.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from panjue.finetune.settings import RobustConfig
from panjue.finetune.trainer import Batch, ReplyTrainer

Sums = Tensor
"""[2, groups]: of each group in one step, the number of examples and the sum of their losses."""

STATE_FILE = "robust.safetensors"


class Objective:
    """The objective of one run, with its state between steps."""

    def __init__(self, settings: RobustConfig, groups: Sequence[str]) -> None:
        self.settings = settings
        self.groups = groups
        self.is_balanced = settings.method != "erm"  # groups are sampled equally often
        self.log_weights = torch.zeros(len(groups), dtype=torch.float64)
        self._totals = torch.zeros(2, len(groups), dtype=torch.float64)
        self._penalties: list[float] = []

    def sums(self, losses: Tensor, groups: Tensor) -> Sums:
        """Return the sums of one batch."""
        values = torch.stack([torch.ones_like(losses), losses]).detach().double()
        totals = torch.zeros(2, len(self.groups), dtype=torch.float64, device=losses.device)
        return totals.index_add(1, groups, values)

    def set_weights(self, sums: Sums) -> None:
        """Compute the weights of a step from its totals over all batches and processes."""
        counts, losses = sums
        divisor = counts.clamp(min=1)
        means = losses / divisor
        self._totals += sums.cpu()
        present = (counts > 0).double()
        uniform = present / present.sum()
        method = self.settings.method
        if method == "erm":
            weights = counts / counts.sum()
        elif method == "group_uniform":
            weights = uniform
        elif method == "group_dro":
            self.log_weights = self.log_weights.to(means) + self.settings.step * means
            self.log_weights = self.log_weights.log_softmax(0)
            weights = self.log_weights.exp()
        else:  # vrex: the gradient of mean + weight * variance (unbiased)
            distance = (means - (uniform * means).sum()) * present
            centred = distance / (present.sum() - 1).clamp(min=1)
            weights = uniform + 2 * self.settings.weight * centred
            self._penalties.append(float((centred * means).sum()))
        self._weights = weights / divisor

    def __call__(self, losses: Tensor, groups: Tensor) -> Tensor:
        """Return a loss of one batch, [batch] -> []; over a step its gradients add up to ours."""
        loss: Tensor = (self._weights.to(losses)[groups] * losses).sum()
        return loss

    def log(self) -> Iterator[tuple[str, float]]:
        """Yield each group's mean loss, its weight, and the mean variance since the last call."""
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
        save_file({"log_weights": self.log_weights.cpu()}, checkpoint / STATE_FILE)

    def load(self, checkpoint: Path) -> None:
        """Read the state from a checkpoint."""
        self.log_weights = load_file(checkpoint / STATE_FILE)["log_weights"]


class GroupTrainer(ReplyTrainer):
    """Minimizes an objective over groups instead of the mean over tokens."""

    def __init__(self, *args: Any, objective: Objective, **kwargs: Any) -> None:
        self.objective = objective
        self._batches = 1
        super().__init__(*args, **kwargs)

    def training_loss(self, batch: Batch, num_items_in_batch: Tensor | int | None) -> Tensor:
        """Return the batch's share of its step's objective."""
        examples = self._by_example(batch)
        if self._batches == 1:  # otherwise `get_batch_samples` has begun the step
            self._begin(self.objective.sums(*examples))
        loss = self.objective(*examples)
        scaled: Tensor = loss * self.accelerator.num_processes  # DDP divides by it
        return scaled

    def _by_example(self, batch: Batch) -> tuple[Tensor, Tensor]:
        assert batch.groups is not None, "there are no objectives over groups of packs"
        return batch.per_example(), batch.groups

    def _begin(self, sums: Sums) -> None:
        self.objective.set_weights(self.accelerator.reduce(sums.to(self.args.device), "sum"))

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
