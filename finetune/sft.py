"""Supervised fine-tuning from cases to a saved adapter. Read it from top to bottom."""

import hashlib
import os
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from rich.console import Console
from transformers import EarlyStoppingCallback, PrinterCallback
from transformers.utils.logging import disable_progress_bar

from panjue.eval.classifier import FILE_VERSION
from panjue.finetune.checkpoints import newest_complete
from panjue.finetune.classifier import MAX_EXAMPLES, fit, save_fitted, training_advisor
from panjue.finetune.data import (
    LengthSampler,
    RowMaker,
    RowReport,
    TrainingRows,
    cached,
    pack,
)
from panjue.finetune.examples import Examples
from panjue.finetune.journal import MAX_SHOWN_EXAMPLES, Journal, print_example, print_plan
from panjue.finetune.libraries import cap_steps, check_library_settings, trainer_config
from panjue.finetune.model import (
    MAX_LEAK,
    Model,
    leak,
    load_base,
    resolve_dtype,
    with_lora,
)
from panjue.finetune.processes import is_sharded, join_processes, wait_for
from panjue.finetune.result import (
    claim_run,
    is_finished,
    kept_loss,
    run_record,
    save,
    trained_folder,
)
from panjue.finetune.settings import BaseConfig, SftConfig
from panjue.finetune.stop import StopOnSignal
from panjue.finetune.trainer import ReplyTrainer, step_size
from panjue.prompts.architecture import (
    UNKNOWN_TO_VLLM,
    is_listed,
    is_part,
    quantization_of,
    text_config,
    vllm_problem,
)
from panjue.prompts.example import Example
from panjue.prompts.model import CLASSIFIER, config_folder, load_tokenizer, model_folder
from panjue.prompts.plumbing.errors import UserError, first_line, of_library
from panjue.prompts.plumbing.files import dump, exclusive_lock, sha256
from panjue.prompts.plumbing.run import Run, RunRecord
from panjue.prompts.reader import Reader
from panjue.prompts.render import RULES
from panjue.prompts.task import configured, load_task

DATA_KEYS = {
    "task",
    "task_sha256",
    "train_sha256",
    "dev_sha256",
    "mix_sha256",
    "mix_ratio",
    "on_bad_row",
}
"""Entries of the record that decide the examples."""

ROW_KEYS = {*DATA_KEYS, "base_sha256", "prompt_sha256", "max_tokens", "solve"}
"""Entries of the record that decide the token rows."""


def train(config: SftConfig) -> None:
    """Fine-tune and save adapter (or model: `method: full`) and labels, unless this is done."""
    check_library_settings(config)
    task = configured(load_task(config.task), config.solve)
    processes = join_processes(config)
    args = trainer_config(config)
    console = Console(quiet=not processes.is_main_process, soft_wrap=True, highlight=False)
    disable_progress_bar()  # for loading and saving weights
    reader = Reader(task, on_bad_row=config.on_bad_row)
    check_trainable(config, console)
    base = model_folder(config.model)
    record = run_record(config, base, task)
    if not config.dry_run and is_finished(Run(config.run), record):
        console.print(f"{trained_folder(config)}: already trained with these settings")
        return
    writes = processes.is_main_process and not config.dry_run
    other = "run=FOLDER (make: RUN=FOLDER)"
    with exclusive_lock(config.run, other=other) if writes else nullcontext():
        if writes:
            is_finished(Run(config.run), record)  # another process may have finished another one
        try:
            run_training(config, args, reader, base, record, console)
        except torch.OutOfMemoryError as error:
            way_out = "set method=qlora, a lower max_tokens or a smaller base"
            raise UserError(f"GPU: {first_line(error)} {way_out}") from None


