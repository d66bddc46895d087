"""trl's SFTTrainer with the loss where it is wanted, by part, and a score at every evaluation."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import TrainerCallback, TrainerState
from transformers.trainer_utils import EvalLoopOutput
from trl import SFTTrainer

from panjue.finetune.checkpoints import TRAINER_STATE, drop, drop_old, mark_complete
from panjue.finetune.data import IGNORED, PADDING, collate
from panjue.finetune.samplers import ByEpoch, by_length

MANAGED_SETTINGS = ("labels", "parts", "group", "skip_logits")
"""ScoreTable of a row that are not the model's, and what transformers adds for liger kernels, which
are to make the loss themselves then: it is ours."""

Score = Callable[["PartsTrainer"], dict[str, float]]


class PartsTrainer(SFTTrainer):  # type: ignore[misc]  # trl is untyped to mypy
    """Trains on rows of `finetune.data`: a loss per part of the reply, weighted if wanted.

    Args:
        parts: Names of the parts that the rows' column `parts` counts through.
        token_weights: Part -> weight of its tokens in the training loss; 1 where not named.
        score: Trainer -> the task's metrics on held-out examples; None scores nothing.
        keep: Checkpoints that stay beside the best one; None keeps all.
        args, kwargs: As trl has them.
    """

    def __init__(
        self,
        *args: Any,
        parts: Sequence[str],
        token_weights: Mapping[str, float],
        score: Score | None = None,
        keep: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Prepare trl's trainer; the rows are ready, so it must leave them alone."""
        self._parts, self._score, self._keep = parts, score, keep
        self._sampler: ByEpoch | None = None
        self._weights = torch.tensor([token_weights.get(part, 1.0) for part in parts])
        self._sums = {mode: torch.zeros(2, len(parts)) for mode in ("train", "eval")}
        super().__init__(*args, data_collator=collate, **kwargs)
        self.model_accepts_loss_kwargs = True  # so that `num_items_in_batch` is counted
        self.add_callback(EpochOfSampler(self))

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = ["input_ids", "labels", "parts", "group", "length", "seq_lengths"]

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the loss of a batch: what is minimized in training, the tokens' mean else."""
        batch = self.forward_pass(model, inputs)
        self._note(batch)
        if self.model.training:
            loss = self.training_loss(batch, num_items_in_batch)
        else:  # held-out losses stay comparable between weights
            loss = batch.losses.mean()
        return (loss, batch.outputs) if return_outputs else loss

    def training_loss(self, batch: "Batch", num_items_in_batch: Tensor | int | None) -> Tensor:
        """Return the mean loss of the step's reply tokens, each times its part's weight."""
        loss: Tensor = (batch.losses * batch.weights).sum()
        loss = loss / (len(batch.losses) if num_items_in_batch is None else num_items_in_batch)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes  # DDP divides by it
        return loss

    def forward_pass(self, model: torch.nn.Module, inputs: dict[str, Tensor]) -> "Batch":
        """Return the losses of the reply's tokens, and what else they are made of."""
        fields = {name: value for name, value in inputs.items() if name not in MANAGED_SETTINGS}
        labels, parts = inputs["labels"], inputs["parts"]
        asked = labels[:, 1:] != IGNORED
        head = self.accelerator.unwrap_model(model).get_output_embeddings()
        with logits_only_at(asked, head) as hidden:
            outputs = model(**fields, use_cache=False)
        logits, wanted = outputs.logits.float(), labels[:, 1:][asked]
        of_tokens = parts[:, 1:][asked]
        return Batch(
            losses=cross_entropy(logits, wanted, reduction="none"),
            weights=self._weights.to(logits.device)[of_tokens],
            parts=of_tokens,
            asked=asked,
            groups=inputs.get("group"),
            tokens=(parts != PADDING).sum(),
            logits=logits,
            labels=wanted,
            hidden=hidden[0],
            prompts=(labels == IGNORED) & (parts != PADDING),
            outputs=outputs,
        )

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Draw examples of like length together where that is wanted."""
        rows = self.train_dataset if train_dataset is None else train_dataset
        if self.args.train_sampling_strategy == "group_by_length":
            step = self.args.train_batch_size * self.args.gradient_accumulation_steps
            self._sampler = by_length(_lengths(rows), step, self.args.seed)
        else:
            return super()._get_train_sampler(train_dataset)
        return self._sampler

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch is next: accelerate's loaders do not reach the sampler on resuming."""
        if self._sampler:
            self._sampler.set_epoch(epoch)

    def _note(self, batch: "Batch") -> None:
        """Add a batch to the sums and counts by part, and to the count of tokens seen."""
        mode = "train" if self.model.training else "eval"
        size = len(self._parts)
        sums = torch.bincount(batch.parts, batch.losses.detach(), minlength=size)
        counts = torch.bincount(batch.parts, minlength=size)
        self._sums[mode] += torch.stack([sums, counts]).cpu()
        if mode == "train":
            # Of the state, which a checkpoint has: a training that goes on counts on.
            self.state.num_input_tokens_seen += int(self.accelerator.gather(batch.tokens).sum())

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add tokens seen and the loss by part since the last entry."""
        mode, prefix = ("train", "") if self.model.training else ("eval", "eval_")
        sums, counts = self.accelerator.reduce(self._sums[mode].to(self.args.device)).cpu()
        logs[f"{prefix}num_tokens"] = self.state.num_input_tokens_seen
        for part, total, count in zip(self._parts, sums.tolist(), counts.tolist(), strict=True):
            if count:
                logs[f"{prefix}loss_{part}"] = total / count
        self._sums[mode].zero_()
        super().log(logs, start_time)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Save a checkpoint that counts from when it is whole; only then drop old ones.

        The trainer itself would drop them before anybody could mark the new one.
        """
        folder = Path(str(self.args.output_dir))
        checkpoint = folder / f"checkpoint-{self.state.global_step}"
        if self.is_world_process_zero() and checkpoint.exists():
            drop(checkpoint)  # what a kill has left of it
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()  # each process has written its random state
        if self.is_world_process_zero():
            self.save_further_state(checkpoint)
            mark_complete(checkpoint)
            if self._keep:
                drop_old(folder, self._keep, self.state.best_model_checkpoint)

    def save_further_state(self, checkpoint: Path) -> None:
        """Write what a training like this one needs beside what the library saves: nothing."""

    def resume_from(self, checkpoint: Path) -> None:
        """Go on with the training that left a checkpoint."""
        self.train(resume_from_checkpoint=str(checkpoint))

    def take(self, checkpoint: Path) -> None:
        """Take the weights of a training that is over, of its best checkpoint where it chose."""
        self.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE))
        self._load_from_checkpoint(str(checkpoint))
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint:
            self._load_best_model()

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Measure the held-out loss, then the task's own metrics on answers made greedily.

        Here, and not in a callback, so that the best checkpoint and early stopping see them.
        """
        output = super().evaluation_loop(*args, **kwargs)
        if self._score:
            output.metrics.update({f"eval_{k}": v for k, v in self._score(self).items()})
        return output


@dataclass(frozen=True)
class Batch:
    """One forward pass. Tokens are those of replies; a row is an example.

    Attributes:
        losses, weights, parts, labels: Of every token, [tokens].
        logits: [tokens, vocabulary].
        asked: Which position's next token is one, [batch, positions - 1].
        groups: Of every row, [batch].
        tokens: How many the rows have, prompts included.
        hidden: Hidden states, [batch, positions, hidden]; `prompts` says which are of the prompt.
        outputs: The model's own.
    """

    losses: Tensor
    weights: Tensor
    parts: Tensor
    asked: Tensor
    groups: Tensor | None
    tokens: Tensor
    logits: Tensor
    labels: Tensor
    hidden: Tensor
    prompts: Tensor
    outputs: Any

    def per_example(self, values: Tensor) -> Tensor:
        """Return the weighted mean of every row's values: [tokens] -> [batch]."""
        return per_example(values, self.weights, self.asked)


