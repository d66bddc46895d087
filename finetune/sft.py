"""Supervised fine-tuning from cases to a saved adapter. Read it from top to bottom."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from rich.console import Console
from transformers import EarlyStoppingCallback, PrinterCallback
from transformers.utils.logging import disable_progress_bar

from panjue.eval.classifier import FILE_VERSION, Classifier
from panjue.finetune.checkpoints import awaits_evaluation, is_over, newest_complete
from panjue.finetune.classifier import MAX_EXAMPLES, fit
from panjue.finetune.data import Report, cached, pack, questions, rows
from panjue.finetune.examples import (
    check_side,
    held_out_examples,
    mixable_examples,
    mixed_examples,
    train_examples,
)
from panjue.finetune.group_trainer import GroupTrainer
from panjue.finetune.journal import Journal
from panjue.finetune.libraries import (
    check_library_settings,
    tracker_errors,
    trainer_config,
)
from panjue.finetune.model import (
    Model,
    check_packing,
    load_base,
    resolve_dtype,
    with_lora,
)
from panjue.finetune.optimizers import check_optimizer
from panjue.finetune.plan import evaluations, print_example, print_plan
from panjue.finetune.processes import check_number, join_processes, on_main_process, wait_for
from panjue.finetune.result import claim, is_finished, run_record, save, trained_folder
from panjue.finetune.robust import Objective
from panjue.finetune.scoring import HeldOutScore, held_out_questions, kept_score
from panjue.finetune.settings import SftConfig, sft_settings
from panjue.finetune.stages import fits_classifier, print_stage
from panjue.finetune.stop import StopOnSignal
from panjue.finetune.trainer import PartsTrainer
from panjue.prompts.example import UNKNOWN, Example
from panjue.prompts.labels import Labels
from panjue.prompts.model import CLASSIFIER, load_tokenizer, model_folder
from panjue.prompts.plumbing.errors import UserError, did_you_mean
from panjue.prompts.plumbing.files import dump
from panjue.prompts.plumbing.lock import exclusive_lock
from panjue.prompts.plumbing.parts import SYNTAX
from panjue.prompts.plumbing.run import Run, RunRecord
from panjue.prompts.reader import Reader, side_groups
from panjue.prompts.render import RULES
from panjue.prompts.task import configured, load_task

ROW_CACHE_KEYS = (
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
"""Entries of the record that decide the token rows."""


def main(path: Path, overrides: Sequence[str] = ()) -> None:
    """Train with the config at `path`; do nothing if the run is already finished."""
    train(sft_settings(path, overrides))


def train(config: SftConfig) -> None:
    """Fine-tune and save the adapter (or, with `method: full`, the model) with its labels.

    Raises:
        UserError: A file or setting is wrong, or the run folder belongs to another run.
    """
    check_library_settings(config)
    task = configured(load_task(config.task), config.solve)
    if task.answer.several_calls:
        config = config.model_copy(update={"score_examples": 0})
    processes = join_processes(config)
    console = Console(quiet=not processes.is_main_process, soft_wrap=True)
    disable_progress_bar()  # for loading and saving weights
    reader = Reader(task, side_groups(config.groups), on_bad_row=config.on_bad_row)
    folder = model_folder(config.model)
    record = on_main_process(processes, lambda: run_record(config, folder, task))
    if not config.dry_run and is_finished(Run(config.run), record):
        console.print(f"{trained_folder(config)}: already trained with these settings")
        return
    check_side(reader, [path for path in (config.train, config.dev, config.mix) if path])
    writes = processes.is_main_process and not config.dry_run
    with exclusive_lock(config.run) if writes else nullcontext():
        if writes:
            is_finished(Run(config.run), record)  # another process may have finished it
        run_training(config, reader, folder, record, console)


def run_training(
    config: SftConfig,
    reader: Reader,
    folder: Path,
    record: RunRecord,
    console: Console,
) -> None:
    """Train from the newest checkpoint if there is one, then save the result with `record`."""
    print_stage(config, console, 1, "reading and tokenizing the cases")
    labels = reader.task.ask.labels(training_set(config, reader))
    trainer, report, held_report = make_trainer(config, reader, folder, labels, record, console)
    mixed = sum(1 for _ in mixed_set(config, reader))
    if config.on_bad_row == "skip":
        for _ in held_out_set(config, reader):
            pass  # read the file even if its token rows are cached, to list its bad rows
    print_plan(console, trainer, report, held_report, mixed)
    if reader.skipped.rows:
        console.print(f"{'skipped':12s} {reader.skipped}", highlight=False, markup=False)
    if config.dry_run:
        print_example(console, trainer.train_dataset[0], trainer.processing_class)
        return
    if trainer.is_world_process_zero():
        claim(config, record, console)
        reader.skipped.write(config.run / "skipped-train.jsonl")
    trainer.accelerator.wait_for_everyone()
    result = trained_folder(config)
    classifier = None
    if fits_classifier(config):
        console.print(
            "fitting the text classifier on all cases that are not held out "
            f"(at most {MAX_EXAMPLES:,} of a file)",
            highlight=False,
        )
        classifier = fitted_classifier(config, reader, labels, record)
    print_stage(config, console, 3, f"training the {result.name}")
    with tracker_errors():
        checkpoint = newest_complete(config.run / "checkpoints")
        train_or_resume(trainer, checkpoint, config.patience, console)
    trainer.accelerator.wait_for_everyone()
    print_stage(config, console, 4, "saving")
    save(trainer, labels, classifier, record, result, len(report.tokens))
    console.print(f"written: {result}{kept_score(trainer)}", highlight=False, markup=False)
    console.print(f"next: panjue generate {config.run} TEST", highlight=False, markup=False)


def train_or_resume(
    trainer: PartsTrainer, checkpoint: Path | None, patience: int, console: Console
) -> None:
    """Train from `checkpoint`, if there is one; first repeat its evaluation if that was stopped."""
    if checkpoint is None:
        trainer.train()
        return
    check_number(checkpoint, trainer.accelerator.num_processes)
    console.print(f"resuming from {checkpoint}")
    if awaits_evaluation(checkpoint):
        console.print("scoring it first: a signal had stopped that", highlight=False)
        trainer.finish_evaluation(checkpoint)
    if is_over(checkpoint, patience):
        trainer.load_finished(checkpoint)
    else:
        trainer.resume_from(checkpoint)


def token_rows(
    config: SftConfig,
    reader: Reader,
    tokenizer: Any,
    labels: Labels,
    record: RunRecord,
    train_report: Report | None = None,
) -> tuple[Dataset, Report]:
    """Return the training rows or, if `train_report` is given, the held-out rows."""
    examples = held_out_set if train_report else training_set
    attribute = config.robust.by if config.robust else None
    key = record.model_dump(include=set(ROW_CACHE_KEYS))
    return cached(
        config.run / "rows",
        {**key, "by": attribute, "part": "dev" if train_report else "train", "rules": RULES},
        lambda report: rows(
            reader.task,
            questions(reader.task, examples(config, reader), report),
            tokenizer,
            labels,
            config.max_tokens,
            report,
            attribute,
        ),
        train_report.parts if train_report else (SYNTAX,),
        train_report.groups if train_report else (),
        waits=not PartialState().is_main_process,
    )


def fitted_classifier(config: SftConfig, reader: Reader, labels: Labels, record: RunRecord) -> Path:
    """Return the file with the text classifier of this training; one process fits it, once."""
    names = ("task", "train_sha256", "dev_sha256", "mix_sha256", "mix_ratio", "on_bad_row", "seed")
    limits = {"file": FILE_VERSION, "max_examples": MAX_EXAMPLES}
    key = {**limits, **record.model_dump(include=set(names))}
    digest = hashlib.sha256(dump(key).encode()).hexdigest()
    path = config.run / "rows" / f"{digest[:16]}-{CLASSIFIER}"
    if not PartialState().is_main_process:
        wait_for(path)
    if not path.exists():
        unfinished = path.with_name(f".{path.name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        fit_classifier(config, reader, labels).save(unfinished)
        unfinished.rename(path)
    return path


def fit_classifier(config: SftConfig, reader: Reader, labels: Labels) -> Classifier:
    """Return the text classifier of the examples that are not held out, those of `mix` included."""
    train = train_examples(reader, config.train, config.dev)
    mix = mixable_examples(reader, config.dev, config.mix) if config.mix else ()
    return fit(reader.task, train, mix, labels, config.seed)


def training_set(config: SftConfig, reader: Reader) -> Iterator[Example]:
    """Yield the training examples, those of `mix` included."""
    yield from train_examples(reader, config.train, config.dev)
    yield from mixed_set(config, reader)


def mixed_set(config: SftConfig, reader: Reader) -> Iterator[Example]:
    """Yield the training examples that come from `mix`."""
    if config.mix:
        yield from mixed_examples(reader, config.train, config.dev, config.mix, config.mix_ratio)


def held_out_set(config: SftConfig, reader: Reader) -> Iterator[Example]:
    """Yield the examples for the held-out loss and score."""
    return held_out_examples(reader, config.train, config.dev)


def make_trainer(
    config: SftConfig,
    reader: Reader,
    folder: Path,
    labels: Labels,
    record: RunRecord,
    console: Console,
) -> tuple[PartsTrainer, Report, Report]:
    """Return the trainer, ready to start, and the reports of the training and held-out rows."""
    tokenizer = load_tokenizer(folder)
    train_rows, report = token_rows(config, reader, tokenizer, labels, record)
    held_rows, held_report = token_rows(config, reader, tokenizer, labels, record, report)
    check_report(config, report)
    args = trainer_config(config, reader.task, evaluates=len(held_rows) > 0)
    packing = config.trainer.get("packing", False)
    examples = held_out_set(config, reader) if args.eval_strategy != "no" else ()
    sizes = {"size": config.score_examples, "max_tokens": config.max_tokens}
    sample = held_out_questions(reader.task, tokenizer, labels, examples, **sizes)
    score = HeldOutScore(reader.task, tokenizer, labels, sample, console) if sample else None
    journal = Journal(config.run, console)
    patience = [EarlyStoppingCallback(config.patience)] if args.load_best_model_at_end else []
    print_stage(config, console, 2, "loading the base model")
    model = make_model(config, folder, bf16=bool(args.bf16))
    if packing:
        check_packing(model.config)
    objective = make_objective(config, model, report.groups)
    trainer_class = partial(GroupTrainer, objective=objective) if objective else PartsTrainer
    try:
        trainer: PartsTrainer = trainer_class(
            model,
            parts=held_report.parts,  # starts with the parts of the training rows
            token_weights=config.token_weights,
            score=score,
            keep=config.trainer.get("save_total_limit", 2),
            lr_ratio=config.loraplus_lr_ratio,
            stop=StopOnSignal(console),
            args=args,
            train_dataset=pack(train_rows, config.max_tokens) if packing else train_rows,
            eval_dataset=held_rows if len(held_rows) else None,
            processing_class=tokenizer,
            callbacks=[journal, *patience],
        )
        check_optimizer(trainer, config.loraplus_lr_ratio)
    # A wrong setting or a missing package; for wandb and other loggers that is a RuntimeError.
    except (ValueError, TypeError, ImportError, RuntimeError) as error:
        raise UserError(f"trainer: {str(error).splitlines()[0]}") from None
    trainer.remove_callback(PrinterCallback)  # the journal prints instead
    journal.evaluations = evaluations(trainer)
    return trainer, report, held_report


def check_report(config: SftConfig, report: Report) -> None:
    """Refuse an empty training set, and a token weight for a part that no reply has.

    Raises:
        UserError: The message names the training file or the unknown part.
    """
    if not report.tokens:
        reason = report.refused[0] if report.refused else "all skipped or held out; set dev=FILE"
        raise UserError(f"{config.train}: no example is left to train on; {reason}")
    for part in config.token_weights:
        if part not in report.parts:
            hint = did_you_mean(part, report.parts)
            raise UserError(f"token_weights: a reply has no part {part!r}{hint}")


def make_model(config: SftConfig, folder: Path, *, bf16: bool) -> Model:
    """Return the base model for `method`, with LoRA layers unless all weights are trained."""
    frozen = config.method != "full"
    quantization = config.quantization if config.method == "qlora" else None
    dtype = resolve_dtype(config.dtype, bf16=bf16 and frozen)
    model: Model = load_base(folder, dtype, quantization, config.attn_implementation)
    if frozen:
        torch.manual_seed(config.seed)
        model = with_lora(model, config.lora)
    return model


def make_objective(config: SftConfig, model: Model, groups: Sequence[str]) -> Objective | None:
    """Return the objective over groups; None to minimize the mean over tokens.

    Raises:
        UserError: No example has a group by the attribute.
    """
    if config.robust is None:
        return None
    if set(groups) <= {UNKNOWN}:
        raise UserError(f"robust.by: no example to train on has a group by {config.robust.by!r}")
    torch.manual_seed(config.seed)
    hidden = model.config.get_text_config().hidden_size
    return Objective(config.robust, groups, hidden, PartialState().device)
