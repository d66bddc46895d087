"""What a training leaves behind: who made it of what, whether it is finished, its weights."""

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
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import (
    atomic_write,
    difference,
    manifest_diff,
    read_json,
    replace_folder,
    sha256,
    write_json,
)
from panjue.prompts.plumbing.model import model_sha256, prompt_sha256
from panjue.prompts.task import Task


def provenance(config: SftConfig, folder: Path, task: Task) -> dict[str, Any]:
    """Say what this adapter is made of; two runs with equal provenance give equal adapters."""
    return {
        "task": config.task,
        "base": config.model,
        "base_sha256": model_sha256(folder),
        "train": str(config.train),
        "train_sha256": sha256(config.train),
        "dev": str(config.dev) if config.dev else None,
        "dev_sha256": sha256(config.dev) if config.dev else None,
        "mix": str(config.mix) if config.mix else None,
        "mix_sha256": sha256(config.mix) if config.mix else None,
        "mix_ratio": config.mix_ratio if config.mix else None,
        **({"on_bad_row": "skip"} if config.on_bad_row == "skip" else {}),
        **({"groups_sha256": sha256(config.groups)} if config.groups else {}),
        **({"solve": task.answer.settings.model_dump()} if task.answer.settings else {}),
        **({"robust": config.robust.model_dump()} if config.robust else {}),
        "token_weights": config.token_weights,
        "score_examples": config.score_examples,
        "patience": config.patience,
        "prompt_sha256": prompt_sha256(config.task),
        "max_tokens": config.max_tokens,
        "method": config.method,
        "dtype": config.dtype,
        "seed": config.seed,
        "trainer": config.trainer,
        "lora": config.lora,
        "quantization": config.quantization,
        **(
            {"attn_implementation": config.attn_implementation}
            if config.attn_implementation != "sdpa"
            else {}
        ),
        "versions": {name: version(name) for name in ("torch", "transformers", "trl", "peft")},
    }


def trained_folder(config: SftConfig) -> Path:
    """Return where the result goes: `adapter/`, or `model/` where all weights were trained."""
    return config.run / ("model" if config.method == "full" else "adapter")


def is_finished(run: Path, made: dict[str, Any]) -> bool:
    """Say whether `run` holds the finished result of exactly these settings.

    Raises:
        UserError: It holds work under other settings; names what differs.
    """
    over = any((run / name / "manifest.json").exists() for name in ("adapter", "model"))
    # Transformers makes `checkpoints/` before a step is taken: a dry run or a kill may leave it
    # empty, and nobody's work is lost there.
    if not over and not any((run / "checkpoints").glob("checkpoint-*")):
        return False
    place = run / "manifest.json"
    before = read_json(place).get("sft", {}) if place.exists() else {}
    what = manifest_diff(before, made)
    if what:
        what = what if before else "there is no record of how it was made"
        raise UserError(
            f"{run}: holds another run ({what}); choose another run=FOLDER or delete this one"
        )
    return over


def claim(config: SftConfig, made: dict[str, Any], console: Console) -> None:
    """Make the run folder the place of this training: config.yaml and manifest.json."""
    with atomic_write(config.run / "config.yaml") as out:
        out.write(OmegaConf.to_yaml(config.model_dump(mode="json")))
    place = config.run / "manifest.json"
    manifest = read_json(place) if place.exists() else {}
    before = manifest.get("sft", {}).get("versions", {})
    if config.resume and before and (told := difference(before, made["versions"])):
        console.print(f"going on with other versions: {told}", highlight=False, markup=False)
    write_json(place, {**manifest, "sft": made})
    if not config.resume:
        shutil.rmtree(config.run / "checkpoints", ignore_errors=True)


def _point_to_base(folder: Path, base: str) -> None:
    """Let plain peft find the base, wherever it is started."""
    place = folder / "adapter_config.json"
    if place.exists():
        path = str(Path(base).resolve()) if Path(base).is_dir() else base
        write_json(place, {**read_json(place), "base_model_name_or_path": path})


def check_weights(folder: Path) -> None:
    """Refuse to call a result finished that has no weights.

    Raises:
        UserError: There are none: under FSDP with SHARDED_STATE_DICT trainers write nothing.
    """
    found = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as weights:
            found += len(weights.keys())
    if not found:
        raise UserError(
            f"{folder}: no weights were written; with FSDP set fsdp_state_dict_type to "
            "FULL_STATE_DICT. The checkpoints are kept, and the same command goes on from them"
        )


def save(
    trainer: PartsTrainer, labels: Labels, made: dict[str, Any], folder: Path, examples: int
) -> None:
    """Write weights, labels, manifest and card into `folder`, which appears when all is there.

    `examples` is how many were trained on.
    """
    temporary = folder.with_name(f".{folder.name}.tmp")
    if trainer.is_world_process_zero():
        shutil.rmtree(temporary, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    trainer.save_model(str(temporary))  # all processes take part where weights are sharded
    if not trainer.is_world_process_zero():
        return
    check_weights(temporary)
    (temporary / "training_args.bin").unlink(missing_ok=True)  # a pickle; config.yaml says the same
    _point_to_base(temporary, made["base"])
    labels.save(temporary)
    more = {"examples": examples, "labels_sha256": sha256(temporary / "labels.json")}
    write_json(temporary / "manifest.json", {**made, **more})
    write_card(temporary)
    replace_folder(temporary, folder)