class EpochOfSampler(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Tells the sampler when an epoch begins."""

    def __init__(self, trainer: PartsTrainer) -> None:
        """Tell the sampler of `trainer`."""
        self._trainer = trainer

    def on_epoch_begin(self, _: Any, state: TrainerState, *__: Any, **___: Any) -> None:
        """Let the sampler know the epoch, also where a resumed one begins in the middle."""
        self._trainer.set_epoch(int((state.epoch or 0.0) + 1e-6))


def _lengths(rows: Any) -> list[int]:
    """Return the tokens of each row, or of each pack of rows."""
    if "length" in rows.column_names:
        return list(rows["length"])
    return [sum(inner) for inner in rows["seq_lengths"]]


def per_example(values: Tensor, weights: Tensor, asked: Tensor) -> Tensor:
    """Return the weighted mean over the tokens of each row of `asked`: [tokens] -> [batch]."""
    rows = asked.nonzero()[:, 0]
    sums = torch.zeros(2, len(asked), dtype=values.dtype, device=values.device)
    sums = sums.index_add(1, rows, torch.stack([values * weights, weights.to(values.dtype)]))
    return sums[0] / sums[1].clamp(min=1e-9)


@contextmanager
def logits_only_at(asked: Tensor, head: torch.nn.Module) -> Iterator[list[Tensor]]:
    """Let `head` make logits of the positions before `asked` labels only: [labels, vocabulary].

    The list that it gives has the hidden states of all positions when the model has run.

    Most tokens are of the prompt and have no label, and without a GPU the logits of them all are a
    third of a small model's work. (trl leaves them out on GPUs only.) A hook inside the forward
    pass, and not a call of the head outside it, so that DDP and FSDP see one ordinary forward.
    """
    seen: list[Tensor] = []

    def select(_: torch.nn.Module, hidden: tuple[Tensor]) -> tuple[Tensor]:
        seen.append(hidden[0])
        return (hidden[0][:, :-1][asked],)

    hook = head.register_forward_pre_hook(select)
    try:
        yield seen
    finally:
        hook.remove()
