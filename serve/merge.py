"""Fold a LoRA adapter into its base: one plain model that any engine serves at full speed."""

import shutil
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from panjue.prompts.errors import UserError
from panjue.prompts.files import read_json, whole_folder, write_json
from panjue.prompts.lock import alone_in
from panjue.prompts.model import load_tokenizer, model_folder, model_sha256


def main(run: Path, base: str | None = None) -> None:
    """Write RUN/merged from RUN/adapter and say so."""
    print(f"written: {merge(run / 'adapter', run / 'merged', base)}")


def merge(adapter: Path, out: Path, base: str | None = None) -> Path:
    """Merge `adapter` into the base that its manifest names and write the model to `out`.

    The sum is taken in float32 and stored in the base's own type; the base is loaded whole, also
    where training saw it in four bits. `out` appears only when complete and carries the adapter's
    labels and manifest. A merge that is there already for the same adapter is returned as it is.
    `base` is where the base is now, if it has moved.

    Raises:
        UserError: There is no adapter, or the base is not the one it was trained on.
    """
    if not (adapter / "manifest.json").exists():
        raise UserError(f"{adapter}: no adapter of panjue is there; run `panjue sft` first")
    with alone_in(out.parent, f".{out.name}.lock", wait=True):  # of two, the second finds it made
        return _merge(adapter, out, base)


def _merge(adapter: Path, out: Path, base: str | None) -> Path:
    made = read_json(adapter / "manifest.json")
    stamp = {**made, "adapter_sha256": model_sha256(adapter)}
    if (out / "manifest.json").exists() and read_json(out / "manifest.json") == stamp:
        return out
    place = check_base(adapter, made, base)
    whole = AutoModelForCausalLM.from_pretrained(
        place, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
    )
    model = folded(PeftModel.from_pretrained(whole, str(adapter)), adapter)
    aside = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    model.to(AutoConfig.from_pretrained(place).dtype or torch.float32).save_pretrained(aside)
    load_tokenizer(place).save_pretrained(aside)
    shutil.copy(adapter / "labels.json", aside / "labels.json")
    write_json(aside / "manifest.json", stamp)
    whole_folder(aside, out)
    return out


def folded(model: PeftModel, adapter: Path) -> PreTrainedModel:
    """Fold the adapter in, and see that the model still says what base and adapter say.

    Raises:
        UserError: It does not: the adapter is of a kind that cannot be folded into this base.
    """
    probe = torch.arange(min(32, model.config.get_text_config().vocab_size))[None]  # [1, tokens]
    model.eval()
    with torch.no_grad():
        before = model(probe).logits
        whole: PreTrainedModel = model.merge_and_unload()
        after = whole(probe).logits
    if not torch.allclose(before, after, rtol=1e-3, atol=1e-2):
        apart = float((before - after).abs().max())
        raise UserError(
            f"{adapter}: merged with its base it is another model (logits differ by {apart:.2g}); "
            "serve it as it is: adapter=lora"
        )
    return whole


def check_base(adapter: Path, made: dict[str, str], base: str | None = None) -> Path:
    """Return the folder of the base that `adapter` was trained on, which may be `base` now.

    Raises:
        UserError: That base is gone or has other weights now.
    """
    name = base or made["base"]
    try:
        folder = model_folder(name)
    except UserError as error:
        moved = "" if base else f" (the base of {adapter}; if it has moved, say base=FOLDER)"
        raise UserError(f"{error}{moved}") from None
    if model_sha256(folder) != made["base_sha256"]:
        raise UserError(
            f"{adapter}: was trained on another base than {name} is now; "
            "say base=FOLDER where that is, or train again"
        )
    return folder
