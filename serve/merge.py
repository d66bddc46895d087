"""Fold a LoRA adapter into its base: one plain model that any engine serves at full speed."""

import shutil
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

from panjue.prompts.errors import UserError
from panjue.prompts.files import read_json, whole_folder, write_json
from panjue.prompts.model import load_tokenizer, model_folder, model_sha256


def main(run: Path) -> None:
    """Write RUN/merged from RUN/adapter and say so."""
    print(f"written: {merge(run / 'adapter', run / 'merged')}")


def merge(adapter: Path, out: Path) -> Path:
    """Merge `adapter` into the base that its manifest names and write the model to `out`.

    The sum is taken in float32 and stored in the base's own type; the base is loaded whole, also
    where training saw it in four bits. `out` appears only when complete and carries the adapter's
    labels and manifest. A merge that is there already for the same adapter is returned as it is.

    Raises:
        UserError: There is no adapter, or the base is not the one it was trained on.
    """
    if not (adapter / "manifest.json").exists():
        raise UserError(f"{adapter}: no adapter of panjue is there; run `panjue sft` first")
    made = read_json(adapter / "manifest.json")
    stamp = {**made, "adapter_sha256": model_sha256(adapter)}
    if (out / "manifest.json").exists() and read_json(out / "manifest.json") == stamp:
        return out
    base = check_base(adapter, made)
    whole = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
    )
    model = PeftModel.from_pretrained(whole, str(adapter)).merge_and_unload()
    aside = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    model.to(AutoConfig.from_pretrained(base).dtype or torch.float32).save_pretrained(aside)
    load_tokenizer(base).save_pretrained(aside)
    shutil.copy(adapter / "labels.json", aside / "labels.json")
    write_json(aside / "manifest.json", stamp)
    whole_folder(aside, out)
    return out


def check_base(adapter: Path, made: dict[str, str]) -> Path:
    """Return the folder of the base that `adapter` was trained on.

    Raises:
        UserError: That base is gone or has other weights now.
    """
    base = model_folder(made["base"])
    if model_sha256(base) != made["base_sha256"]:
        raise UserError(
            f"{adapter}: was trained on another base than {made['base']} is now; train it again"
        )
    return base
