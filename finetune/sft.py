"""Supervised fine-tuning from cases to a saved adapter. Read it from top to bottom."""

import hashlib
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from transformers import EarlyStoppingCallback
from transformers.utils.logging import disable_progress_bar
from trl import SFTConfig as TrainerConfig

from panjue.finetune.classifier.classifier import FILE_VERSION
from panjue.finetune.classifier.fit import MAX_EXAMPLES, fit, save_fitted, training_advisor
from panjue.finetune.data import RowMaker, pack, training_rows
from panjue.finetune.distributed import join_processes, make_once
from panjue.finetune.examples import Examples
from panjue.finetune.library_settings import check_library_settings, trainer_config
from panjue.finetune.model import check_embeddings, check_trainable, choose_packing, load_model
from panjue.finetune.rules import shared_rules
from panjue.finetune.settings import OTHER_RUN, BaseConfig, SftConfig
from panjue.finetune.stop import StopOnSignal
from panjue.finetune.trainer import ReplyTrainer, cap_steps
from panjue.finetune.training_log import TrainingLog, print_example, print_plan
from panjue.finetune.training_run import TrainingRun, fits_classifier, kept_loss, run_record
from panjue.prompts.model import CLASSIFIER, load_tokenizer, model_folder, threads_for
from panjue.prompts.plumbing.errors import UserError, first_line, of_library
from panjue.prompts.plumbing.files import dump, exclusive_lock, sha256
from panjue.prompts.plumbing.run import DATA, ROWS
from panjue.prompts.reader import Reader
from panjue.prompts.task import configured, load_task


def train(config: SftConfig) -> None:
    """Fine-tune and save adapter (or model: `method: full`) and labels, unless this is done."""
    check_library_settings(config)
    processes = join_processes(config)
    args = trainer_config(config)
    console = Console(
        quiet=not processes.is_main_process, soft_wrap=True, highlight=False, markup=False
    )
    disable_progress_bar()  # for loading and saving weights
    task = configured(load_task(config.task), config.solve)
    check_trainable(config, console)
    base = model_folder(config.model)
    run = TrainingRun(config, run_record(config, base, task))
    if not config.dry_run and run.is_finished():
        console.print(f"{config.result}: already trained with these settings")
        return
    writes = processes.is_main_process and not config.dry_run
    with exclusive_lock(config.run, other=OTHER_RUN) if writes else nullcontext():
        if writes:
            run.is_finished()  # refuses what another process has finished there meanwhile
        try:
            reader = Reader(task, on_bad_row=config.on_bad_row)
            with threads_for(base):
                run_training(run, args, reader, base, console)
        except torch.OutOfMemoryError as error:
            way_out = "set method=qlora, a lower max_tokens or a smaller base"
            raise UserError(f"GPU: {first_line(error)} {way_out}") from None


def run_training(
    run: TrainingRun, args: TrainerConfig, reader: Reader, base: Path, console: Console
) -> None:
    """Train from the newest checkpoint if there is one, then save the result."""
    config = run.config
    console.print("1/4 reading and tokenizing the cases")
    task = reader.task
    examples = Examples(config, reader)
    # The labels have to be known before it can be checked that an answer is valid.
    labels = task.ask.labels(examples)
    maker = RowMaker(task, load_tokenizer(base), labels, config.max_tokens)
    row_key = run.record.part(DATA, ROWS)
    classifier = None
    advisor = None
    if fits_classifier(config, task):
        fitted = fitted_classifier(run, examples, maker, console)
        classifier = fitted / CLASSIFIER
        if run.record.opinions:
            row_key["classifier_sha256"] = sha256(classifier)
            advisor = training_advisor(fitted, task, labels)
    rows = training_rows(config.run / "rows", row_key, maker, examples, advisor)
    if not len(rows.held_out):
        args.eval_strategy = "no"
        args.load_best_model_at_end = False
    console.print("2/4 loading the base model")
    model = load_model(config, base, args)
    check_embeddings(base, model, maker.tokenizer, rows.train, rows.held_out)
    if choose_packing(config, model, args, console):
        rows = replace(rows, train=pack(rows.train, config.max_tokens))
    log = TrainingLog(config.run, console)
    patience = [EarlyStoppingCallback(config.patience)] if args.load_best_model_at_end else []
    with of_library("trainer"):
        trainer = ReplyTrainer(
            model,
            args,
            rows.train,
            eval_dataset=rows.held_out if len(rows.held_out) else None,
            processing_class=maker.tokenizer,
            callbacks=[log, *patience, StopOnSignal(console)],
        )
    if "num_train_epochs" in config.trainer:
        cap_steps(trainer)
    print_plan(console, trainer, rows, examples, labels)
    if config.dry_run:
        print_example(console, trainer.train_dataset[0], maker.tokenizer)
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
    loss = kept_loss(trainer)
    reached = "" if loss is None else f" (loss {loss:.4f} on {len(rows.held_out)} held-out cases)"
    console.print(f"written: {config.result}{reached}")
    if "MAKELEVEL" not in os.environ and not isinstance(config, BaseConfig):  # make goes on
        console.print(f"next: panjue generate {config.run} TEST")


def fitted_classifier(
    run: TrainingRun, examples: Examples, maker: RowMaker, console: Console
) -> Path:
    """Return the folder with the text classifier; one process fits it, once."""
    key = {**run.record.part(DATA), "seed": run.record.seed}
    key |= {"file": FILE_VERSION, "max_examples": MAX_EXAMPLES, "rules": shared_rules()}
    digest = hashlib.sha256(dump(key).encode()).hexdigest()
    folder = run.config.run / "rows" / f"classifier-{digest[:16]}"

    def make() -> None:
        console.print(
            "fitting the text classifier on all cases that are not held out "
            f"(at most {MAX_EXAMPLES:,} of a file)"
        )
        seed = run.config.seed
        fitted = fit(maker.task, examples.train, examples.mixable, maker.labels, seed)
        save_fitted(fitted, maker.task, maker.labels, folder)

    make_once(folder, folder, make)
    return folder
