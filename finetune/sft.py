"""Supervised fine-tuning from cases to a saved adapter. Read it from top to bottom."""

from contextlib import suppress
from pathlib import Path

from datasets import disable_progress_bars
from rich.console import Console
from transformers import EarlyStoppingCallback
from transformers.utils.logging import disable_progress_bar
from trl import SFTConfig as TrainerConfig

from panjue.finetune.data import RowMaker, training_rows
from panjue.finetune.distributed import join_processes
from panjue.finetune.examples import Examples
from panjue.finetune.kept import KeepAdapters
from panjue.finetune.library_settings import check_library_settings, trainer_config
from panjue.finetune.memory import use_memory
from panjue.finetune.model import (
    check_embeddings,
    check_lora_layers,
    check_trainable,
    choose_packing,
    load_model,
    out_of_memory_named,
)
from panjue.finetune.settings import SftConfig
from panjue.finetune.stop import StopOnSignal
from panjue.finetune.trainer import ReplyTrainer
from panjue.finetune.training_log import TrainingLog, print_plan, print_start
from panjue.finetune.training_run import TrainingRun
from panjue.prompts.labels import merged_labels
from panjue.prompts.model import load_tokenizer, model_folder, threads_for
from panjue.prompts.plumbing.errors import UserError, of_library
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task


def train(config: SftConfig) -> None:
    """Fine-tune and save adapter (or model, for method=full) and labels, unless already done."""
    check_library_settings(config)
    processes = join_processes(config)
    args = trainer_config(config)
    console = Console(
        quiet=not processes.is_main_process, soft_wrap=True, highlight=False, markup=False
    )
    disable_progress_bar()  # for loading and saving weights
    disable_progress_bars()  # for packing rows
    task = load_task(config.task, config.solve)
    check_trainable(config, console)
    check_lora_layers(config)
    base = model_folder(config.model)
    run = TrainingRun.of(config, base, task)
    if not config.dry_run and run.is_finished():
        console.print(f"{config.result}: already trained with these settings{run.doubt()}")
        return
    with run.lock(), threads_for(base), out_of_memory_named(args):
        reader = Reader(task, columns=config.columns, on_bad_row=config.on_bad_row)
        run_training(run, args, reader, base, console)


def run_training(
    run: TrainingRun, args: TrainerConfig, reader: Reader, base: Path, console: Console
) -> None:
    """Train from the newest checkpoint if there is one, then save the result."""
    config = run.config
    console.print("1/4 reading and tokenizing the cases")
    task = reader.task
    examples = Examples(config, reader)
    # First, because gold answers are checked against the labels of all cases.
    labels = task.ask.labels(examples)
    if config.start:
        print_start(console, config, config.start, examples, labels)
        labels = merged_labels([config.start.labels, labels])
    maker = RowMaker(task, load_tokenizer(base), labels, config.max_tokens)
    classifier = run.classifier(examples, labels, console)
    row_key = run.row_key(classifier)
    show_opinions = run.opinion_shower(classifier, task, labels)
    rows = training_rows(config.run / "rows", row_key, maker, examples, show_opinions)
    if not len(rows.held_out):
        args.eval_strategy = "no"
        args.load_best_model_at_end = False
        if config.keep > 1:
            raise UserError("keep: no case is held out that could choose; give dev=FILE")
    console.print("2/4 loading the base model")
    model = load_model(config, base, args)
    check_embeddings(base, model, maker.tokenizer, rows.train, rows.held_out)
    if choose_packing(config, model, args, console):
        rows = rows.packed(config.max_tokens)
    use_memory(config, model, args, rows.train, console)
    log = TrainingLog(config.run, console)
    patience = [EarlyStoppingCallback(config.patience)] if args.load_best_model_at_end else []
    keeping = [KeepAdapters(config.run, config.keep)] if config.keep > 1 else []
    with of_library("trainer"):
        trainer = ReplyTrainer(
            model,
            args,
            rows.train,
            console,
            eval_dataset=rows.held_out if len(rows.held_out) else None,
            processing_class=maker.tokenizer,
            callbacks=[log, *keeping, *patience, StopOnSignal(console)],
        )
    if "num_train_epochs" in config.trainer:  # the epochs or max_steps, whichever ends first
        trainer.cap_steps()
    print_plan(console, trainer, rows, examples, labels, with_example=config.dry_run)
    if config.dry_run:
        with suppress(OSError):  # transformers has made it, unless a training has checkpoints there
            (config.run / "checkpoints").rmdir()
        return
    if trainer.is_world_process_zero():
        run.claim(row_key.get("classifier_sha256"))
        reader.skipped.write(config.run / "skipped-train.jsonl")
    trainer.accelerator.wait_for_everyone()
    console.print(f"3/4 training the {config.result.name}")
    trainer.train_or_resume(console)
    trainer.accelerator.wait_for_everyone()
    console.print("4/4 saving")
    run.save(trainer, labels, classifier, len(rows.report.tokens), log.seconds)
    run.say_written(trainer, console)
