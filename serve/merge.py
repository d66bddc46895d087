"""Fold a LoRA adapter into its base: one plain model that any engine serves at full speed."""

import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch
from peft import PeftModel
from peft.tuners.lora.layer import Embedding, Linear
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from panjue.prompts.errors import UserError
from panjue.prompts.files import read_json, whole_folder, write_json
from panjue.prompts.lock import alone_in
from panjue.prompts.model import load_tokenizer, model_folder, model_sha256

CONFIGS = ("config.json", "generation_config.json", "model.safetensors.index.json")

CLOSE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""How far apart two models of a type may be by rounding alone, by the length of what they say."""

Module = TypeVar("Module", bound=nn.Module)

Changed = dict[str, nn.Module]
"""Name of a module of the base -> what peft has put in its place."""


def main(run: Path, base: str | None = None) -> None:
    """Write RUN/merged from RUN/adapter and say so."""
    print(f"written: {merge(run / 'adapter', run / 'merged', base)}")


def merge(adapter: Path, out: Path, base: str | None = None) -> Path:
    """Merge `adapter` into the base that its manifest names and write the model to `out`.

    The sum is taken in float32 and stored in the base's own type. `out` appears only when complete
    and carries the adapter's labels and manifest. A merge that is there already for the same
    adapter is returned as it is. `base` is where the base is now, if it has moved.

    Raises:
        UserError: There is no adapter, the base is not the one it was trained on, or the adapter
            is of a kind that cannot be folded into it.
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
    aside = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    fold(place, adapter, aside)
    load_tokenizer(place).save_pretrained(aside)
    shutil.copy(adapter / "labels.json", aside / "labels.json")
    write_json(aside / "manifest.json", stamp)
    whole_folder(aside, out)
    return out


def fold(base: Path, adapter: Path, out: Path) -> None:
    """Write `base` with `adapter` in it into the folder `out`, without its tokenizer.

    Goes through the base's files and holds one at a time, however large the base is. What the
    adapter leaves alone is copied as it is.

    Raises:
        UserError: The adapter is of a kind that cannot be folded into this base.
    """
    model = hollow_with(base, adapter)
    changed = changed_modules(model.get_base_model())
    with ExitStack() as opened:
        files = {
            path.name: opened.enter_context(safe_open(path, framework="pt"))
            for path in sorted(base.glob("*.safetensors"))
        }
        where = {key: file for file in files.values() for key in file.keys()}  # noqa: SIM118
        if not goes_by_file(model, changed, set(where)):
            fold_whole(base, adapter, out)
            return
        owners = {key: name for name in changed for key in keys_of(name, changed[name])}
        for name, file in files.items():
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            for owner in dict.fromkeys(owners[key] for key in tensors if key in owners):
                module = changed[owner]
                whole = {key: where[key].get_tensor(key) for key in keys_of(owner, module)}
                mended = folded(module, whole, adapter)
                tensors |= {key: mended[key] for key in tensors.keys() & mended.keys()}
            save_file(tensors, out / name, metadata={"format": "pt"})
    for path in base.glob("*.json"):
        if path.name in CONFIGS:
            shutil.copy(path, out)


def hollow_with(base: Path, adapter: Path) -> PeftModel:
    """Return the adapter's weights in a base that has none: each is one zero, seen everywhere.

    On the meta device, which is made for this, peft leaves the adapter's weights out too.

    Raises:
        UserError: The base's weights are packed bits, to which nothing can be added.
    """
    config = AutoConfig.from_pretrained(base)
    if getattr(config, "quantization_config", None):
        raise UserError(f"{base}: its weights are quantized, no adapter folds in; use adapter=lora")
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    hollow = without_weights(skeleton)
    # What is read takes the place of the zeros: nothing can be copied into them.
    return PeftModel.from_pretrained(hollow, str(adapter), low_cpu_mem_usage=True).eval()


def without_weights(module: Module) -> Module:
    """Put zeros of the same shapes, which take no memory, in the place of all weights."""
    module._apply(lambda weight: torch.zeros(()).expand(weight.shape))  # type: ignore[no-untyped-call]
    return module


def changed_modules(model: nn.Module) -> Changed:
    """Return what an adapter has put in the place of modules, by name."""
    found: Changed = {}
    for name, module in model.named_modules():
        outer = any(name.startswith(f"{other}.") for other in found)
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper) and not outer:
            found[name] = module
    return found


