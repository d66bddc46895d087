"""trl's SFTTrainer for rows of `finetune.data`, with fast losses and safe checkpoints."""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate.data_loader import SeedableRandomSampler
from datasets import Dataset, concatenate_datasets
from rich.console import Console
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import Sampler, SequentialSampler
from transformers import EarlyStoppingCallback, PrinterCallback, TrainerControl, TrainingArguments
from transformers.integrations import SwanLabCallback, TensorBoardCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_pt_utils import get_length_grouped_indices
from transformers.trainer_utils import EvalLoopOutput
from trl import SFTTrainer

from panjue.finetune.checkpoints import (
    disk_errors_named,
    drop,
    drop_old,
    mark_complete,
    newest_complete,
)
from panjue.finetune.curves import Curves
from panjue.finetune.data import IGNORED, collate, collate_segments, count_examples
from panjue.finetune.model import (
    CHECKPOINTING,
    compute_activations_again,
    leave_casts_to_autocast,
    set_checkpointing,
)
from panjue.finetune.packed_attention import PACKED
from panjue.finetune.reply_loss import token_losses
from panjue.prompts.plumbing.errors import UserError, first_line
from panjue.prompts.plumbing.files import read_json, write_json

T = TypeVar("T")

NOT_MODEL_INPUTS = ("labels", "tokens", "reply_places", "reply_labels", "skip_logits")
"""Keys of a batch that the model must not get. transformers adds `skip_logits` for liger kernels.
With it, the kernel would compute the loss; here the trainer computes it."""


class LengthSampler(Sampler[int]):
    """Puts rows or packs of similar length into the same step of `step` rows, anew in each `epoch`.

    The samplers of transformers use a random state, which is lost when a run resumes.
    """

    def __init__(self, rows: Dataset, step: int, seed: int) -> None:
        self._sizes = list(rows["length"])
        self._step = step
        self._seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[int]:
        # Every pair of a seed and an epoch below 100,003 gets a number of its own.
        generator = torch.Generator().manual_seed(self._seed * 100_003 + self.epoch)
        yield from get_length_grouped_indices(self._sizes, self._step, generator=generator)


class EvenSampler(Sampler[int]):
    """Yields the indices of another sampler, then those of `empty` rows without loss.

    Each process needs the same number of rows. accelerate would repeat rows of cases for that.
    """

    def __init__(self, order: Sampler[int], empty: int) -> None:
        self._order: Any = order
        self._empty = empty
        self.epoch = 0

    def __len__(self) -> int:
        return len(self._order) + self._empty

    def __iter__(self) -> Iterator[int]:
        self._order.epoch = self.epoch
        yield from self._order
        yield from range(len(self._order), len(self))


def order_of(rows: Dataset, args: TrainingArguments) -> Any:
    """Return the sampler of the rows; its order is the same in all processes."""
    if args.train_sampling_strategy == "group_by_length":
        return LengthSampler(rows, step_size(args), args.seed)
    if args.train_sampling_strategy == "sequential":
        return SequentialSampler(rows)
    return SeedableRandomSampler(rows, data_seed=args.seed)  # as accelerate has it


def with_empty(rows: Dataset, count: int) -> Dataset:
    """Return the rows, followed by `count` rows without loss; see `EvenSampler` for their use.

    They fill the last batches, so that each of several processes gets the same number of rows.
    """
    if not count:
        return rows
    empty = {"input_ids": [0], "labels": [IGNORED], "length": 1, "seq_lengths": [1]}
    columns = {name: [empty[name]] * count for name in rows.column_names}
    return concatenate_datasets([rows, Dataset.from_dict(columns, features=rows.features)])


