"""trl's SFTTrainer with a loss per part of the reply and a score at every evaluation."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import EvalLoopOutput
from trl import SFTTrainer

from panjue.finetune.checkpoints import TRAINER_STATE, drop, drop_old, mark_complete
from panjue.finetune.data import IGNORED, PADDING, collate
from panjue.finetune.optimizers import lora_plus
from panjue.finetune.samplers import EpochSampler, length_sampler, row_lengths
from panjue.finetune.scoring import HeldOutScore
from panjue.finetune.stop import StopOnSignal
from panjue.prompts.plumbing.errors import Stopped
from panjue.prompts.plumbing.files import write_json

NOT_MODEL_INPUTS = ("labels", "parts", "group", "skip_logits")
"""Keys of a batch that the model must not get. `skip_logits`, which transformers adds for liger
kernels, would let the kernel compute the loss; here the trainer computes it."""

SCORED_SCHEDULES = ("reduce_lr_on_plateau", "greedy")
"""Learning rate schedules that depend on the evaluations."""


class PartsTrainer(SFTTrainer):  # type: ignore[misc]  # trl is untyped to mypy
    """Trains on rows of `finetune.data`, with a loss and a weight per part of the reply.

    Args:
        parts: Names of the parts; the rows' column `parts` has indices into this list.
        token_weights: Part -> weight of its tokens in the training loss; default 1.
        score: Gives the task's metrics on held-out examples; None scores nothing.
        keep: Number of newest checkpoints to keep besides the best one; None keeps all.
        lr_ratio: Learning rate of LoRA's B over that of A; None: no LoRA+.
        stop: Stops the training, and its evaluations, at a signal.
        args, kwargs: As in trl.
    """

    optimizer: Any

    def __init__(
        self,
        *args: Any,
        parts: Sequence[str],
        token_weights: Mapping[str, float],
        score: HeldOutScore | None = None,
        keep: int | None = None,
        lr_ratio: float | None = None,
        stop: StopOnSignal | None = None,
        **kwargs: Any,
    ) -> None:
        """Prepare trl's trainer, which must not process the rows again."""
        self._parts, self.score, self._keep, self._stop = parts, score, keep, stop
        self._sampler: EpochSampler | None = None
        self._lr_ratio = lr_ratio
        self._weights = torch.tensor([token_weights.get(part, 1.0) for part in parts])
        self._sums = {mode: torch.zeros(2, len(parts)) for mode in ("train", "eval")}
        super().__init__(*args, data_collator=collate, **kwargs)
        self.model_accepts_loss_kwargs = True  # makes transformers count `num_items_in_batch`
        self.add_callback(SamplerEpoch(self))
        if stop:
            self.add_callback(stop)

    def create_optimizer(self, model: Any = None) -> Any:
        """Create the optimizer, that of LoRA+ if it is wanted."""
        if self._lr_ratio and self.optimizer is None:
            trained = self.model if model is None else model
            self.optimizer = lora_plus(trained, self.args, self._lr_ratio)
        return super().create_optimizer(model)

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = ["input_ids", "labels", "parts", "group", "length", "seq_lengths"]

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the loss of a batch: in training the objective, in evaluation the tokens' mean."""
        batch = self.forward_pass(model, inputs)
        self._add_losses(batch)
        if self.model.training:
            loss = self.training_loss(batch, num_items_in_batch)
        else:  # without weights, so that held-out losses of different settings are comparable
            loss = batch.losses.mean()
        return (loss, batch.outputs) if return_outputs else loss

    def training_loss(self, batch: "Batch", num_items_in_batch: Tensor | int | None) -> Tensor:
        """Return the mean loss of the step's reply tokens, each multiplied by its part's weight."""
        loss: Tensor = (batch.losses * batch.weights).sum()
        loss = loss / (len(batch.losses) if num_items_in_batch is None else num_items_in_batch)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes  # DDP divides by it
        return loss

    def forward_pass(self, model: torch.nn.Module, inputs: dict[str, Tensor]) -> "Batch":
        """Run the model and return the losses of the reply tokens, with what they depend on."""
        fields = {name: value for name, value in inputs.items() if name not in NOT_MODEL_INPUTS}
        labels, parts = inputs["labels"], inputs["parts"]
        reply_mask = labels[:, 1:] != IGNORED
        head = self.accelerator.unwrap_model(model).get_output_embeddings()
        with logits_only_at(reply_mask, head) as hidden:
            outputs = model(**fields, use_cache=False)
        logits, reply_labels = outputs.logits.float(), labels[:, 1:][reply_mask]
        reply_parts = parts[:, 1:][reply_mask]
        return Batch(
            losses=cross_entropy(logits, reply_labels, reduction="none"),
            weights=self._weights.to(logits.device)[reply_parts],
            parts=reply_parts,
            reply_mask=reply_mask,
            groups=inputs.get("group"),
            token_count=(parts != PADDING).sum(),
            logits=logits,
            labels=reply_labels,
            hidden=hidden[0],
            prompt_mask=(labels == IGNORED) & (parts != PADDING),
            outputs=outputs,
        )

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Sample examples of similar length together for `group_by_length`."""
        if self.args.train_sampling_strategy != "group_by_length":
            return super()._get_train_sampler(train_dataset)
        rows = self.train_dataset if train_dataset is None else train_dataset
        step = self.args.train_batch_size * self.args.gradient_accumulation_steps
        self._sampler = length_sampler(row_lengths(rows), step, self.args.seed)
        return self._sampler

    def set_epoch(self, epoch: int) -> None:
        """Set the sampler's epoch: accelerate's loaders do not set it when a run resumes."""
        if self._sampler:
            self._sampler.set_epoch(epoch)

    def _add_losses(self, batch: "Batch") -> None:
        """Add a batch to the losses and counts by part, and to the number of tokens seen."""
        mode = "train" if self.model.training else "eval"
        size = len(self._parts)
        sums = torch.bincount(batch.parts, batch.losses.detach(), minlength=size)
        counts = torch.bincount(batch.parts, minlength=size)
        self._sums[mode] += torch.stack([sums, counts]).cpu()
        if mode == "train":
            # The state is in every checkpoint, so a resumed run continues the count.
            tokens = self.accelerator.gather(batch.token_count).sum()
            self.state.num_input_tokens_seen += int(tokens)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the number of tokens seen, and the loss by part since the last entry."""
        mode, prefix = ("train", "") if self.model.training else ("eval", "eval_")
        sums, counts = self.accelerator.reduce(self._sums[mode].to(self.args.device)).cpu()
        logs[f"{prefix}num_tokens"] = self.state.num_input_tokens_seen
        for part, total, count in zip(self._parts, sums.tolist(), counts.tolist(), strict=True):
            if count:
                logs[f"{prefix}loss_{part}"] = total / count
        self._sums[mode].zero_()
        super().log(logs, start_time)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Save a checkpoint, mark it as complete, and only then drop old ones.

        Transformers would drop old ones before the new one is marked.
        """
        folder = Path(str(self.args.output_dir))
        checkpoint = folder / f"checkpoint-{self.state.global_step}"
        if self.is_world_process_zero() and checkpoint.exists():
            drop(checkpoint)  # incomplete: a run was killed here
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()  # each process has written its random state
        if self.is_world_process_zero():
            self.save_extra_state(checkpoint)
            mark_complete(checkpoint)
            if self._keep:
                drop_old(folder, self._keep, self.state.best_model_checkpoint)

    def save_extra_state(self, checkpoint: Path) -> None:
        """Write state that transformers does not save: none here; subclasses may have some."""

    def resume_from(self, checkpoint: Path) -> None:
        """Resume training from a checkpoint."""
        self.train(resume_from_checkpoint=str(checkpoint))

    def load_finished(self, checkpoint: Path) -> None:
        """Load the weights of a finished training, from its best checkpoint if it chose one."""
        self.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE))
        self._load_from_checkpoint(str(checkpoint))
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint:
            self._load_best_model()

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Compute the held-out loss, then the task's metrics on greedily decoded answers.

        Not in a callback, so that early stopping and the choice of the best checkpoint see them.
        """
        # Without this fork an evaluation would change the dropout of the steps after it, and a
        # repeated one the weights.
        with torch.random.fork_rng(devices=[]):
            output = super().evaluation_loop(*args, **kwargs)
            if self.score:
                output.metrics.update({f"eval_{k}": v for k, v in self.score(self).items()})
        return output

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the held-out loss of a batch, unless a signal has come."""
        self.check_signal()
        return super().prediction_step(*args, **kwargs)

    @property
    def is_told_to_stop(self) -> bool:
        """Say whether this process has received a signal that stops the evaluation."""
        return bool(self._stop and self._stop.is_received and self._can_repeat_evaluation())

    def check_signal(self) -> None:
        """Stop an evaluation; all processes call this equally often.

        Raises:
            Stopped: In all processes, if one of them has received a signal.
        """
        if self._stop and self._can_repeat_evaluation():
            self._stop.check(self.state.global_step)

    def _can_repeat_evaluation(self) -> bool:
        """Say whether `finish_evaluation` can do later what a signal stops."""
        is_sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        return not is_sharded and self.args.lr_scheduler_type not in SCORED_SCHEDULES

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Log, evaluate and save; if a signal stops the evaluation, save without it and stop.

        `should_evaluate` stays true in this checkpoint, see `awaits_evaluation`.
        """
        try:
            super()._maybe_log_save_evaluate(*args, **kwargs)
        except Stopped:
            self._save_checkpoint(self.model, trial=None)
            control = self.callback_handler.on_save(self.args, self.state, self.control)
            self.callback_handler.on_train_end(self.args, self.state, control)
            raise

    def finish_evaluation(self, checkpoint: Path) -> None:
        """Evaluate a checkpoint whose evaluation a signal stopped; record the result in it.

        Raises:
            Stopped: Another signal has come.
        """
        self.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE))
        self.state.is_world_process_zero = self.is_world_process_zero()  # the file has that of one
        self._load_callback_state()  # how many evaluations were no better
        self._load_from_checkpoint(str(checkpoint))
        assert self._stop, "nothing else stops an evaluation"
        self._stop.listen()
        try:
            metrics = self.evaluate()
        finally:
            self._stop.release()
        # accelerate has prepared the model for evaluation; marked so, `train` would not wrap it in
        # DDP, and the processes would train apart.
        self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        self.model._is_accelerate_prepared = False
        if self._determine_best_metric(metrics, trial=None):
            self.state.best_model_checkpoint = str(checkpoint)
        for part in [*self.callback_handler.callbacks, self.control]:
            if isinstance(part, ExportableState):
                self.state.stateful_callbacks[type(part).__name__] = part.state()
        if self.is_world_process_zero():
            write_json(checkpoint / TRAINER_STATE, asdict(self.state))
        self.accelerator.wait_for_everyone()