def check_trainable(config: SftConfig, console: Console) -> None:
    """Refuse a base that cannot be trained so or that vLLM does not know, before its download."""
    folder = config_folder(config.model)
    [architecture] = text_config(folder).architectures
    if quantization_of(folder) and config.method != "qlora":
        raise UserError(f"method: {config.model} has weights in four bits; set method=qlora")
    if isinstance(config, BaseConfig) or console.quiet:  # quiet: another process asks
        return
    if is_listed(architecture) and not is_part(folder):  # else vLLM may import what sees
        return
    problem = vllm_problem(architecture)
    if problem == UNKNOWN_TO_VLLM:
        raise UserError(f"{architecture}: vLLM cannot answer with it; take another base model")
    if problem:
        reason = f"not on this machine: vLLM cannot load {architecture} ({problem})"
        console.print(f"{'answering':12s} {reason}", markup=False)


def run_training(
    config: SftConfig, args: Any, reader: Reader, base: Path, record: RunRecord, console: Console
) -> None:
    """Train from the newest checkpoint if there is one, then save the result with `record`."""
    console.print("1/4 reading and tokenizing the cases")
    examples = Examples(config, reader)
    # The labels have to be known before it can be checked that an answer is valid.
    labels = reader.task.ask.labels(examples)
    maker = RowMaker(reader.task, load_tokenizer(base), labels, config.max_tokens)
    fitted = fitted_classifier(config, examples, maker, record, console)
    classifier = fitted / CLASSIFIER if fitted else None
    rows = make_rows(config, record, maker, examples, fitted)
    if not len(rows.held_out):
        args.eval_strategy = "no"
        args.load_best_model_at_end = False
    console.print("2/4 loading the base model")
    model = make_model(config, base, args)
    if choose_packing(config, model, args, console):
        rows = replace(rows, train=pack(rows.train, config.max_tokens))
    trainer = make_trainer(config, model, args, rows, console)
    print_plan(console, trainer, rows, examples)
    decides = reader.task.answer
    for line in islice(labels.look_alikes(map(decides.kind, decides.fields)), MAX_SHOWN_EXAMPLES):
        console.print(f"{'labels':12s} {line}", markup=False)
    if reader.skipped.rows:
        console.print(f"{'skipped':12s} {reader.skipped}", markup=False)
    if config.dry_run:
        print_example(console, trainer.train_dataset[0], rows.tokenizer)
        return
    if trainer.is_world_process_zero():
        claim_run(config, record, classifier)
        reader.skipped.write(config.run / "skipped-train.jsonl")
    trainer.accelerator.wait_for_everyone()
    result = trained_folder(config)
    console.print(f"3/4 training the {result.name}")
    train_or_resume(trainer, config, console)
    trainer.accelerator.wait_for_everyone()
    console.print("4/4 saving")
    save(trainer, labels, classifier, record, result, len(rows.report.tokens))
    console.print(f"written: {result}{kept_loss(trainer)}", markup=False)
    if "MAKELEVEL" not in os.environ and not isinstance(config, BaseConfig):  # make goes on
        console.print(f"next: panjue generate {config.run} TEST", markup=False)


def make_rows(
    config: SftConfig, record: RunRecord, maker: RowMaker, examples: Examples, fitted: Path | None
) -> TrainingRows:
    """Return the rows to train on and the held-out rows; `fitted` has the text classifier."""
    key = record.model_dump(include=ROW_KEYS)
    advisor = None
    if fitted and record.opinions:
        key["classifier_sha256"] = sha256(fitted / CLASSIFIER)
        advisor = training_advisor(fitted, maker.task, maker.labels)

    def rows(part: str, of: Iterable[Example]) -> tuple[Dataset, RowReport]:
        shown = map(advisor.show, of) if advisor else of
        return cached(
            config.run / "rows",
            {**key, "part": part, "rules": RULES},
            lambda report: maker.rows(shown, report),
            waits=not PartialState().is_main_process,
        )

    train_rows, report = rows("train", examples)
    if not report.tokens:
        reason = report.refused[0] if report.refused else "all are skipped, held out or in dev"
        raise UserError(f"{config.train}: no example is left to train on; {reason}")
    held_out, held_report = rows("dev", examples.held_out)
    return TrainingRows(train_rows, report, held_out, held_report, maker.tokenizer)