class ReplyTrainer(SFTTrainer):  # type: ignore[misc]  # trl is untyped to mypy
    """Trains on the replies, and computes no logits of prompts.

    It overrides three private methods of transformers: `_get_train_sampler`, `_run_epoch` and
    `_save_checkpoint`. A test fails if transformers renames one.
    """

    control: TrainerControl

    def __init__(
        self,
        model: Any,
        args: TrainingArguments,
        train_dataset: Dataset,
        console: Console | None = None,
        **others: Any,
    ) -> None:
        """Prepare the training; `others` are further arguments of trl's SFTTrainer.

        Most of it avoids something that trl, transformers or accelerate would do by default.
        """
        self._console = console or Console()
        self._of_step: list[dict[str, Any]] = []  # the batches so far of the current step
        self._new_tokens = 0  # of this process, since the last `count_tokens`
        # `drop_old` keeps so many checkpoints, and the best one. transformers would choose others;
        # with None, it deletes none.
        self._keep = args.save_total_limit
        args.save_total_limit = None
        empty = 0  # rows without loss, so that all processes get the same number of rows
        if args.world_size > 1:
            empty = -len(train_dataset) % (args.train_batch_size * args.world_size)
        self._sampler = EvenSampler(order_of(train_dataset, args), empty)
        train_dataset = with_empty(train_dataset, empty)
        attention = model.config.get_text_config()._attn_implementation
        batches = collate_segments if attention == PACKED else collate
        # trl casts the adapter of a quantized base to bfloat16 (trl/trainer/sft_trainer.py:908), in
        # which most late, small updates change nothing, and an adapter to start from is rounded.
        adapter = {}
        if getattr(model, "is_quantized", False):
            adapter = {weight: weight.data for weight in model.parameters() if weight.requires_grad}
        super().__init__(model, args, data_collator=batches, train_dataset=train_dataset, **others)
        self.args.remove_unused_columns = False  # `collate` needs the length
        self.model_accepts_loss_kwargs = True  # makes transformers count `num_items_in_batch`
        for weight, data in adapter.items():
            weight.data = data.to(weight.device, torch.float32)
        if self.accelerator.mixed_precision != "no" and not self.is_fsdp_enabled:
            leave_casts_to_autocast(self.model)
        if self.is_fsdp_enabled and self.accelerator.mixed_precision != "no":
            # accelerate sums gradients in the type of the computation (accelerate 1.15,
            # utils/dataclasses.py:2137). In bfloat16, the sums of a long step lose small parts.
            plugin = self.accelerator.state.fsdp_plugin
            policy = plugin.mixed_precision_policy
            plugin.mixed_precision_policy = replace(policy, reduce_dtype=torch.float32)
        if not self.is_fsdp_enabled:  # FSDP replaces the weights before the optimizer exists
            self.create_optimizer()
        self.remove_callback(PrinterCallback)  # TrainingLog prints instead
        if "tensorboard" in self.args.report_to:
            self.remove_callback(TensorBoardCallback)
            self.add_callback(Curves())
        if "swanlab" in self.args.report_to:
            self._report_to_swanlab()

    def _report_to_swanlab(self) -> None:
        """Use SwanLab's own callback, since that of transformers 5.19 fails with SwanLab 0.10.

        The callback of transformers asks for the current run before it has begun one. SwanLab 0.10
        refuses that.
        """
        from swanlab.integration.transformers import SwanLabCallback as Own  # noqa: PLC0415

        self.remove_callback(SwanLabCallback)
        folder = os.environ.get("SWANLAB_LOG_DIR", Path(self.args.output_dir).with_name("swanlog"))
        project = os.environ.get("SWANLAB_PROJECT")
        name = self.args.run_name
        self.add_callback(Own(project=project, experiment_name=name, log_dir=str(folder)))

    def training_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Add the gradients of this batch to those of its step; return its loss.

        It does not wait for the GPU (a test counts such operations). If the GPU's memory is too
        small, the step begins again, with all layers computing their activations again.
        """
        self._of_step.append(inputs)
        add_gradients: Callable[..., Tensor] = super().training_step

        def begin_again() -> Tensor:
            losses = [add_gradients(model, one, num_items_in_batch) for one in self._of_step]
            return losses[-1]

        loss: Tensor = self.saving_memory(
            lambda: add_gradients(model, inputs, num_items_in_batch), begin_again
        )
        self._new_tokens += inputs["tokens"]
        if self.accelerator.sync_gradients:  # the last batch of its step
            self._of_step.clear()
        return loss

    def saving_memory(self, compute: Callable[[], T], again: Callable[[], T]) -> T:
        """Return what `compute` returns; if the GPU's memory is too small, what `again` returns.

        Before `again`, gradients are dropped, and gradient checkpointing is on from now on.
        """
        try:
            return compute()
        except torch.OutOfMemoryError as error:
            self.refuse_or_save_memory(error)
        # Outside `except`, which holds the tensors of the failed call.
        torch.cuda.empty_cache()
        self.model.zero_grad(set_to_none=True)
        return again()

    def refuse_or_save_memory(self, error: torch.OutOfMemoryError) -> None:
        """Turn on gradient checkpointing for all layers, which then compute activations again.

        Raise `error` if it was on already. UserError: there are several processes. One of them
        cannot change alone, since the others wait for its gradients.
        """
        args = self.args
        every = (getattr(args, f"{CHECKPOINTING}_kwargs") or {}).get("every_n_layers") or 1
        if getattr(args, CHECKPOINTING) and every == 1:
            raise error
        if self.accelerator.num_processes > 1:
            # Unless the user sets it, `use_memory` may choose it for only some layers.
            way_out = f"set trainer.{CHECKPOINTING}=true yourself, without every_n_layers"
            raise UserError(f"GPU: {first_line(error)} {way_out}") from None
        set_checkpointing(args, True)
        compute_activations_again(self.model, args)
        self._console.print(
            "GPU: its memory was too small; from now on all layers compute activations again "
            f"(trainer.{CHECKPOINTING}=true does so from the start)"
        )

    def count_tokens(self) -> None:
        """Add the tokens of all processes since the last count to the state of the training.

        Every checkpoint has the state, so a resumed run continues the count.
        """
        new = torch.tensor(self._new_tokens, device=self.args.device)
        self.state.num_input_tokens_seen += int(self.accelerator.reduce(new, "sum"))
        self._new_tokens = 0

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Return the sum of the losses of this batch, divided by the reply tokens of the step."""
        losses = self.reply_losses(model, inputs)
        if num_items_in_batch is None:
            return losses.mean()
        tokens = torch.as_tensor(num_items_in_batch).clamp(min=1)  # 0 if all rows are empty
        loss: Tensor = losses.sum() / tokens
        if self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes  # DDP averages over processes
        return loss

    def reply_losses(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Return the loss of each reply token of a batch from `collate`, [reply tokens]."""
        fields = {name: value for name, value in inputs.items() if name not in NOT_MODEL_INPUTS}
        head = self.accelerator.unwrap_model(model).get_output_embeddings()
        with logits_only_at(inputs["reply_places"], head):
            logits = model(**fields, use_cache=False).logits.float()
        return token_losses(logits, inputs["reply_labels"])

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return self._sampler

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the number of tokens so far; end a training whose loss or gradient is no number."""
        watched = ["loss", "eval_loss", "train_loss"]
        if not self.args.fp16:  # float16: the first steps look for a scale and skip such gradients
            watched.append("grad_norm")
        for name in watched:
            if not math.isfinite(logs.get(name, 0)):
                raise UserError(
                    f"step {self.state.global_step}: {name} is {logs[name]}; train into another "
                    "folder with a lower trainer.learning_rate or attn_implementation=eager"
                )
        self.count_tokens()
        prefix = "" if self.model.training else "eval_"
        logs[f"{prefix}num_tokens"] = self.state.num_input_tokens_seen
        super().log(logs, start_time)

    def evaluation_loop(self, *_: Any, **__: Any) -> EvalLoopOutput:
        """Compute the held-out loss. If the best step is loaded at the end, save this one.

        Any evaluated step may turn out to be the best.
        """
        self.control.should_save |= self.args.load_best_model_at_end
        self.model.eval()
        metrics = {"eval_loss": self._held_out_loss()}
        # FSDP2 leaves the outermost weights whole; it could not load the best checkpoint then.
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return EvalLoopOutput(None, None, metrics, count_examples(self.eval_dataset))

    @torch.no_grad()
    def _held_out_loss(self) -> float:
        """Return the mean loss of all held-out reply tokens. Each token counts once.

        The evaluation of transformers would take the mean of batches and count some rows twice.
        """
        rank = self.accelerator.process_index
        world = self.accelerator.num_processes
        count = len(self.eval_dataset)
        step = self.args.per_device_eval_batch_size * world
        sums = torch.zeros(2, dtype=torch.float64)
        for start in range(0, count, step):
            places = range(start + rank, min(start + step, count), world)
            # If weights are sharded, a process without rows must help to gather them.
            rows = [self.eval_dataset[place] for place in places or [0]]
            batch = self._prepare_inputs(self.data_collator(rows))
            losses = self.reply_losses(self.model, batch)
            if places:
                sums += torch.tensor([losses.double().sum(), len(losses)], dtype=torch.float64)
        total, tokens = self.accelerator.reduce(sums.to(self.args.device), "sum").tolist()
        return float(total / tokens)

    def _run_epoch(self, *, epoch: int, **kwargs: Any) -> None:
        """Train an epoch, unless the resumed checkpoint already ended the training."""
        self._sampler.epoch = epoch  # accelerate's loaders do not set the epoch when a run resumes
        is_over = self.state.global_step >= self.state.max_steps
        for part in self.callback_handler.callbacks:
            if isinstance(part, EarlyStoppingCallback):
                is_over |= part.early_stopping_patience_counter >= part.early_stopping_patience
        if is_over:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(epoch=epoch, **kwargs)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Save a checkpoint and mark it as complete; only then delete old ones."""
        self.count_tokens()
        checkpoint = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
        if self.is_world_process_zero() and checkpoint.exists():
            drop(checkpoint)  # incomplete, because a run was killed here
        self.accelerator.wait_for_everyone()  # each process writes its random state there
        with disk_errors_named(checkpoint):
            super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()  # each process has written its random state
        if self.is_world_process_zero():
            mark_complete(checkpoint)
            if self._keep:
                drop_old(checkpoint.parent, self._keep, self.state.best_model_checkpoint)

    def cap_steps(self) -> None:
        """Let `max_steps` end the epochs early; transformers would always train so many steps."""
        most = self.args.max_steps
        if most > 0:
            self.args.max_steps = -1  # not set, so that `steps` counts the steps of all epochs
            self.args.max_steps = min(most, steps(self))

    def train_or_resume(self, console: Console) -> None:
        """Train from the newest complete checkpoint, or from the start if there is none.

        The best checkpoint lies in the same folder, even if that was moved. transformers would
        forget a best checkpoint that is not at its old path (trainer.py:1684).
        """
        checkpoint = newest_complete(Path(str(self.args.output_dir)))
        if checkpoint is None:
            self.train()
            return
        console.print(f"resuming from {checkpoint}")
        path = checkpoint / TRAINER_STATE_NAME
        state = read_json(path)
        if state["best_model_checkpoint"]:
            best = checkpoint.parent / Path(state["best_model_checkpoint"]).name
            if not best.is_dir():
                raise UserError(f"{best}: the best checkpoint is missing; restore it or train anew")
            if self.is_world_process_zero():
                write_json(path, {**state, "best_model_checkpoint": str(best)})
            self.accelerator.wait_for_everyone()
        self.train(resume_from_checkpoint=str(checkpoint))


def steps(trainer: ReplyTrainer) -> int:
    """Return the steps of the whole training."""
    if trainer.args.max_steps > 0:
        return int(trainer.args.max_steps)
    steps_per_epoch = math.ceil(len(trainer.train_dataset) / step_size(trainer.args))
    return math.ceil(steps_per_epoch * float(trainer.args.num_train_epochs))


def step_size(args: TrainingArguments) -> int:
    """Return the number of rows per optimizer step, over all processes."""
    return int(args.train_batch_size * args.gradient_accumulation_steps * args.world_size)


@contextmanager
def logits_only_at(places: Tensor, head: torch.nn.Module) -> Iterator[None]:
    """Let `head` compute logits only at these places of the batch: [places, vocabulary].

    Most tokens are prompt tokens. On a CPU, their logits are a third of a small model's work. (trl
    omits them only on GPUs.) It is a hook, so that DDP and FSDP see one ordinary forward call.
    """

    def select(_: torch.nn.Module, hidden: tuple[Tensor]) -> tuple[Tensor]:
        return (hidden[0].flatten(0, 1).index_select(0, places),)

    hook = head.register_forward_pre_hook(select)
    try:
        yield
    finally:
        hook.remove()
