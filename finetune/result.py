"""The result of a training: its manifest, whether it is finished, and its weights."""

import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console
from safetensors import safe_open

from panjue.eval.card import write_card
from panjue.finetune.settings import SftConfig
from panjue.finetune.trainer import PartsTrainer
from panjue.prompts.labels import Labels
from panjue.prompts.model import CLASSIFIER, model_sha256, prompt_sha256
from panjue.prompts.plumbing.config import load_values
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import (
    atomic_write,
    difference,
    read_json,
    replace_folder,
    sha256,
    write_json,
)
from panjue.prompts.plumbing.run import MANIFEST, RESULTS, Run, RunRecord
from panjue.prompts.task import Task


def run_record(config: SftConfig, folder: Path, task: Task) -> RunRecord:
    """Return the record of a training that begins; `folder` has the base model."""
    return RunRecord(
        task=config.task,
        base=config.model,
        base_sha256=model_sha256(folder),
        train=str(config.train),
        train_sha256=sha256(config.train),
        dev=str(config.dev) if config.dev else None,
        dev_sha256=sha256(config.dev) if config.dev else None,
        mix=str(config.mix) if config.mix else None,
        mix_sha256=sha256(config.mix) if config.mix else None,
        mix_ratio=config.mix_ratio if config.mix else None,
        groups_sha256=sha256(config.groups) if config.groups else None,
        on_bad_row=config.on_bad_row,
        solve=task.answer.provenance().get("solve", {}),
        robust=config.robust.model_dump() if config.robust else None,
        prompt_sha256=prompt_sha256(config.task),
        max_tokens=config.max_tokens,
        method=config.method,
        dtype=config.dtype,
        seed=config.seed,
        score_examples=config.score_examples,
        patience=config.patience,
        attn_implementation=config.attn_implementation,
        trainer={name: v for name, v in config.trainer.items() if name != "report_to"},
        lora=config.lora,
        quantization=config.quantization,
        versions={name: version(name) for name in ("torch", "transformers", "trl", "peft")},
    )


def trained_folder(config: SftConfig) -> Path:
    """Return the folder of the result: `adapter/`, or `model/` if all weights are trained."""
    return config.run / ("model" if config.method == "full" else "adapter")


def is_finished(run: Run, record: RunRecord) -> bool:
    """Say whether a run folder holds the finished result of the training with this record.

    Raises:
        UserError: It holds a run with other settings; the message names the difference.
    """
    has_result = any((run.folder / name / MANIFEST).exists() for name in RESULTS)
    # Transformers creates `checkpoints/` before the first step: after a dry run or a kill it may be
    # empty, and then no work can be lost.
    if not has_result and not any((run.folder / "checkpoints").glob("checkpoint-*")):
        return False
    is_recorded = (run.folder / MANIFEST).exists()
    reason = "there is no record of how it was made"
    if is_recorded:
        reason = RunRecord.read(run.folder).difference(record)
    if reason:
        raise UserError(
            f"{run.folder}: holds another run ({reason}); it is kept: choose another run=FOLDER "
            "for this one, or leave out what differs"
        )
    return has_result


def claim(config: SftConfig, record: RunRecord, console: Console) -> None:
    """Write config.yaml and manifest.json, which assign the run folder to this training."""
    run = Run(config.run)
    sections = load_values(config.path) if config.path else {}
    sections = {**sections, "sft": config.model_dump(mode="json")}
    with atomic_write(run.config) as out:
        out.write(OmegaConf.to_yaml(sections))
    if config.resume and (run.folder / MANIFEST).exists():
        before = RunRecord.read(run.folder).versions
        if diff := difference(before, record.versions):
            console.print(f"resuming with other versions: {diff}", highlight=False, markup=False)
    record.write(run.folder)
    if not config.resume:
        shutil.rmtree(config.run / "checkpoints", ignore_errors=True)


def _point_to_base(folder: Path, base: str) -> None:
    """Write the base's absolute path, so that plain peft finds it from any working folder."""
    config = folder / "adapter_config.json"
    if config.exists():
        path = str(Path(base).resolve()) if Path(base).is_dir() else base
        write_json(config, {**read_json(config), "base_model_name_or_path": path})


def check_weights(folder: Path) -> None:
    """Refuse a result without weights.

    Raises:
        UserError: There are none, as under FSDP with SHARDED_STATE_DICT.
    """
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as weights:
            if weights.keys():
                return
    raise UserError(
        f"{folder}: no weights were written; with FSDP set fsdp_state_dict_type to "
        "FULL_STATE_DICT. The checkpoints are kept; run the same command to resume"
    )


def save(
    trainer: PartsTrainer,
    labels: Labels,
    classifier: Path | None,
    record: RunRecord,
    folder: Path,
    examples: int,
) -> None:
    """Write weights, labels, classifier, record and card; `folder` appears when it is complete.

    `classifier` is a file; `examples` is the number of training examples.
    """
    temporary = folder.with_name(f".{folder.name}.tmp")
    if trainer.is_world_process_zero():
        shutil.rmtree(temporary, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    trainer.save_model(str(temporary))  # all processes take part if weights are sharded
    if not trainer.is_world_process_zero():
        return
    check_weights(temporary)
    (temporary / "training_args.bin").unlink(missing_ok=True)  # a pickle; see config.yaml
    _point_to_base(temporary, record.base)
    labels.save(temporary)
    digest = sha256(temporary / "labels.json")
    results: dict[str, Any] = {"examples": examples, "labels_sha256": digest}
    if classifier:
        shutil.copy(classifier, temporary / CLASSIFIER)
        results["classifier_sha256"] = sha256(temporary / CLASSIFIER)
    record.model_copy(update=results).write(temporary)
    write_card(temporary)
    replace_folder(temporary, folder)