def make_model(config: SftConfig, folder: Path, args: Any) -> Model:
    """Return the base model for `method`, with LoRA layers unless all weights are trained."""
    frozen = config.method != "full"
    quantization = config.quantization if config.method == "qlora" else None
    dtype = resolve_dtype(config.dtype, args, frozen=frozen)
    # A process loads all weights straight to its device. Under FSDP one reads and shares them out.
    loads_all = torch.accelerator.is_available() and not is_sharded(os.environ)
    device = PartialState().device if loads_all else None
    model: Model = load_base(folder, dtype, quantization, config.attn_implementation, device)
    if frozen:
        torch.manual_seed(config.seed)  # LoRA starts from random matrices
        model = with_lora(model, config.lora)
    return model


def choose_packing(config: SftConfig, model: Model, args: Any, console: Console) -> bool:
    """Say whether examples are packed: `auto` asks the loaded model, `true` may be refused."""
    packing = config.trainer.get("packing", False)
    if not packing:
        return False
    # Under FSDP only the first process has the weights.
    found = [leak(model) if PartialState().is_main_process else 0.0]
    broadcast_object_list(found)
    if found[0] <= MAX_LEAK:
        return True
    problem = f"in this model an example in a pack sees the one before it (by {found[0]:.1e})"
    if packing is True:
        raise UserError(f"trainer.packing: {problem}; set trainer.packing=auto")
    args.train_sampling_strategy = config.trainer.get("train_sampling_strategy", "group_by_length")
    console.print(f"{'packing':12s} no: {problem}; examples are grouped by length", markup=False)
    return False


def make_trainer(
    config: SftConfig, model: Model, args: Any, rows: TrainingRows, console: Console
) -> ReplyTrainer:
    patience = [EarlyStoppingCallback(config.patience)] if args.load_best_model_at_end else []
    sampler = None  # transformers' order
    if args.train_sampling_strategy == "group_by_length":
        sampler = LengthSampler(rows.train, step_size(args), args.seed)
    with of_library("trainer"):
        trainer = ReplyTrainer(
            model,
            keep=config.trainer.get("save_total_limit", 2),
            args=args,
            sampler=sampler,
            train_dataset=rows.train,
            eval_dataset=rows.held_out if len(rows.held_out) else None,
            processing_class=rows.tokenizer,
            callbacks=[Journal(config.run, console), *patience, StopOnSignal(console)],
        )
        if not trainer.is_fsdp_enabled:  # FSDP replaces the weights before it has an optimizer
            trainer.create_optimizer()
    if "num_train_epochs" in config.trainer:
        cap_steps(trainer)
    trainer.remove_callback(PrinterCallback)  # Journal prints instead
    return trainer


def fitted_classifier(
    config: SftConfig, examples: Examples, maker: RowMaker, record: RunRecord, console: Console
) -> Path | None:
    """Return the folder with the fitted text classifier; None if the task's answers have no labels.

    One process fits it, once. A tiny base, which is there to be trained further, needs none.
    """
    if isinstance(config, BaseConfig) or not maker.task.answer.fields:
        return None
    key = record.model_dump(include={*DATA_KEYS, "seed"})
    key |= {"file": FILE_VERSION, "max_examples": MAX_EXAMPLES, "rules": RULES}
    text = dump(key)
    digest = hashlib.sha256(text.encode()).hexdigest()
    folder = config.run / "rows" / f"classifier-{digest[:16]}"
    if not PartialState().is_main_process:
        wait_for(folder)
    if not folder.exists():
        console.print(
            "fitting the text classifier on all cases that are not held out "
            f"(at most {MAX_EXAMPLES:,} of a file)"
        )
        fitted = fit(maker.task, examples.train, examples.mixable, maker.labels, config.seed)
        save_fitted(fitted, maker.task, maker.labels, folder)
    return folder


def train_or_resume(trainer: ReplyTrainer, config: SftConfig, console: Console) -> None:
    checkpoint = newest_complete(config.run / "checkpoints")
    if checkpoint is None:
        trainer.train()
        return
    console.print(f"resuming from {checkpoint}")
    trainer.resume_from(checkpoint)
