"""Fold a LoRA adapter into its base: one plain model that any engine serves at full speed."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from peft import PeftModel
from peft.tuners.lora.layer import Embedding, Linear
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_json, replace_folder, write_json
from panjue.prompts.plumbing.lock import exclusive_lock
from panjue.prompts.plumbing.model import load_tokenizer, model_folder, model_sha256

CONFIGS = ("config.json", "generation_config.json", "model.safetensors.index.json")

CLOSE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest relative L2 distance of outputs that rounding to a type explains."""

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
    with exclusive_lock(
        out.parent, f".{out.name}.lock", wait=True
    ):  # of two, the second finds it made
        return _merge(adapter, out, base)


def _merge(adapter: Path, out: Path, base: str | None) -> Path:
    made = read_json(adapter / "manifest.json")
    stamp = {**made, "adapter_sha256": model_sha256(adapter)}
    if (out / "manifest.json").exists() and read_json(out / "manifest.json") == stamp:
        return out
    place = check_base(adapter, made, base)
    temporary = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        fold(place, adapter, temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # as large as the base
        raise
    load_tokenizer(place).save_pretrained(temporary)
    shutil.copy(adapter / "labels.json", temporary / "labels.json")
    write_json(temporary / "manifest.json", stamp)
    replace_folder(temporary, out)
    return out


def fold(base: Path, adapter: Path, out: Path) -> None:
    """Write `base` with `adapter` in it into the folder `out`, without its tokenizer.

    Goes through the base's files and holds one at a time, however large the base is. What the
    adapter leaves alone is copied as it is. Where that cannot be, the base is loaded whole.

    Raises:
        UserError: The adapter is of a kind that cannot be folded into this base, or it cannot be
            written.
    """
    model = hollow_with(base, adapter)
    changed = changed_modules(model.get_base_model())
    with ExitStack() as opened:
        files = {
            path.name: opened.enter_context(safe_open(path, framework="pt"))
            for path in weight_files(base)
        }
        where = {key: file for file in files.values() for key in file.keys()}  # noqa: SIM118
        try:
            if goes_by_file(model, changed, set(where)):
                fold_files(files, where, changed, adapter, out)
                for path in base.glob("*.json"):
                    if path.name in CONFIGS:
                        shutil.copy(path, out)
            else:
                fold_whole(base, adapter, out)
        except SafetensorError as error:
            raise UserError(f"{out}: {error}; is the disk full?") from None


def weight_files(base: Path) -> list[Path]:
    """Return the files that transformers reads a model's weights from.

    Hubs have others beside them: in other types, or under the names of other programs.
    """
    index = base / "model.safetensors.index.json"
    if not index.exists():
        return [base / "model.safetensors"]
    return [base / name for name in sorted(set(read_json(index)["weight_map"].values()))]


def fold_files(
    files: Mapping[str, Any],
    where: Mapping[str, Any],
    changed: Changed,
    adapter: Path,
    out: Path,
) -> None:
    """Write each of the base's files with the modules in it folded, one after another.

    Args:
        files: Name -> open file of the base.
        where: Name of a weight -> the file that it is in.
        changed: What the adapter changes.
        adapter: For messages.
        out: The folder to write to.
    """
    owners = {key: name for name in changed for key in keys_of(name, changed[name])}
    done: dict[str, Tensor] = {}  # of a module in two files, those of the second one
    for name, file in files.items():
        tensors = {}
        for key in file.keys():  # noqa: SIM118
            owner = owners.get(key)
            if owner is not None and key not in done:
                module = changed[owner]
                weights = {key: where[key].get_tensor(key) for key in keys_of(owner, module)}
                done |= folded(owner, module, weights, adapter)
            tensors[key] = file.get_tensor(key) if owner is None else done.pop(key)
        save_file(tensors, out / name, metadata={"format": "pt"})


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
    """Say whether the base's files hold each weight that changes under the model's name for it.

    Of some mixtures of experts they hold it in parts, under other names. Where embedding and head
    are one weight, both change with it.
    """
    config = model.config.get_text_config()
    inner = model.get_base_model()
    ends = (inner.get_input_embeddings(), inner.get_output_embeddings())
    tied = config.tie_word_embeddings and any(end in changed.values() for end in ends)
    plain = all(
        isinstance(module, ModulesToSaveWrapper)
        or (
            isinstance(module, Linear | Embedding)
            and isinstance(original(module), nn.Linear | nn.Embedding)
        )
        for module in changed.values()
    )
    there = all(key in keys for name in changed for key in keys_of(name, changed[name]))
    return plain and there and not tied and model.active_peft_config.bias == "none"


def folded(
    name: str, module: nn.Module, weights: Mapping[str, Tensor], adapter: Path
) -> dict[str, Tensor]:
    """Return the weights of a module of the base with the adapter in them, in their own types.

    Raises:
        UserError: Its outputs are then others than with the adapter beside it.
    """
    leaves = {key: key.removeprefix(f"{name}.") for key in weights}
    if isinstance(module, ModulesToSaveWrapper):
        new = module.modules_to_save[module.active_adapters[0]].state_dict()
        return {key: new[leaf].to(weights[key].dtype) for key, leaf in leaves.items()}
    assert isinstance(module, Linear | Embedding), "`goes_by_file` lets no other through"
    inner = original(module)
    # Copies: what is read lies in the mapped file, and peft adds in place.
    given = {leaves[key]: weight.to(torch.float32, copy=True) for key, weight in weights.items()}
    inner.load_state_dict(given, assign=True)
    inputs = probe(inner)
    with torch.no_grad():
        before = module(inputs)
        with refusing(adapter):
            module.merge()
        check_same(before, module(inputs), torch.float32, adapter)
    merged = inner.state_dict()
    without_weights(inner)
    return {key: merged[leaf].to(weights[key].dtype) for key, leaf in leaves.items()}


@contextmanager
def refusing(adapter: Path) -> Iterator[None]:
    """Say in one line what peft says of an adapter that it cannot merge."""
    try:
        yield
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise UserError(f"{adapter}: {str(error).splitlines()[0]} Use adapter=lora") from None


def probe(module: nn.Module) -> Tensor:
    """Return random inputs of a layer; of an embedding 256 of its rows."""
    random = torch.Generator().manual_seed(0)
    if isinstance(module, nn.Embedding):
        return torch.randint(module.num_embeddings, (256,), generator=random)
    assert isinstance(module, nn.Linear), "`goes_by_file` lets no other through"
    return torch.randn(4, module.in_features, generator=random)


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
    with refusing(adapter):
        merged = model.merge_and_unload()
    merged.to(dtype).save_pretrained(out)
    del whole, model, merged
    check_same(before, logits(AutoModelForCausalLM.from_pretrained(out, **how)), dtype, adapter)


def logits(model: PreTrainedModel | PeftModel) -> Tensor:
    """Return a model's logits of its first tokens: [1, tokens, vocabulary]."""
    ids = torch.arange(min(32, model.config.get_text_config().vocab_size))[None]
    with torch.no_grad():
        found: Tensor = model.eval()(ids).logits
    return found


def check_same(before: Tensor, after: Tensor, dtype: torch.dtype, adapter: Path) -> None:
    """Refuse a merge that makes another model.

    Raises:
        UserError: Names how far it is from base and adapter.
    """
    apart = float((before - after).norm() / before.norm().clamp(min=1e-12))
    if not apart <= CLOSE.get(dtype, CLOSE[torch.bfloat16]):  # no number is not close either
        raise UserError(
            f"{adapter}: merged with its base it is another model (its outputs differ by "
            f"{apart:.1%}); serve it as it is: adapter=lora"
        )


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
