"""The result of a training: its manifest, whether it is finished, and its weights."""

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accelerate import PartialState
from omegaconf import OmegaConf
from rich.console import Console

from panjue.finetune.checkpoints import full_disk_named
from panjue.finetune.classifier.classifier import FILE_VERSION
from panjue.finetune.classifier.fit import MAX_EXAMPLES, fit, save_fitted
from panjue.finetune.distributed import make_once
from panjue.finetune.examples import Examples
from panjue.finetune.rules import shared_rules, task_sha256
from panjue.finetune.settings import OTHER_RUN, BaseConfig, SftConfig
from panjue.finetune.trainer import ReplyTrainer
from panjue.prompts.architecture import quantization_of
from panjue.prompts.labels import Labels
from panjue.prompts.model import CLASSIFIER, config_folder, model_sha256, prompt_sha256
from panjue.prompts.plumbing.config import DATA_FILES, load_values
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import (
    atomic_folder,
    atomic_write,
    dump,
    exclusive_lock,
    read_json,
    sha256,
    write_json,
)
from panjue.prompts.plumbing.ours import has_record, is_base, refuse_claim
from panjue.prompts.plumbing.run import (
    DATA,
    MANIFEST,
    REPLACED,
    RESULTS,
    ROWS,
    WEIGHTS,
    Run,
    RunRecord,
)
from panjue.prompts.render import names_opinions
from panjue.prompts.task import Task

MAX_DIFFERENCES = 4
"""Differences between two runs that a message shows."""

OF_SPEED = {
    "report_to",
    "logging_steps",
    "logging_strategy",
    "logging_first_step",
    "per_device_eval_batch_size",
    "gradient_checkpointing",
    "gradient_checkpointing_kwargs",
    "dataloader_num_workers",
    "dataloader_pin_memory",
    "dataloader_persistent_workers",
    "dataloader_prefetch_factor",
    "save_total_limit",
    "ddp_timeout",
    "torch_empty_cache_steps",
}
"""Settings of trl that may change when a run resumes; not `per_device_train_batch_size`, which
decides how gradients are rounded."""


def fits_classifier(config: SftConfig, task: Task) -> bool:
    """Say whether a text classifier is fitted; a tiny base, to be trained further, needs none."""
    return bool(task.answer.fields) and not isinstance(config, BaseConfig)


