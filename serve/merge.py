"""The model that an engine loads: a base with a merged adapter, or a base and an adapter."""

import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from panjue.finetune.checkpoints import disk_errors_named
from panjue.finetune.trained import Trained
from panjue.prompts.architecture import is_part, load_language_model, quantization_of
from panjue.prompts.fingerprint import base_change, weight_files
from panjue.prompts.model import CLASSIFIER, load_tokenizer, model_files, model_folder, threads_for
from panjue.prompts.plumbing.errors import UserError, first_line
from panjue.prompts.plumbing.files import atomic_folder, exclusive_lock, read_object
from panjue.prompts.plumbing.ours import has_record
from panjue.prompts.plumbing.records import RunRecord
from panjue.prompts.plumbing.run import ADAPTER_CONFIG, ADAPTER_WEIGHTS, RESULTS, run_around
from panjue.prompts.saved import keep_readable

MAX_DIFFERENCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Type -> largest relative L2 difference of a token's outputs that may come from rounding to it;
see `changed_by`."""

KNOWN_TEXT = "被告人张某伙同李某，窃取他人财物三千元。 The defendant stole goods."
"""Text on which outputs are compared. Models know its words."""

MERGE = "use adapter=merge (`serve`: one run)"  # several runs are served unmerged

NAME_BASE = "name it with base=FOLDER, of `merge` and `bundle` --base FOLDER"

VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters that vLLM can load unmerged."""

ONLY_MERGED = {
    "target_parameters": "adapts experts",
    "use_dora": "is of DoRA",
    "modules_to_save": "has whole layers (modules_to_save)",
    "trainable_token_indices": "has tokens of its own (trainable_token_indices)",
    "lora_bias": "has biases (lora_bias)",
}
"""Setting of peft -> what an adapter with it is or has. vLLM refuses such an adapter unmerged, or
silently leaves out a part of it."""


class Served(NamedTuple):
    """Folder of the model to load, and of the adapter to load on it, if any."""

    model: Path
    adapter: Path | None = None

    @property
    def lora_rank(self) -> int:
        """Return the adapter's rank, rounded up to one that vLLM supports; 0 without adapter."""
        if self.adapter is None:
            return 0
        highest = highest_rank(self.adapter)
        rank = next((one for one in VLLM_RANKS if one >= highest), None)
        if rank is None:
            raise UserError(f"adapter: vLLM has no rank that high; {MERGE}")
        return rank


def highest_rank(adapter: Path) -> int:
    """Return the highest rank of an adapter's layers."""
    config = read_object(adapter / ADAPTER_CONFIG)
    try:
        of_layers = config.get("rank_pattern") or {}
        return int(max([config["r"], *of_layers.values()]))
    except (LookupError, TypeError):
        raise UserError(f"{adapter}/adapter_config.json: has no rank") from None


def served_model(trained: Trained, adapter: str, base: str | None = None) -> Served:
    """Return the folders to load for a training; `EngineConfig` documents the arguments."""
    folder = trained.folder
    if adapter == "merge":
        return Served(merge(trained, base) if trained.is_adapter else folder)
    if adapter == "none":
        return Served(check_base(trained, base))
    if not trained.is_adapter:
        raise UserError(f"{folder}: is a full model without an adapter; {MERGE}")
    if reason := why_only_merged(folder):
        raise UserError(f"{folder}: {reason}, which vLLM needs merged; {MERGE}")
    model = check_base(trained, base)
    return Served(model, named_for_vllm(folder, model))


def why_only_merged(adapter: Path) -> str:
    """Return why vLLM cannot load an adapter unmerged; empty if its config allows it."""
    config = read_object(adapter / ADAPTER_CONFIG)
    for name, what in ONLY_MERGED.items():
        if config.get(name):
            return what
    if config.get("bias", "none") != "none":
        return f"has biases (bias={config['bias']})"
    return f"has a rank above {VLLM_RANKS[-1]}" if highest_rank(adapter) > VLLM_RANKS[-1] else ""


def named_for_vllm(adapter: Path, base: Path) -> Path:
    """Return the folder of an adapter whose layers have vLLM's names for the layers of `base`.

    The names differ if the trained language model is part of a multimodal model.
    """
    if not is_part(base):
        return adapter
    out = place_of(adapter, "unmerged")
    weights = load_file(adapter / ADAPTER_WEIGHTS)
    old = "base_model.model.model."
    new = "base_model.model.model.language_model."
    renamed = {key.replace(old, new, 1): value for key, value in weights.items()}
    with lock_of(out), atomic_folder(out) as folder:
        for file in model_files(adapter):
            shutil.copy(file, folder)
        with disk_errors_named(out):
            save_file(renamed, folder / ADAPTER_WEIGHTS, {"format": "pt"})
    return out


def place_of(trained: Path, name: str) -> Path:
    """Return the path of a folder `name` made from a training: in its run folder, if it has one.

    For example `RUN/adapter` -> `RUN/merged`. Without a run, the folder lies in that of the
    training: `mine` -> `mine/merged`. In the folder around them, one of several adapters would
    replace the merged model of another.
    """
    trained = trained.absolute()  # "." has no name
    run = run_around(trained)
    is_result = trained.name in RESULTS  # RUN/adapter
    is_kept = run != trained.parent  # RUN/kept/step-80
    if (is_result or is_kept) and has_record(run):
        return run / name
    return trained / name


def lock_of(out: Path) -> AbstractContextManager[None]:
    """Return the lock of a folder that a merge makes; a second process waits for it."""
    return exclusive_lock(out.parent, f".{out.name}.lock", wait=True)


