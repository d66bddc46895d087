"""Merge a LoRA adapter into its base: one plain model that any engine serves at full speed."""

import shutil
from pathlib import Path

import torch
from peft import PeftModel
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from panjue.prompts.model import CLASSIFIER, load_tokenizer
from panjue.prompts.plumbing.errors import UserError, first_line
from panjue.prompts.plumbing.files import replace_folder
from panjue.prompts.plumbing.lock import exclusive_lock
from panjue.prompts.plumbing.run import MANIFEST
from panjue.serve.modelfile import modelfile
from panjue.serve.trained import check_base, is_merged, merged_record

MAX_DIFFERENCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Type -> largest relative L2 difference of outputs that rounding to it explains."""


def main(run: Path, base: str | None = None) -> None:
    """Write RUN/merged from RUN/adapter and print its path."""
    print(f"written: {merge(run / 'adapter', run / 'merged', base)}")


def merge(adapter: Path, out: Path, base: str | None = None) -> Path:
    """Merge `adapter` into the base that its record names and write the model to `out`.

    `out` appears only when it is complete, with the adapter's labels and record. An existing merge
    of the same adapter is reused. `base` is the folder or hub name of the base, if it has moved.
    """
    if not (adapter / MANIFEST).exists():
        raise UserError(f"{adapter}: there is no panjue adapter; run `panjue sft` first")
    # Of two processes, the second one waits and finds the merge.
    with exclusive_lock(out.parent, f".{out.name}.lock", wait=True):
        return _merge(adapter, out, base)


def _merge(adapter: Path, out: Path, base: str | None) -> Path:
    record = merged_record(adapter)
    if is_merged(record, out):
        return out
    base_folder = check_base(adapter, record, base)
    temporary = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        write_merged(base_folder, adapter, temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # it is as large as the base
        raise
    tokenizer = load_tokenizer(base_folder)
    tokenizer.save_pretrained(temporary)
    text = modelfile(tokenizer, record.max_tokens)
    (temporary / "Modelfile").write_text(text, "utf-8")
    for name in ("labels.json", CLASSIFIER):
        if (adapter / name).exists():
            shutil.copy(adapter / name, temporary / name)
    record.write(temporary)
    replace_folder(temporary, out)
    return out


def write_merged(base: Path, adapter: Path, out: Path) -> None:
    """Write `base` merged with `adapter` to the folder `out`, without the tokenizer."""
    if getattr(AutoConfig.from_pretrained(base), "quantization_config", None):
        raise UserError(f"{base}: is quantized, no adapter can be merged into it; use adapter=lora")
    base_model = load(base)
    dtype = base_model.dtype
    # The adapter is in float32: each sum is computed in it, then rounded once to the base's type.
    model = PeftModel.from_pretrained(base_model, str(adapter))
    before = logits(model)
    try:
        model.merge_and_unload().to(dtype).save_pretrained(out)
    except SafetensorError as error:
        raise UserError(f"{out}: {error}; is the disk full?") from None
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise UserError(f"{adapter}: {first_line(error)} Use adapter=lora") from None
    del base_model, model  # their memory is needed for the merged model
    check_same(before, logits(load(out)), dtype, adapter)


def load(folder: Path) -> PreTrainedModel:
    """Load a model in the type of its weights."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", use_safetensors=True, trust_remote_code=False
    )


def logits(model: PreTrainedModel | PeftModel) -> Tensor:
    """Return a model's logits for the first 32 token ids: [1, tokens, vocabulary]."""
    ids = torch.arange(min(32, model.config.get_text_config().vocab_size))[None]
    with torch.no_grad():
        result: Tensor = model.eval()(ids).logits.float()
    return result


def check_same(before: Tensor, after: Tensor, dtype: torch.dtype, adapter: Path) -> None:
    """Check that a merge has not changed the outputs."""
    difference = float((before - after).norm() / before.norm().clamp(min=1e-12))
    limit = MAX_DIFFERENCE.get(dtype, MAX_DIFFERENCE[torch.bfloat16])
    if not difference <= limit:  # NaN is refused too
        raise UserError(
            f"{adapter}: merging it changes the outputs (by {difference:.1%}); use adapter=lora"
        )
