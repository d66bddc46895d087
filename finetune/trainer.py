"""trl's SFTTrainer with the loss where it is wanted, by part, and a score at every evaluation."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import TrainerState
from transformers.trainer_utils import EvalLoopOutput
from trl import SFTTrainer

from panjue.finetune.checkpoints import TRAINER_STATE, drop, drop_old, mark_complete
from panjue.finetune.data import IGNORED

PADDING = -1
"""The part of a token that is none."""

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
        self._weights = torch.tensor([token_weights.get(part, 1.0) for part in parts])
        self._sums = {mode: torch.zeros(2, len(parts)) for mode in ("train", "eval")}
        super().__init__(*args, data_collator=collate, **kwargs)
        self.model_accepts_loss_kwargs = True  # so that `num_items_in_batch` is counted

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = ["input_ids", "labels", "parts", "seq_lengths"]

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the mean loss of the reply's tokens, each times its part's weight."""
        labels, parts = inputs.pop("labels")[:, 1:], inputs.pop("parts")
        tokens = (parts != PADDING).sum()
        asked = labels != IGNORED
        with only_at(asked, self.accelerator.unwrap_model(model).get_output_embeddings()):
            outputs = model(**inputs, use_cache=False)
        losses = cross_entropy(outputs.logits.float(), labels[asked], reduction="none")
        parts = parts[:, 1:][asked]
        self._note(losses.detach(), parts, tokens)
        if not self.model.training:  # held-out losses stay comparable between weights
            return (losses.mean(), outputs) if return_outputs else losses.mean()
        weighted = (losses * self._weights.to(losses.device)[parts]).sum()
        loss = weighted / (len(losses) if num_items_in_batch is None else num_items_in_batch)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes  # DDP divides by it
        return (loss, outputs) if return_outputs else loss

    def _note(self, losses: Tensor, parts: Tensor, tokens: Tensor) -> None:
        """Add a batch to the sums and counts by part, and to the count of tokens seen."""
        mode = "train" if self.model.training else "eval"
        size = len(self._parts)
        sums = torch.bincount(parts, losses, minlength=size)
        counts = torch.bincount(parts, minlength=size)
        self._sums[mode] += torch.stack([sums, counts]).cpu()
        if mode == "train":
            self._total_train_tokens += int(self.accelerator.gather(tokens).sum())

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add tokens seen and the loss by part since the last entry."""
        mode, prefix = ("train", "") if self.model.training else ("eval", "eval_")
        sums, counts = self.accelerator.reduce(self._sums[mode].to(self.args.device)).cpu()
        logs[f"{prefix}num_tokens"] = self._total_train_tokens
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
            mark_complete(checkpoint)
            if self._keep:
                drop_old(folder, self._keep, self.state.best_model_checkpoint)

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


@contextmanager
def only_at(asked: Tensor, head: torch.nn.Module) -> Iterator[None]:
    """Let `head` make logits of the positions before `asked` labels only: [labels, vocabulary].

    Most tokens are of the prompt and have no label, and without a GPU the logits of them all are a
    third of a small model's work. (trl leaves them out on GPUs only.) A hook inside the forward
    pass, and not a call of the head outside it, so that DDP and FSDP see one ordinary forward.
    """

    def select(_: torch.nn.Module, hidden: tuple[Tensor]) -> tuple[Tensor]:
        return (hidden[0][:, :-1][asked],)

    hook = head.register_forward_pre_hook(select)
    try:
        yield
    finally:
        hook.remove()


def collate(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return a batch padded on the right.

    There is no attention mask: attention is causal, so no real token ever sees the padding, and
    the kernels are fastest without one. Packed rows carry positions that start again at every
    example, from which transformers makes a mask that keeps the examples apart.
    """
    width = max(len(row["input_ids"]) for row in rows)
    batch = {
        name: torch.tensor([[*row[name], *[fill] * (width - len(row[name]))] for row in rows])
        for name, fill in (("input_ids", 0), ("labels", IGNORED), ("parts", PADDING))
    }
    if "seq_lengths" in rows[0]:
        batch["position_ids"] = torch.stack([positions(row["seq_lengths"], width) for row in rows])
    return batch


def positions(lengths: Sequence[int], width: int) -> Tensor:
    """Return 0, 1, … for each of `lengths`, and for the padding up to `width` behind them."""
    parts = [*lengths, width - sum(lengths)]
    return torch.cat([torch.arange(length) for length in parts])