@dataclass(frozen=True)
class Batch:
    """One forward pass. `tokens` below are reply tokens only.

    Attributes:
        losses, weights, parts, labels: Per token, [tokens].
        logits: [tokens, vocabulary].
        reply_mask: Whether the next token is a reply token, [batch, positions - 1].
        groups: Group index per example, [batch].
        token_count: Tokens of prompts and replies together.
        hidden: Hidden states, [batch, positions, hidden].
        prompt_mask: Whether a position is in the prompt, [batch, positions].
        outputs: The model's output object.
    """

    losses: Tensor
    weights: Tensor
    parts: Tensor
    reply_mask: Tensor
    groups: Tensor | None
    token_count: Tensor
    logits: Tensor
    labels: Tensor
    hidden: Tensor
    prompt_mask: Tensor
    outputs: Any

    def per_example(self, values: Tensor) -> Tensor:
        """Return the weighted mean of each example's values: [tokens] -> [batch]."""
        return per_example(values, self.weights, self.reply_mask)


class SamplerEpoch(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Sets the sampler's epoch when an epoch begins."""

    def __init__(self, trainer: PartsTrainer) -> None:
        """Keep the trainer that has the sampler."""
        self._trainer = trainer

    def on_epoch_begin(self, _: Any, state: TrainerState, *__: Any, **___: Any) -> None:
        """Set the epoch, also if a resumed run begins in the middle of one."""
        self._trainer.set_epoch(int((state.epoch or 0.0) + 1e-6))


def per_example(values: Tensor, weights: Tensor, reply_mask: Tensor) -> Tensor:
    """Return the weighted mean over each example's reply tokens: [tokens] -> [batch]."""
    rows = reply_mask.nonzero()[:, 0]
    sums = torch.zeros(2, len(reply_mask), dtype=values.dtype, device=values.device)
    sums = sums.index_add(1, rows, torch.stack([values * weights, weights.to(values.dtype)]))
    return sums[0] / sums[1].clamp(min=1e-9)


@contextmanager
def logits_only_at(reply_mask: Tensor, head: torch.nn.Module) -> Iterator[list[Tensor]]:
    """Let `head` compute logits only where `reply_mask` is true: [tokens, vocabulary].

    Yields a list; after the forward pass it holds the hidden states of all positions.

    Most tokens are prompt tokens without a label, and on a CPU their logits are a third of a small
    model's work. (trl omits them on GPUs only.) This is a hook inside the forward pass, so that DDP
    and FSDP see one ordinary forward.
    """
    states: list[Tensor] = []

    def select(_: torch.nn.Module, hidden: tuple[Tensor]) -> tuple[Tensor]:
        states.append(hidden[0])
        return (hidden[0][:, :-1][reply_mask],)

    hook = head.register_forward_pre_hook(select)
    try:
        yield states
    finally:
        hook.remove()