@dataclass(frozen=True)
class TrainingRun:
    """The run folder of one training, and the record of what the training is made from."""

    config: SftConfig
    record: RunRecord

    @classmethod
    def of(cls, config: SftConfig, base: Path, task: Task) -> "TrainingRun":
        """Return the run of a training that begins; `base` is the folder of the base model."""
        known: dict[str, Any] = config.model_dump(include=set(RunRecord.model_fields), mode="json")
        for name in DATA_FILES:
            file = getattr(config, name)
            known[f"{name}_sha256"] = sha256(file) if file else None
        known |= {
            "base": config.model,
            "base_sha256": model_sha256(base),
            "mix_ratio": config.mix_ratio if config.mix else None,
            "split_by": "normal text",
            "solve": task.solve.settings.model_dump() if task.solve else {},
            "opinions": config.opinions
            and fits_classifier(config, task)
            and names_opinions(config.task),
            "prompt_sha256": prompt_sha256(config.task),
            "task_sha256": task_sha256(config.task),
            "processes": PartialState().num_processes,
            "trainer": {name: v for name, v in config.trainer.items() if name not in OF_SPEED},
            "versions": {name: version(name) for name in ("torch", "transformers", "trl", "peft")},
        }
        return cls(config, RunRecord(**known))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes out of the folder; they may have finished there meanwhile."""
        if self.config.dry_run or not PartialState().is_main_process:
            yield
            return
        with exclusive_lock(self.config.run, other=OTHER_RUN):
            self.is_finished()  # raises if it is another training
            yield

    def is_finished(self) -> bool:
        """Say whether the folder has the result of this training; refuse other work in it."""
        run = Run(self.config.run)
        if is_base(run.folder) or (has_record(run.folder) and run.result == run.folder):
            raise UserError(f"{run.folder}: has a model or answers; choose another {OTHER_RUN}")
        has_result = any((run.folder / name / MANIFEST).exists() for name in RESULTS)
        if not has_result and not self._has_checkpoints():
            refuse_claim(run.folder, REPLACED, OTHER_RUN)
            return False  # no work can be lost
        reason = self._difference()
        if reason:
            raise UserError(
                f"{run.folder}: holds another run ({reason}); it is kept: choose another "
                f"{OTHER_RUN} for this one, or give the settings of that one, see {run.config}"
            )
        return has_result

    def _difference(self) -> str:
        """Return how the folder's own record differs from this one; empty if it does not."""
        folder = self.config.run
        if not has_record(folder):
            return "there is no record of how it was made"
        kept = RunRecord.read(folder)
        trainer = {name: v for name, v in kept.trainer.items() if name not in OF_SPEED}
        old = kept.model_copy(update={"trainer": trainer})
        parts = old.difference(self.record, DATA, ROWS, WEIGHTS).split("; ")
        shown = parts[:MAX_DIFFERENCES]
        if len(parts) > MAX_DIFFERENCES:
            shown.append(f"{len(parts) - MAX_DIFFERENCES} more")
        return "; ".join(shown)

    def classifier(self, examples: Examples, labels: Labels, console: Console) -> Path | None:
        """Return the folder with the text classifier; one process fits it, once.

        None: the task decides no field, or this is a tiny base, to be trained further.
        """
        task = examples.reader.task
        if not fits_classifier(self.config, task):
            return None
        seed = self.record.seed
        key = {**self.record.part(DATA), "seed": seed}
        key |= {"file": FILE_VERSION, "max_examples": MAX_EXAMPLES, "rules": shared_rules()}
        digest = hashlib.sha256(dump(key).encode()).hexdigest()
        folder = self.config.run / "rows" / f"classifier-{digest[:16]}"

        def make() -> None:
            console.print(
                "fitting the text classifier on all cases that are not held out "
                f"(at most {MAX_EXAMPLES:,} of a file)"
            )
            fitted = fit(task, examples.train, examples.mixable, labels, seed)
            save_fitted(fitted, task, labels, folder)

        make_once(folder, folder.is_dir, make)
        return folder

    def row_key(self, classifier: Path | None) -> dict[str, Any]:
        """Return what the token rows depend on: settings, and the opinions that prompts show."""
        key = self.record.part(DATA, ROWS)
        if self.record.opinions and classifier:
            key["classifier_sha256"] = sha256(classifier / CLASSIFIER)
        return key

    def claim(self, row_key: Mapping[str, Any]) -> None:
        """Write config.yaml and manifest.json, which assign the run folder to this training.

        A training with checkpoints resumes only with the classifier whose opinions they saw.
        """
        folder = self.config.run
        classifier_sha256 = row_key.get("classifier_sha256")
        record = self.record
        if classifier_sha256:
            record = record.model_copy(update={"classifier_sha256": classifier_sha256})
        if self._has_checkpoints():
            old = RunRecord.read(folder)
            if old.classifier_sha256 != classifier_sha256:
                raise UserError(
                    f"{folder}: its checkpoints saw the opinions of another text classifier; "
                    f"restore rows/, or choose another {OTHER_RUN}"
                )
        # The other sections of the config file, for `generate` and `serve`, are kept.
        sections = load_values(self.config.path) if self.config.path else {}
        sections = {**sections, "sft": self.config.model_dump(mode="json")}
        record.write(folder)  # first: it makes the folder ours
        with atomic_write(Run(folder).config) as out:
            out.write(OmegaConf.to_yaml(sections))

    def _has_checkpoints(self) -> bool:
        return any((self.config.run / "checkpoints").glob("checkpoint-*"))

    def save(
        self, trainer: ReplyTrainer, labels: Labels, classifier: Path | None, examples: int
    ) -> None:
        """Write weights, labels, classifier and record to a folder that appears when complete.

        `examples` is the number of training examples.
        """
        if not trainer.is_world_process_zero():
            trainer.save_model(str(self.config.result))  # takes part if weights are sharded
            return
        with atomic_folder(self.config.result) as folder:
            with full_disk_named(folder):
                trainer.save_model(str(folder))
            (folder / "training_args.bin").unlink(missing_ok=True)  # a pickle; see config.yaml
            peft_config = folder / "adapter_config.json"
            if peft_config.exists():
                base = self.record.base
                if Path(base).is_dir():  # absolute: plain peft finds it from any working folder
                    base = str(Path(base).resolve())
                write_json(peft_config, {**read_json(peft_config), "base_model_name_or_path": base})
            labels.save(folder)
            digest = sha256(folder / "labels.json")
            results: dict[str, Any] = {"examples": examples, "labels_sha256": digest}
            results["attention"] = trainer.model.config.get_text_config()._attn_implementation
            if classifier:
                shutil.copy(classifier / CLASSIFIER, folder / CLASSIFIER)
                results["classifier_sha256"] = sha256(folder / CLASSIFIER)
            self.record.model_copy(update=results).write(folder)

    def say_written(self, trainer: ReplyTrainer, console: Console) -> None:
        """Print what was written, and the next command where no Makefile runs it."""
        config = self.config
        loss = kept_loss(trainer)
        console.print(f"written: {config.result}{loss}")
        if loss and config.method == "qlora" and not quantization_of(config_folder(config.model)):
            console.print("this loss is of the base in four bits; answers come from it as it is")
        if "MAKELEVEL" not in os.environ and not isinstance(config, BaseConfig):
            console.print(f"next: panjue generate {config.run} TEST")


def kept_loss(trainer: ReplyTrainer) -> str:
    """Return the held-out loss of the kept weights; empty if they were not evaluated."""
    state = trainer.state
    kept = state.global_step
    if trainer.args.load_best_model_at_end:
        kept = state.best_global_step
    for row in reversed(state.log_history):
        if row["step"] == kept and "eval_loss" in row:
            return f" (loss {row['eval_loss']:.4f} on {len(trainer.eval_dataset)} held-out cases)"
    return ""