def original(module: nn.Module) -> nn.Module:
    """Return the module of the base that one of the adapter's stands for."""
    layer: Any = module
    inner: nn.Module = (
        layer.get_base_layer() if isinstance(module, BaseTunerLayer) else layer.original_module
    )
    return inner


def keys_of(name: str, module: nn.Module) -> list[str]:
    """Return the names of its weights in the base's files."""
    return [f"{name}.{leaf}" for leaf in original(module).state_dict()]


def goes_by_file(model: PeftModel, changed: Changed, keys: set[str]) -> bool:
    """Say whether each weight that changes stands in the base's files, by its name and alone.

    Of some mixtures of experts the files have parts of it, under other names.
    """
    config = model.config.get_text_config()
    inner = model.get_base_model()
    ends = (inner.get_input_embeddings(), inner.get_output_embeddings())
    tied = config.tie_word_embeddings and any(end in changed.values() for end in ends)
    plain = all(
        isinstance(module, Linear | Embedding | ModulesToSaveWrapper) for module in changed.values()
    )
    there = all(key in keys for name in changed for key in keys_of(name, changed[name]))
    return plain and there and not tied and model.active_peft_config.bias == "none"


def folded(module: nn.Module, weights: Mapping[str, Tensor], adapter: Path) -> dict[str, Tensor]:
    """Return the weights of a module of the base with the adapter in them, in their own types.

    Raises:
        UserError: With them it says something else than with the adapter beside it.
    """
    if isinstance(module, ModulesToSaveWrapper):
        new = module.modules_to_save[module.active_adapters[0]].state_dict()
        return {key: new[_leaf(key)].to(weights[key].dtype) for key in weights}
    assert isinstance(module, Linear | Embedding), "`goes_by_file` lets no other through"
    inner = original(module)
    # Copies: what is read lies in the mapped file, and peft adds in place.
    given = {_leaf(key): weight.to(torch.float32, copy=True) for key, weight in weights.items()}
    inner.load_state_dict(given, assign=True)
    asked = probe(inner)
    with torch.no_grad():
        before = module(asked)
        try:
            module.merge()
        except (NotImplementedError, RuntimeError, ValueError) as error:
            raise UserError(f"{adapter}: {str(error).splitlines()[0]} Use adapter=lora") from None
        check_same(before, module(asked), torch.float32, adapter)
    merged = inner.state_dict()
    without_weights(inner)
    return {key: merged[_leaf(key)].to(weight.dtype) for key, weight in weights.items()}


def probe(module: nn.Module) -> Tensor:
    """Return some input of a module: where its outputs are right, so are the model's logits."""
    if isinstance(module, nn.Embedding):
        return torch.arange(min(32, module.num_embeddings))
    assert isinstance(module, nn.Linear), "peft has LoRA layers for both"
    return torch.randn(4, module.in_features, generator=torch.Generator().manual_seed(0))


def fold_whole(base: Path, adapter: Path, out: Path) -> None:
    """Do what `fold` does with the whole base in memory, as peft and transformers do it.

    Raises:
        UserError: The model that was written is another than base and adapter.
    """
    how = {"dtype": torch.float32, "use_safetensors": True, "trust_remote_code": False}
    whole = AutoModelForCausalLM.from_pretrained(base, **how)
    model = PeftModel.from_pretrained(whole, str(adapter)).eval()
    before = logits(model)
    dtype = AutoConfig.from_pretrained(base).dtype or torch.float32
    model.merge_and_unload().to(dtype).save_pretrained(out)
    del whole, model
    check_same(before, logits(AutoModelForCausalLM.from_pretrained(out, **how)), dtype, adapter)


def logits(model: PreTrainedModel | PeftModel) -> Tensor:
    """Return what a model says to its first tokens: [1, tokens, vocabulary]."""
    asked = torch.arange(min(32, model.config.get_text_config().vocab_size))[None]
    with torch.no_grad():
        said: Tensor = model.eval()(asked).logits
    return said


def check_same(before: Tensor, after: Tensor, dtype: torch.dtype, adapter: Path) -> None:
    """Refuse a merge that makes another model.

    Raises:
        UserError: Names how far it is from base and adapter.
    """
    apart = float((before - after).norm() / before.norm().clamp(min=1e-12))
    if not apart <= CLOSE.get(dtype, CLOSE[torch.bfloat16]):  # no number is not close either
        raise UserError(
            f"{adapter}: merged with its base it is another model (what it says is {apart:.1%} "
            "off); serve it as it is: adapter=lora"
        )


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]


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
