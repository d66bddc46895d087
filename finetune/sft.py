"""Supervised fine-tuning, read from top to bottom: cases in, adapter out."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from rich.console import Console
from transformers import EarlyStoppingCallback, PrinterCallback
from transformers.utils.logging import disable_progress_bar
from trl import SFTConfig as TrainerConfig

from panjue.finetune.checkpoints import is_over, newest_complete
from panjue.finetune.data import Report, cached, pack, questions, rows
from panjue.finetune.examples import check_side, held_out_examples, mixed_examples, train_examples
from panjue.finetune.group_trainer import GroupTrainer
from panjue.finetune.journal import Journal
from panjue.finetune.libraries import check_library_settings, check_what_training_imports
from panjue.finetune.memory import ask_for_huge_pages
from panjue.finetune.model import (
    Model,
    check_packing,
    has_bf16,
    load_base,
    resolve_dtype,
    with_lora,
)
from panjue.finetune.plan import print_example, print_plan
from panjue.finetune.result import claim, is_finished, provenance, save, trained_folder
from panjue.finetune.robust import Objective
from panjue.finetune.scoring import HeldOutScore
from panjue.finetune.settings import SftConfig, sft_settings
from panjue.finetune.stop import StopOnSignal
from panjue.finetune.trainer import PartsTrainer
from panjue.prompts.example import UNKNOWN, Example, Solve
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.errors import UserError, did_you_mean
from panjue.prompts.plumbing.lock import exclusive_lock
from panjue.prompts.plumbing.model import load_tokenizer, model_folder
from panjue.prompts.plumbing.parts import SYNTAX
from panjue.prompts.reader import Reader, side_groups
from panjue.prompts.render import RULES
from panjue.prompts.task import Task, configured, load_task

ROWS_DEPEND_ON = (
    "task",
    "base_sha256",
    "train_sha256",
    "dev_sha256",
    "mix_sha256",
    "mix_ratio",
    "on_bad_row",
    "prompt_sha256",
    "max_tokens",
    "groups_sha256",
    "solve",
)
"""Entries of the manifest that decide the token rows."""


def main(path: Path, overrides: Sequence[str] = ()) -> None:
    """Train as the config at `path` says; a run that is finished already is left alone."""
    train(sft_settings(path, overrides))


def train(config: SftConfig) -> None:
    """Fine-tune and save the adapter (or, with `method: full`, the model) with its labels.

    Raises:
        UserError: A file or setting is wrong, or the run folder holds another run's work.
    """
    check_library_settings(config)
    processes = started(config)
    console = Console(quiet=not processes.is_main_process, soft_wrap=True)
    disable_progress_bar()  # of loading and saving weights
    task = configured(load_task(config.task), config.solve)
    reader = Reader(task, side_groups(config.groups), on_bad_row=config.on_bad_row)
    if isinstance(task.answer, Solve):
        config = config.model_copy(update={"score_examples": 0})
    folder = model_folder(config.model)
    made = on_first(processes, lambda: provenance(config, folder, task))
    if not config.dry_run and is_finished(config.run, made):
        console.print(
            f"{trained_folder(config)}: already trained with these settings, nothing to do"
        )
        return
    check_side(reader, [path for path in (config.train, config.dev, config.mix) if path])
    writes = processes.is_main_process and not config.dry_run
    with exclusive_lock(config.run) if writes else nullcontext():
        if writes:
            is_finished(config.run, made)  # again: who held the lock may have left another run
        train_as(config, reader, folder, made, console)


def started(config: SftConfig) -> PartialState:
    """Join the processes of this training; the first call sets the time limit of all later ones."""
    on_cpu = not torch.accelerator.is_available()
    if on_cpu:
        ask_for_huge_pages()
    waits = timedelta(seconds=config.trainer.get("ddp_timeout", TrainerConfig.ddp_timeout))
    # Without cpu=True it would not see that several processes were launched on a CPU.
    return PartialState(cpu=on_cpu, timeout=waits)


def on_first(processes: PartialState, work: Callable[[], Any]) -> Any:
    """Let the first process do what takes long; all return its result, or raise its error."""
    done: list[Any] = [None]
    if processes.is_main_process:
        try:
            done = [work()]
        except (UserError, OSError) as error:
            done = [error]
    [result] = broadcast_object_list(done)
    if isinstance(result, Exception):
        raise result
    return result


def train_as(
    config: SftConfig,
    reader: Reader,
    folder: Path,
    made: dict[str, Any],
    console: Console,
) -> None:
    """Do what `train` says, of which `made` is the record, from where it stopped."""
    labels = reader.task.ask.labels(trained_on(config, reader))
    trainer, report, held_report = make_trainer(config, reader, folder, labels, made, console)
    mixed = sum(1 for _ in mixed_in(config, reader))
    if config.on_bad_row == "skip":
        for _ in held_out(config, reader):
            pass  # so that its bad rows are known too where its tokens were cached
    print_plan(console, trainer, report, held_report, mixed)
    if reader.skipped.rows:
        console.print(f"{'skipped':12s} {reader.skipped}", highlight=False, markup=False)
    if config.dry_run:
        print_example(console, trainer.train_dataset[0], trainer.processing_class)
        return
    if trainer.is_world_process_zero():
        claim(config, made, console)
        reader.skipped.write(config.run / "skipped-train.jsonl")
    trainer.accelerator.wait_for_everyone()
    checkpoint = newest_complete(config.run / "checkpoints")
    if checkpoint:
        console.print(f"continuing from {checkpoint}")
    if checkpoint and is_over(checkpoint, config.patience):
        trainer.take(checkpoint)
    elif checkpoint:
        trainer.resume_from(checkpoint)
    else:
        trainer.train()
    trainer.accelerator.wait_for_everyone()
    save(trainer, labels, made, trained_folder(config), len(report.tokens))
    console.print(f"written: {trained_folder(config)}")


def token_rows(
    config: SftConfig,
    reader: Reader,
    tokenizer: Any,
    labels: Labels,
    made: dict[str, Any],
    train: Report | None = None,
) -> tuple[Dataset, Report]:
    """Return the rows that are trained on; given their report, the rows that are held out."""
    examples = held_out if train else trained_on
    by = config.robust.by if config.robust else None
    key = {name: made.get(name) for name in ROWS_DEPEND_ON}
    return cached(
        config.run / "rows",
        {**key, "by": by, "part": "dev" if train else "train", "rules": RULES},
        lambda report: rows(
            reader.task,
            questions(reader.task, examples(config, reader), report),
            tokenizer,
            labels,
            config.max_tokens,
            report,
            by,
        ),
        train.parts if train else (SYNTAX,),
        train.groups if train else (),
    )


def trained_on(config: SftConfig, reader: Reader) -> Iterator[Example]:
    """Yield the examples that are trained on."""
    yield from train_examples(reader, config.train, config.dev)
    yield from mixed_in(config, reader)


def mixed_in(config: SftConfig, reader: Reader) -> Iterator[Example]:
    """Yield those of them that come from `mix`."""
    if config.mix:
        yield from mixed_examples(reader, config.train, config.dev, config.mix, config.mix_ratio)


def held_out(config: SftConfig, reader: Reader) -> Iterator[Example]:
    """Yield the examples that losses and scores are measured on."""
    return held_out_examples(reader, config.train, config.dev)


def make_trainer(
    config: SftConfig,
    reader: Reader,
    folder: Path,
    labels: Labels,
    made: dict[str, Any],
    console: Console,
) -> tuple[PartsTrainer, Report, Report]:
    """Return the trainer, ready to start, with what became of the examples of both parts."""
    tokenizer = load_tokenizer(folder)
    with PartialState().main_process_first():
        train_rows, report = token_rows(config, reader, tokenizer, labels, made)
        held_rows, held_report = token_rows(config, reader, tokenizer, labels, made, report)
    if not len(train_rows):
        why = report.refused[0] if report.refused else "all are skipped or held out, set dev=FILE"
        raise UserError(f"{config.train}: no example is left to train on; {why}")
    unknown = next((part for part in config.token_weights if part not in report.parts), None)
    if unknown is not None:
        hint = did_you_mean(unknown, report.parts)
        raise UserError(f"token_weights: a reply has no part {unknown!r}{hint}")

    args = trainer_config(config, reader.task, evaluates=len(held_rows) > 0)
    packs = config.trainer.get("packing", False)
    score = HeldOutScore(
        reader.task,
        tokenizer,
        labels,
        held_out(config, reader) if args.eval_strategy != "no" else (),
        size=config.score_examples,
        max_tokens=config.max_tokens,
    )
    callbacks = [Journal(config.run, console), StopOnSignal(console)]  # the journal ends first
    if args.load_best_model_at_end:
        callbacks.append(EarlyStoppingCallback(config.patience))
    model = make_model(config, folder, bf16=bool(args.bf16))
    if packs:
        check_packing(model.config)
    objective = make_objective(config, model, report.groups)
    kind = partial(GroupTrainer, objective=objective) if objective else PartsTrainer
    try:
        trainer: PartsTrainer = kind(
            model,
            parts=held_report.parts,  # begins with those of the rows that are trained on
            token_weights=config.token_weights,
            score=score if score.questions else None,
            keep=config.trainer.get("save_total_limit", 2),
            args=args,
            train_dataset=pack(train_rows, config.max_tokens) if packs else train_rows,
            eval_dataset=held_rows if len(held_rows) else None,
            processing_class=tokenizer,
            callbacks=callbacks,
        )
        check_what_training_imports(trainer)
    # A setting, or a package that one needs; of wandb and its like that is a RuntimeError.
    except (ValueError, TypeError, ImportError, RuntimeError) as error:
        raise UserError(f"trainer: {str(error).splitlines()[0]}") from None
    trainer.remove_callback(PrinterCallback)  # the journal says it better
    if score.questions and (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
        raise UserError("score_examples: weights in pieces cannot answer; set score_examples=0")
    return trainer, report, held_report


def make_model(config: SftConfig, folder: Path, *, bf16: bool) -> Model:
    """Return the base as `method` wants it, with the adapter beside its layers."""
    frozen, quantized = config.method != "full", config.method == "qlora"
    dtype = resolve_dtype(config.dtype, bf16=bf16 and frozen)
    model: Model = load_base(
        folder, dtype, config.quantization if quantized else None, config.attn_implementation
    )
    if frozen:
        torch.manual_seed(config.seed)
        model = with_lora(model, config.lora)
    return model


def make_objective(config: SftConfig, model: Model, groups: Sequence[str]) -> Objective | None:
    """Return what is minimized where it is not the mean over tokens.

    Raises:
        UserError: No example has the attribute.
    """
    if config.robust is None:
        return None
    if set(groups) <= {UNKNOWN}:
        raise UserError(f"robust.by: no example to train on has a group by {config.robust.by!r}")
    torch.manual_seed(config.seed)
    hidden = model.config.get_text_config().hidden_size
    return Objective(config.robust, groups, hidden, PartialState().device)


def trainer_config(config: SftConfig, task: Task, *, evaluates: bool) -> TrainerConfig:
    """Return trl's settings: the config's, with defaults for the machine and what is ours."""
    accelerated = torch.accelerator.is_available()
    headline = f"eval_{task.score.names[-1]}" if config.score_examples else "eval_loss"
    defaults: dict[str, Any] = {
        "bf16": has_bf16(),
        "gradient_checkpointing": accelerated,
        "logging_steps": 10,
        "restore_callback_states_from_checkpoint": True,  # patience goes on where it was
        "report_to": ["tensorboard"],
    }
    given = {**defaults, **config.trainer, **({} if evaluates else {"eval_strategy": "no"})}
    given.pop("packing", None)  # we pack, so that every token keeps its part
    given.pop("save_total_limit", None)  # PartsTrainer drops old ones itself
    if given.get("eval_strategy", "no") == given.get("save_strategy", "steps") != "no":
        best = {"load_best_model_at_end": True, "metric_for_best_model": headline}
        given = {**best, **given}
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(config.run / "tensorboard")
    try:
        return TrainerConfig(
            **given,
            output_dir=str(config.run / "checkpoints"),
            max_length=None,  # rows never exceed max_tokens: trl's silent cut must find nothing
            dataset_kwargs={"skip_prepare_dataset": True},
            seed=config.seed,
            data_seed=config.seed,  # else the order depends on the number of processes
            use_cpu=not accelerated,
            disable_tqdm=True,  # the journal shows progress
        )
    except (ValueError, TypeError, ImportError) as error:
        raise UserError(f"trainer: {str(error).splitlines()[0]}") from None
