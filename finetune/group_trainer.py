"""The trainer of an objective that looks at groups of examples: `finetune.robust` in a training."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from panjue.finetune.robust import Objective, slopes
from panjue.finetune.samplers import balanced
from panjue.finetune.trainer import Batch, PartsTrainer


class GroupTrainer(PartsTrainer):
    """Minimizes an objective over groups in place of the tokens' mean.

    Args:
        objective: What is minimized.
        args, kwargs: As `PartsTrainer` has them.
    """

    def __init__(self, *args: Any, objective: Objective, **kwargs: Any) -> None:
        """Prepare the trainer."""
        self._objective, self._batches = objective, 1
        super().__init__(*args, **kwargs)
        self.add_callback(AfterStep(self))

    def training_loss(self, batch: Batch, num_items_in_batch: Tensor | int | None) -> Tensor:
        """Return what a batch gives to its step's objective."""
        losses, groups, of_slopes = self._by_example(batch)
        if self._batches == 1:  # else `get_batch_samples` has looked at all of them
            self._begin(self._objective.sums(losses, groups, of_slopes))
        world = self.accelerator.num_processes
        adversarial = self._objective.adversary is not None
        loss = self._objective(
            losses,
            groups,
            slopes=of_slopes,
            states=pooled(batch.hidden, batch.prompts) if adversarial else None,
            batches=self._batches * world,
        )
        whole: Tensor = loss * world  # DDP divides by it
        return whole

    def _by_example(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return every row's mean loss, its group, and its mean slope where that is wanted."""
        assert batch.groups is not None, "rows of finetune.data have their groups"
        of_slopes = None
        if self._objective.wants_slopes:
            of_slopes = batch.per_example(slopes(batch.logits, batch.labels))
        return batch.per_example(batch.losses), batch.groups, of_slopes

    def _begin(self, sums: Tensor) -> None:
        whole = self.accelerator.reduce(sums.to(self.args.device), "sum")
        self._objective.begin(whole, self.state.global_step)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Return a step's batches. Where there are several, the objective sees them all before.

        That is a forward pass more: how groups are weighed depends on the losses of the whole step.
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
        """Draw every group equally often where the objective wants it."""
        if not self._objective.is_balanced:
            return super()._get_train_sampler(train_dataset)
        rows = self.train_dataset if train_dataset is None else train_dataset
        self._sampler = balanced(rows["group"][:], self.args.seed)
        return self._sampler

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add what the objective has to say."""
        if self.model.training:
            logs.update(self._objective.log())
        super().log(logs, start_time)

    def save_further_state(self, checkpoint: Path) -> None:
        """Write what the objective has learnt of the groups."""
        self._objective.save(checkpoint)

    def resume_from(self, checkpoint: Path) -> None:
        """Go on with the training that left a checkpoint."""
        # Here, since with DeepSpeed the trainer calls no hook of ours when it loads the weights.
        self._objective.load(checkpoint)
        super().resume_from(checkpoint)


class AfterStep(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Tells the objective when the weights have moved."""

    def __init__(self, trainer: GroupTrainer) -> None:
        """Tell the objective of `trainer`."""
        self._trainer = trainer

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Pass it on."""
        self._trainer._objective.after_step(self._trainer.accelerator)


def pooled(states: Tensor, here: Tensor) -> Tensor:
    """Return the mean of the states where `here` is true: [batch, places, n] -> [batch, n]."""
    kept = here[:, :, None].to(states.dtype)
    mean: Tensor = (states * kept).sum(1) / kept.sum(1).clamp(min=1)
    return mean
