"""The trainer for the objectives over groups of `finetune.robust`."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from panjue.finetune.robust import Objective, slopes
from panjue.finetune.samplers import balanced_sampler
from panjue.finetune.trainer import Batch, PartsTrainer


class GroupTrainer(PartsTrainer):
    """Minimizes an objective over groups instead of the mean over tokens.

    Args:
        objective: What is minimized.
        args, kwargs: As in `PartsTrainer`.
    """

    def __init__(self, *args: Any, objective: Objective, **kwargs: Any) -> None:
        """Prepare the trainer."""
        self._objective, self._batches = objective, 1
        super().__init__(*args, **kwargs)
        self.add_callback(AfterStep(self))

    def training_loss(self, batch: Batch, num_items_in_batch: Tensor | int | None) -> Tensor:
        """Return the batch's share of its step's objective."""
        losses, groups, mean_slopes = self._by_example(batch)
        if self._batches == 1:  # otherwise `get_batch_samples` has begun the step
            self._begin(self._objective.sums(losses, groups, mean_slopes))
        world = self.accelerator.num_processes
        adversarial = self._objective.adversary is not None
        loss = self._objective(
            losses,
            groups,
            slopes=mean_slopes,
            states=pooled(batch.hidden, batch.prompt_mask) if adversarial else None,
            batches=self._batches * world,
        )
        scaled: Tensor = loss * world  # DDP divides by it
        return scaled

    def _by_example(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return each example's mean loss and group, and its mean slope if needed."""
        assert batch.groups is not None, "rows of finetune.data have a group"
        mean_slopes = None
        if self._objective.needs_slopes:
            mean_slopes = batch.per_example(slopes(batch.logits, batch.labels))
        return batch.per_example(batch.losses), batch.groups, mean_slopes

    def _begin(self, sums: Tensor) -> None:
        totals = self.accelerator.reduce(sums.to(self.args.device), "sum")
        self._objective.set_weights(totals, self.state.global_step)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Return a step's batches. If there are several, compute all their losses first.

        This costs one more forward pass: group weights depend on the losses of the whole step.
        """
        batches, items = super().get_batch_samples(*args, **kwargs)
        self._batches = len(batches)
        if len(batches) > 1:
            sums = []
            self.model.eval()  # no dropout: the random state stays as it is
            with torch.no_grad(), self.compute_loss_context_manager():
                for inputs in batches:
                    batch = self.forward_pass(self.model, self._prepare_inputs(dict(inputs)))
                    sums.append(self._objective.sums(*self._by_example(batch)))
            self.model.train()
            self._begin(torch.stack(sums).sum(0))
        return batches, items

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Sample groups equally often if the objective needs it."""
        if not self._objective.is_balanced:
            return super()._get_train_sampler(train_dataset)
        rows = self.train_dataset if train_dataset is None else train_dataset
        self._sampler = balanced_sampler(rows["group"][:], self.args.seed)
        return self._sampler

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the objective's values."""
        if self.model.training:
            logs.update(self._objective.log())
        super().log(logs, start_time)

    def save_extra_state(self, checkpoint: Path) -> None:
        """Write the objective's state."""
        self._objective.save(checkpoint)

    def resume_from(self, checkpoint: Path) -> None:
        """Resume training from a checkpoint."""
        # Here, because with DeepSpeed transformers calls none of our hooks on loading weights.
        self._objective.load(checkpoint)
        super().resume_from(checkpoint)


class AfterStep(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Updates the objective after each optimizer step."""

    def __init__(self, trainer: GroupTrainer) -> None:
        """Keep the trainer that has the objective."""
        self._trainer = trainer

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Update the objective."""
        self._trainer._objective.after_step(self._trainer.accelerator)


def pooled(states: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of the states where `mask` is true: [batch, positions, n] -> [batch, n]."""
    weights = mask[:, :, None].to(states.dtype)
    mean: Tensor = (states * weights).sum(1) / weights.sum(1).clamp(min=1)
    return mean