def is_merged(record: RunRecord, out: Path) -> bool:
    """Say whether `out` has the merge with this record, and its weights have not changed."""
    with suppress(UserError):
        found = RunRecord.read(out)
        weights = found.merged_files
        is_whole = not weights or weights == weight_files(out)  # version 0.4 recorded no files
        return found.model_copy(update={"merged_files": {}}) == record and is_whole
    return False


def check_base(trained: Trained, base: str | None) -> Path:
    """Return the folder of the base that an adapter was trained on; refuse another base.

    `base` is the folder or Hugging Face name of the base, if it has moved.
    """
    name = base or trained.record.base
    try:
        folder = model_folder(name)
    except UserError as error:
        raise UserError(f"{error} (the base of {trained.folder}; {NAME_BASE})") from None
    if change := base_change(trained.record, folder):
        other = f"was trained on another base than {name} is now ({change})"
        way_out = f"{NAME_BASE}, or train again"
        raise UserError(f"{trained.folder}: {other}; {way_out}")
    return folder


def merge(trained: Trained, base: str | None = None) -> Path:
    """Merge an adapter into its base, or reuse an earlier merge, and return its folder."""
    adapter = trained.folder
    if not trained.is_adapter:
        raise UserError(f"{adapter}: is a model, of method=full, which needs no merge")
    # An earlier merge is reused only if it was made from exactly these weights.
    record = trained.record.model_copy(update={"adapter_sha256": trained.sha256})
    out = place_of(adapter, "merged")
    of_version_0_4 = adapter.absolute().with_name("merged")
    for earlier in (out, of_version_0_4):
        if is_merged(record, earlier):
            return earlier
    with lock_of(out):
        if not is_merged(record, out):
            folder = check_base(trained, base)
            with threads_for(folder):
                make_merged(folder, adapter, record, out)
    return out


def make_merged(base: Path, adapter: Path, record: RunRecord, out: Path) -> None:
    """Make the folder `out` with the merged weights and the other files needed to answer."""
    tokenizer = load_tokenizer(base)
    with atomic_folder(out) as folder:
        record.write(folder)  # first, since it makes the folder ours
        # The model must give the same outputs for these tokens before and after the merge.
        compared_on = tokenizer.encode(KNOWN_TEXT)
        write_merged(base, adapter, folder, compared_on)
        with disk_errors_named(out):
            keep_readable(base, folder)  # with the tokenizer, and by transformers 4
        sampling_settings = base / "generation_config.json"
        for file in (adapter / "labels.json", adapter / CLASSIFIER, sampling_settings):
            if file.exists():
                shutil.copy(file, folder)
        record.model_copy(update={"merged_files": weight_files(folder)}).write(folder)


def write_merged(base: Path, adapter: Path, out: Path, tokens: Sequence[int]) -> None:
    """Write the merge of `base` and `adapter` to `out`; refuse it if it answers otherwise.

    The outputs for `tokens` are compared before and after.
    """
    from peft import PeftModel  # takes seconds

    base_model = load_dequantized(base)
    dtype = base_model.dtype
    # Not one type for all, since some weights of some models stay in float32.
    types = {name: weight.dtype for name, weight in base_model.named_parameters()}
    try:
        # The adapter is in float32: sums are computed in float32 and rounded to the base's type.
        model = PeftModel.from_pretrained(base_model, str(adapter))
        ids = torch.tensor([tokens])
        before = logits(model, ids)
        merged = model.merge_and_unload()
        for name, weight in merged.named_parameters():
            weight.data = weight.data.to(types.get(name, dtype))
        merged.generation_config = GenerationConfig()  # it loads some that it cannot save
        with disk_errors_named(out):
            merged.save_pretrained(out)
    except (LookupError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        # The adapter is broken, or peft cannot merge its kind.
        raise UserError(f"{adapter}: {first_line(error)} Use adapter=lora, or restore it") from None
    del base_model, model, merged  # the merged model needs their memory
    after = logits(load_dequantized(out), ids)
    difference = changed_by(before, after)
    if not difference <= MAX_DIFFERENCE[dtype]:  # this also refuses NaN
        changes = f"merging it changes the outputs (by {difference:.1%})"
        raise UserError(f"{adapter}: {changes}; use adapter=lora")


COMPARED_SHARE = 0.8
"""Share of tokens on which a merge must agree. In bfloat16, one rare token of a 0.5B differed by
31% after a correct merge, all others by at most 2.8%. Without the adapter, half of the tokens
differed by more than 18%."""


def changed_by(before: torch.Tensor, after: torch.Tensor) -> float:
    """Return how far logits, [1, tokens, vocabulary], differ: a quantile over the tokens.

    A token's difference is the L2 norm of the change, relative to its logits before.
    `COMPARED_SHARE` of the tokens differ by at most the number returned.
    """
    of_tokens = (before - after).norm(dim=-1) / before.norm(dim=-1).clamp(min=1e-12)
    return float(of_tokens.quantile(COMPARED_SHARE))


def load_dequantized(folder: Path) -> PreTrainedModel:
    """Load a model in the type of its weights; load four-bit weights in the type of computation."""
    disable_progress_bar()
    if not quantization_of(folder):
        model: PreTrainedModel = load_language_model(folder, dtype="auto")
        return model
    model = load_language_model(folder, dtype="auto", device_map={"": "cpu"}).dequantize()
    vars(model).pop("_weight_conversions", None)  # otherwise it would be saved in four bits
    return model


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return a model's logits, [1, tokens, vocabulary], for token ids, [1, tokens]."""
    with torch.no_grad():
        result: torch.Tensor = model.eval()(ids).logits.float()
    return result
