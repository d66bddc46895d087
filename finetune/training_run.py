"""The run folder of a training: its record, whether it is finished, and its saved weights."""

import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accelerate import PartialState
from omegaconf import OmegaConf
from rich.console import Console

from panjue.finetune.card import CARD, write_card
from panjue.finetune.checkpoints import disk_errors_named
from panjue.finetune.classifier.classifier import FILE_VERSION
from panjue.finetune.classifier.fit import (
    MAX_EXAMPLES,
    fit,
    save_fitted,
    show_placeholders,
    training_advisor,
)
from panjue.finetune.data import count_examples
from panjue.finetune.distributed import make_once
from panjue.finetune.examples import Examples
from panjue.finetune.library_settings import RENAMED
from panjue.finetune.rules import shared_rules, task_sha256
from panjue.finetune.settings import OTHER_RUN, BaseConfig, SftConfig, changed_settings
from panjue.finetune.summary import finished, kept_loss
from panjue.finetune.trained import read_trained
from panjue.finetune.trainer import ReplyTrainer
from panjue.prompts.architecture import quantization_of
from panjue.prompts.example import Example
from panjue.prompts.fingerprint import base_change, base_files, base_sha256
from panjue.prompts.labels import Labels
from panjue.prompts.model import CLASSIFIER, config_folder, model_folder, prompt_sha256
from panjue.prompts.plumbing.config import DATA_FILES, load_values
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import (
    atomic_folder,
    atomic_write,
    delete,
    dump,
    exclusive_lock,
    read_json,
    sha256,
    write_json,
)
from panjue.prompts.plumbing.ours import has_record, is_base, refuse_claim
from panjue.prompts.plumbing.records import (
    CHOSEN,
    DATA,
    MANIFEST,
    ROWS,
    SUMMARY,
    WEIGHTS,
    RunRecord,
    TrainingSummary,
)
from panjue.prompts.plumbing.run import (
    ADAPTER_CONFIG,
    CONFIG,
    KEPT,
    REPLACED,
    RESULTS,
    kept_adapters,
    weights_folder,
)
from panjue.prompts.plumbing.version import panjue_version
from panjue.prompts.render import names_opinions
from panjue.prompts.saved import keep_readable
from panjue.prompts.task import Task

MAX_DIFFERENCES = 4
"""Number of differences between two runs that a message shows."""

OF_SPEED = {
    *("report_to", "run_name", "logging_steps", "logging_strategy", "logging_first_step"),
    *("per_device_train_batch_size", "per_device_eval_batch_size", "torch_empty_cache_steps"),
    *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
    *("dataloader_prefetch_factor", "save_total_limit", "ddp_timeout", *RENAMED),
}
"""Settings of trl that may change when a run resumes. With another `per_device_train_batch_size`,
which depends on the memory of the GPU, sums of gradients round in another way."""


def fits_classifier(config: SftConfig, task: Task) -> bool:
    """Say whether a text classifier is fitted. A tiny base, to be trained further, needs none."""
    return bool(task.answer.fields) and not isinstance(config, BaseConfig)


@dataclass(frozen=True)
class TrainingRun:
    """The run folder of one training, and the record of what the training was made from."""

    config: SftConfig
    record: RunRecord
    base: Path

    @classmethod
    def of(cls, config: SftConfig, base: Path, task: Task) -> "TrainingRun":
        """Return the run of a training that begins; `base` is the folder of the base model."""
        # Most entries of a record are settings of the same name. Some are replaced below.
        known: dict[str, Any] = config.model_dump(
            include=set(RunRecord.model_fields), mode="json", by_alias=False
        )
        for name in DATA_FILES:
            file = getattr(config, name)
            known[f"{name}_sha256"] = sha256(file) if file else None
        files = base_files(base)
        known |= {
            "base": config.model,
            "base_sha256": base_sha256(files),
            "base_files": files,
            "mix_ratio": config.mix_ratio if config.mix else None,
            "split_by": "normal text",  # whether a case is held out depends on its text
            "solve": task.solve.settings.model_dump() if task.solve else {},
            # Whether prompts show opinions: they need a classifier, and a place in the prompt.
            "opinions": config.opinions
            and fits_classifier(config, task)
            and names_opinions(config.task),
            "prompt_sha256": prompt_sha256(config.task),
            "task_sha256": task_sha256(config.task),
            "processes": PartialState().num_processes,
            "trainer": {name: v for name, v in config.trainer.items() if name not in OF_SPEED},
            "versions": {
                "panjue": panjue_version(),
                **{name: version(name) for name in ("torch", "transformers", "trl", "peft")},
            },
        }
        if config.start:
            known |= {
                "from_run_sha256": config.start.sha256,
                "from_labels_sha256": config.start.labels_sha256,
                "from_record": config.start.record,
            }
        run = cls(config, RunRecord(**known), base)
        run.check_base_of_start()
        return run

    def check_base_of_start(self) -> None:
        """Refuse another base than that of the adapter that this training starts from."""
        start = self.config.start
        if start is None or start.record.base_sha256 == self.record.base_sha256:
            return
        # Before version 0.5, the hash was another one even for the same base.
        if change := base_change(start.record, self.base):
            name = self.config.model
            other = f"{self.config.from_run} was trained on another base than {name} is now"
            raise UserError(f"from: {other} ({change}); set model= to that base")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes out of the folder within the block.

        UserError: another process works there, or has begun another training since the last check.
        """
        if self.config.dry_run or not PartialState().is_main_process:
            yield
            return
        with exclusive_lock(self.config.run, other=OTHER_RUN):
            self.is_finished()  # called only to refuse work of another training
            yield

    def is_finished(self) -> bool:
        """Say whether the folder has the result of this training; refuse work of another one."""
        run = self.config.run
        # A run has its weights in RUN/adapter or RUN/model. If `weights_folder` finds labels and a
        # record in the folder itself, it is an adapter or model outside a run, or has answers.
        is_no_run = has_record(run) and weights_folder(run) == run
        if is_base(run) or is_no_run:
            raise UserError(f"{run}: has a model or answers; choose another {OTHER_RUN}")
        has_result = any((run / name / MANIFEST).exists() for name in RESULTS)
        if not has_result and not self._has_checkpoints():
            # Nothing was trained here, but without a record, a file with a name that training
            # replaces, such as config.yaml, is the user's. Then this raises a UserError.
            refuse_claim(run, REPLACED, OTHER_RUN)
            return False
        reason = self._difference(has_result=has_result)
        if reason:
            raise UserError(
                f"{run}: holds another run ({reason}); it is kept: choose another "
                f"{OTHER_RUN} for this one, or give the settings of that one, see {run / CONFIG}"
            )
        return has_result

    def _difference(self, *, has_result: bool) -> str:
        """Return how the record in the folder differs from this one; empty if it does not.

        `has_result` says whether the training of the folder is finished. If not, it would resume,
        which needs the same code of the task.
        """
        folder = self.config.run
        if not has_record(folder):
            return "there is no record of how it was made"
        kept = RunRecord.read(folder)
        if kept.is_before_0_5 and not has_result:
            return "a version before 0.5 began it, and hashed the task's code in another way"
        if bool(kept.adopted) != bool(self.record.adopted):
            return "one was trained, the other adopted"
        same: dict[str, Any] = {}  # entries of which a difference does not count
        same["trainer"] = {name: v for name, v in kept.trainer.items() if name not in OF_SPEED}
        same["from_labels_sha256"] = self.record.from_labels_sha256  # a part of `from_run_sha256`
        change = ""
        if kept.base_sha256 != self.record.base_sha256:
            change = base_change(kept, self.base)
        if not change:
            same["base_sha256"] = self.record.base_sha256
        if kept.is_before_0_5:  # it was hashed in another way; `doubt` is printed instead
            same["task_sha256"] = self.record.task_sha256
        old = kept.model_copy(update=same)
        parts = old.difference(self.record, DATA, ROWS, WEIGHTS).split("; ")
        before, now = kept.from_run, self.record.from_run
        start = f"from: {before or 'none'} -> {now or 'none'}"
        if before == now:
            start = f"from: {now} was changed"
        # Some entries are hashes, which say nothing to a user. Their name -> what to say instead.
        named = {
            "from_run_sha256": start,
            "adopted_sha256": "other adapters than those that were adopted",
        }
        if change:
            named["base_sha256"] = f"base {self.record.base}: {change}"
        # A part is `batch: 8 -> 16`.
        parts = [named.get(part.partition(": ")[0], part) for part in parts]
        shown = parts[:MAX_DIFFERENCES]
        if len(parts) > MAX_DIFFERENCES:
            shown.append(f"{len(parts) - MAX_DIFFERENCES} more")
        return "; ".join(shown)

    def doubt(self) -> str:
        """Return what of a finished training's record cannot be compared; empty if all can."""
        if not RunRecord.read(self.config.run).is_before_0_5:
            return ""
        return "; a version before 0.5 made it: changes of the task's code since are not known"

    def classifier(self, examples: Examples, labels: Labels, console: Console) -> Path | None:
        """Return the folder with the text classifier. One process fits it, once.

        Return None if the task has no fields with labels, if the training is that of `panjue base`,
        whose model is to be trained further, or in a dry run before the classifier is fitted.
        """
        task = examples.reader.task
        if not fits_classifier(self.config, task):
            return None
        seed = self.record.seed
        # What the classifier depends on. Its hash names the folder, so no other one is taken.
        key = {**self.record.part(DATA), "seed": seed}
        key |= {"file": FILE_VERSION, "max_examples": MAX_EXAMPLES, "rules": shared_rules()}
        digest = hashlib.sha256(dump(key).encode()).hexdigest()
        folder = self.config.run / "rows" / f"classifier-{digest[:16]}"

        def make() -> None:
            console.print(
                "fitting the text classifier on all cases that are not held out "
                f"(at most {MAX_EXAMPLES:,} of a file)"
            )
            # Unlike the model, it may see all cases of `mix`.
            fitted = fit(task, examples.train, examples.mixable, labels, seed, console)
            save_fitted(fitted, task, labels, folder)

        if self.config.dry_run and not folder.exists():
            if self.record.opinions:  # prompts show them, see `opinion_shower`
                reason = "the text classifier is not fitted; prompts show the commonest labels"
                console.print(f"{'opinions':12s} {reason}")
            return None
        make_once(folder, folder.is_dir, make)
        return folder

    def row_key(self, classifier: Path | None) -> dict[str, Any]:
        """Return what the token rows depend on: settings, and the opinions that prompts show."""
        key = self.record.part(DATA, ROWS)
        if self.record.opinions:
            digest = sha256(classifier / CLASSIFIER) if classifier else "of a dry run"
            key["classifier_sha256"] = digest
        return key

    def opinion_shower(
        self, classifier: Path | None, task: Task, labels: Labels
    ) -> Callable[[Example], Example] | None:
        """Return a function that adds the opinions to an example; None if prompts show none."""
        if not self.record.opinions:
            return None
        if classifier is None:  # in a dry run: the commonest labels as opinions
            return partial(show_placeholders, task, labels)
        return training_advisor(classifier, task, labels).show

    def claim(self, classifier_sha256: str | None = None) -> None:
        """Write config.yaml and manifest.json, which assign the run folder to this training.

        `classifier_sha256` is of the classifier whose opinions are in the prompts. A training with
        checkpoints resumes only with the same one.
        """
        folder = self.config.run
        record = self.record
        if classifier_sha256:
            record = record.model_copy(update={"classifier_sha256": classifier_sha256})
        if self._has_checkpoints():
            old = RunRecord.read(folder)
            # If the classifier in RUN/rows was deleted, another one has been fitted.
            if old.classifier_sha256 != classifier_sha256:
                raise UserError(
                    f"{folder}: its checkpoints saw the opinions of another text classifier; "
                    f"restore rows/, or choose another {OTHER_RUN}"
                )
        # Keep the other sections of the config file, for `generate` and `serve`.
        sections = load_values(self.config.path) if self.config.path else {}
        sections = {**sections, "sft": self.config.model_dump(mode="json")}
        record.write(folder)  # first, since it makes the folder ours
        self.write_summary(self._begun())
        if not self._has_checkpoints():  # else they are of this training, which resumes
            delete(folder / KEPT)
        delete(folder / CHOSEN)  # `panjue choose` did not know the adapters of this training
        with atomic_write(folder / CONFIG) as out:
            out.write(OmegaConf.to_yaml(sections))

    def _begun(self) -> TrainingSummary:
        """Return the summary of a new training: where its settings came from."""
        path = self.config.path
        changed = changed_settings(self.config)
        if path and path.name == CONFIG and has_record(path.parent):
            # RUN/config.yaml, of this run before it resumes or of the run that `from` names.
            before = TrainingSummary.read(path.parent) or TrainingSummary()
            return TrainingSummary(config=before.config, changed={**before.changed, **changed})
        return TrainingSummary(config=path.stem if path else "", changed=changed)

    def write_summary(self, summary: TrainingSummary) -> None:
        """Write RUN/training.json: what the training took, and which loss it reached."""
        write_json(self.config.run / SUMMARY, summary.model_dump(mode="json"))

    def _has_checkpoints(self) -> bool:
        return any((self.config.run / "checkpoints").glob("checkpoint-*"))

    def save(
        self,
        trainer: ReplyTrainer,
        labels: Labels,
        classifier: Path | None,
        examples: int,
        seconds: float,
    ) -> None:
        """Write weights, labels, classifier, record and card to a folder; it appears when complete.

        `examples` is the number of training examples, `seconds` the time of the steps.
        """
        if not trainer.is_world_process_zero():
            trainer.save_model(str(self.config.result))  # all processes take part if sharded
            return
        attention = trainer.model.config.get_text_config()._attn_implementation
        results = {"examples": examples, "attention": attention}
        begun = TrainingSummary.read(self.config.run) or TrainingSummary()
        summary = finished(begun, trainer, seconds)
        self.write_summary(summary)
        for step, kept in kept_adapters(self.config.run).items():
            if step == summary.kept_step:  # the result itself
                delete(kept)
                continue
            with atomic_folder(kept) as folder:  # replaces `kept` when the copy is complete
                shutil.copytree(kept, folder, dirs_exist_ok=True)
                self.complete(folder, step, labels, classifier, results)
        with atomic_folder(self.config.result) as folder:
            with disk_errors_named(folder):
                trainer.save_model(str(folder))
                if self.config.method == "full":
                    keep_readable(model_folder(self.config.model), folder)
            self.complete(folder, summary.kept_step, labels, classifier, results)

    def complete(
        self,
        folder: Path,
        step: int | None,
        labels: Labels,
        classifier: Path | None,
        results: Mapping[str, Any],
    ) -> None:
        """Write what lies beside saved weights; `results` are more entries of their record."""
        (folder / "training_args.bin").unlink(missing_ok=True)  # a pickle; see config.yaml
        (folder / CARD).unlink(missing_ok=True)  # peft's card, which is empty
        peft_config = folder / ADAPTER_CONFIG
        if peft_config.exists():
            base = self.record.base
            if Path(base).is_dir():  # absolute, so that plain peft finds it from any working folder
                base = str(Path(base).resolve())
            write_json(peft_config, {**read_json(peft_config), "base_model_name_or_path": base})
        labels.save(folder)
        hashes = {"labels_sha256": sha256(folder / "labels.json")}
        if classifier:
            shutil.copy(classifier / CLASSIFIER, folder / CLASSIFIER)
            hashes["classifier_sha256"] = sha256(folder / CLASSIFIER)
        self.record.model_copy(update={**results, **hashes}).write(folder)
        write_card(read_trained(folder, self.config.run), step)

    def say_written(self, trainer: ReplyTrainer, console: Console) -> None:
        """Print what was written, and the next command unless make runs it."""
        config = self.config
        loss = kept_loss(trainer)
        held_out = ""
        if loss is not None:
            count = count_examples(trainer.eval_dataset)
            held_out = f" (loss {loss:.4f} on {count} held-out cases)"
        console.print(f"written: {config.result}{held_out}")
        if isinstance(config, BaseConfig):  # `panjue base` has no next command
            return
        base_is_in_four_bits = bool(quantization_of(config_folder(config.model)))
        if held_out and config.method == "qlora" and not base_is_in_four_bits:
            console.print("this loss is of the base in four bits; answers come from it as it is")
        if "MAKELEVEL" not in os.environ:
            limit = f" limit={config.limit}" if config.limit else ""
            console.print(f"next: panjue generate {config.run} TEST{limit}")
        if "tensorboard" in trainer.args.report_to:
            program = Path(sys.executable).with_name("tensorboard")
            # By default TensorBoard shows a thousand points of a curve, chosen at random.
            all_points = "--samples_per_plugin scalars=0"
            console.print(f"curve: {program} --logdir {config.run}/tensorboard {all_points}")
