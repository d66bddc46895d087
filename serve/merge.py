"""Merge a LoRA adapter into its base: one plain model that any engine serves at full speed."""

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

from panjue.prompts.model import CLASSIFIER, load_tokenizer
from panjue.prompts.plumbing.errors import UserError, first_line
from panjue.prompts.plumbing.files import read_json, replace_folder, write_json
from panjue.prompts.plumbing.lock import exclusive_lock
from panjue.serve.modelfile import modelfile
from panjue.serve.trained import check_base, is_merged, merged_manifest

CONFIGS = ("config.json", "generation_config.json", "model.safetensors.index.json")

MAX_DIFFERENCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Type -> largest relative L2 difference of outputs that rounding to it explains."""

Module = TypeVar("Module", bound=nn.Module)

Changed = dict[str, nn.Module]
"""Name of a module of the base -> the peft module that replaces it."""


def main(run: Path, base: str | None = None) -> None:
    """Write RUN/merged from RUN/adapter and print its path."""
    print(f"written: {merge(run / 'adapter', run / 'merged', base)}")


def merge(adapter: Path, out: Path, base: str | None = None) -> Path:
    """Merge `adapter` into the base that its manifest names and write the model to `out`.

    The weights are added in float32 and stored in the base's own type. `out` appears only when it
    is complete, with the adapter's labels and manifest. An existing merge of the same adapter is
    reused. `base` is the folder or hub name of the base, if it has moved.

    Raises:
        UserError: There is no adapter, it was trained on another base, or it is of a kind that
            cannot be merged.
    """
    if not (adapter / "manifest.json").exists():
        raise UserError(f"{adapter}: there is no panjue adapter; run `panjue sft` first")
    # Of two processes, the second one waits and finds the merge.
    with exclusive_lock(out.parent, f".{out.name}.lock", wait=True):
        return _merge(adapter, out, base)


def _merge(adapter: Path, out: Path, base: str | None) -> Path:
    manifest = merged_manifest(adapter, out)
    if is_merged(manifest, out):
        return out
    base_folder = check_base(adapter, manifest, base)
    temporary = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        fold(base_folder, adapter, temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # it is as large as the base
        raise
    tokenizer = load_tokenizer(base_folder)
    tokenizer.save_pretrained(temporary)
    max_tokens = manifest["max_tokens"]
    (temporary / "Modelfile").write_text(modelfile(tokenizer, max_tokens), "utf-8")
    for name in ("labels.json", CLASSIFIER):
        if (adapter / name).exists():
            shutil.copy(adapter / name, temporary / name)
    write_json(temporary / "manifest.json", manifest)
    replace_folder(temporary, out)
    return out


def fold(base: Path, adapter: Path, out: Path) -> None:
    """Write `base` merged with `adapter` to the folder `out`, without the tokenizer.

    The base's files are read one at a time, so that memory suffices for a base of any size; weights
    that the adapter does not change are copied. If this is impossible, the whole base is loaded.

    Raises:
        UserError: The adapter is of a kind that cannot be merged, or `out` cannot be written.
    """
    model = load_without_base_weights(base, adapter)
    changed = changed_modules(model.get_base_model())
    with ExitStack() as stack:
        files = {
            path.name: stack.enter_context(safe_open(path, framework="pt"))
            for path in weight_files(base)
        }
        file_of = {key: file for file in files.values() for key in file.keys()}  # noqa: SIM118
        try:
            if can_fold_by_file(model, changed, set(file_of)):
                fold_files(files, file_of, changed, adapter, out)
                for path in base.glob("*.json"):
                    if path.name in CONFIGS:
                        shutil.copy(path, out)
            else:
                fold_whole(base, adapter, out)
        except SafetensorError as error:
            raise UserError(f"{out}: {error}; is the disk full?") from None


def weight_files(base: Path) -> list[Path]:
    """Return the files from which transformers loads a model's weights.

    Hub folders may hold more weight files: in other types, or for other programs.
    """
    index = base / "model.safetensors.index.json"
    if not index.exists():
        return [base / "model.safetensors"]
    return [base / name for name in sorted(set(read_json(index)["weight_map"].values()))]


def fold_files(
    files: Mapping[str, Any],
    file_of: Mapping[str, Any],
    changed: Changed,
    adapter: Path,
    out: Path,
) -> None:
    """Write the base's files one after another, with their changed modules merged.

    Args:
        files: Name -> open file of the base.
        file_of: Name of a weight -> its open file.
        changed: The modules that the adapter changes.
        adapter: Folder of the adapter, for messages.
        out: The folder to write to.
    """
    owners = {key: name for name in changed for key in keys_of(name, changed[name])}
    done: dict[str, Tensor] = {}  # merged weights that belong to a later file
    for name, file in files.items():
        tensors = {}
        for key in file.keys():  # noqa: SIM118
            owner = owners.get(key)
            if owner is not None and key not in done:
                module = changed[owner]
                weights = {key: file_of[key].get_tensor(key) for key in keys_of(owner, module)}
                done |= folded(owner, module, weights, adapter)
            tensors[key] = file.get_tensor(key) if owner is None else done.pop(key)
        save_file(tensors, out / name, metadata={"format": "pt"})


def load_without_base_weights(base: Path, adapter: Path) -> PeftModel:
    """Load the adapter on a base whose weights are zeros that take no memory.

    The meta device cannot be used for this: there peft does not load the adapter's weights either.

    Raises:
        UserError: The base is quantized, so nothing can be added to its weights.
    """
    config = AutoConfig.from_pretrained(base)
    if getattr(config, "quantization_config", None):
        raise UserError(f"{base}: is quantized, no adapter can be merged into it; use adapter=lora")
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    zeros = with_zero_weights(skeleton)
    # low_cpu_mem_usage replaces the tensors: zeros that share memory cannot be copied into.
    return PeftModel.from_pretrained(zeros, str(adapter), low_cpu_mem_usage=True).eval()


def with_zero_weights(module: Module) -> Module:
    """Replace all weights by zeros of the same shapes that take no memory; return the module."""
    module._apply(lambda weight: torch.zeros(()).expand(weight.shape))  # type: ignore[no-untyped-call]
    return module


def changed_modules(model: nn.Module) -> Changed:
    """Return the peft modules that replace modules of the base, by name."""
    changed: Changed = {}
    for name, module in model.named_modules():
        is_inner = any(name.startswith(f"{other}.") for other in changed)
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper) and not is_inner:
            changed[name] = module
    return changed


def original(module: nn.Module) -> nn.Module:
    """Return the module of the base that a peft module replaces."""
    layer: Any = module
    is_tuner = isinstance(module, BaseTunerLayer)
    base_module: nn.Module = layer.get_base_layer() if is_tuner else layer.original_module
    return base_module


def keys_of(name: str, module: nn.Module) -> list[str]:
    """Return the names of a module's weights in the base's files."""
    return [f"{name}.{leaf}" for leaf in original(module).state_dict()]


def can_fold_by_file(model: PeftModel, changed: Changed, keys: set[str]) -> bool:
    """Say whether each changed weight is in the base's files under the name the model uses.

    For some mixtures of experts the files have parts of weights under other names. If embedding and
    head share a weight, changing it would change both.
    """
    config = model.config.get_text_config()
    base = model.get_base_model()
    embeddings = (base.get_input_embeddings(), base.get_output_embeddings())
    tied = config.tie_word_embeddings and any(e in changed.values() for e in embeddings)
    plain = all(
        isinstance(module, ModulesToSaveWrapper)
        or (
            isinstance(module, Linear | Embedding)
            and isinstance(original(module), nn.Linear | nn.Embedding)
        )
        for module in changed.values()
    )
    in_files = all(key in keys for name in changed for key in keys_of(name, changed[name]))
    return plain and in_files and not tied and model.active_peft_config.bias == "none"


def folded(
    name: str, module: nn.Module, weights: Mapping[str, Tensor], adapter: Path
) -> dict[str, Tensor]:
    """Return the merged weights of a module, each in its own type.

    Raises:
        UserError: The merged module has other outputs than base and adapter.
    """
    leaves = {key: key.removeprefix(f"{name}.") for key in weights}
    if isinstance(module, ModulesToSaveWrapper):
        new = module.modules_to_save[module.active_adapters[0]].state_dict()
        return {key: new[leaf].to(weights[key].dtype) for key, leaf in leaves.items()}
    assert isinstance(module, Linear | Embedding), "`can_fold_by_file` allows no other module"
    layer = original(module)
    # Copies: the weights are mapped from the file, and peft adds in place.
    state = {leaves[key]: weight.to(torch.float32, copy=True) for key, weight in weights.items()}
    layer.load_state_dict(state, assign=True)
    inputs = random_inputs(layer)
    with torch.no_grad():
        before = module(inputs)
        with merge_errors(adapter):
            module.merge()
        check_same(before, module(inputs), torch.float32, adapter)
    merged = layer.state_dict()
    with_zero_weights(layer)
    return {key: merged[leaf].to(weights[key].dtype) for key, leaf in leaves.items()}


@contextmanager
def merge_errors(adapter: Path) -> Iterator[None]:
    """Turn what peft raises for an adapter that it cannot merge into a UserError."""
    try:
        yield
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise UserError(f"{adapter}: {first_line(error)} Use adapter=lora") from None


def random_inputs(module: nn.Module) -> Tensor:
    """Return random inputs of a layer: 4 vectors, or 256 token ids of an embedding."""
    random = torch.Generator().manual_seed(0)
    if isinstance(module, nn.Embedding):
        return torch.randint(module.num_embeddings, (256,), generator=random)
    assert isinstance(module, nn.Linear), "`can_fold_by_file` allows no other module"
    return torch.randn(4, module.in_features, generator=random)


def fold_whole(base: Path, adapter: Path, out: Path) -> None:
    """Merge with the whole base in memory, with the functions of peft and transformers.

    Raises:
        UserError: The written model has other outputs than base and adapter.
    """
    options = {"dtype": torch.float32, "use_safetensors": True, "trust_remote_code": False}
    base_model = AutoModelForCausalLM.from_pretrained(base, **options)
    model = PeftModel.from_pretrained(base_model, str(adapter)).eval()
    before = logits(model)
    dtype = AutoConfig.from_pretrained(base).dtype or torch.float32
    with merge_errors(adapter):
        merged = model.merge_and_unload()
    merged.to(dtype).save_pretrained(out)
    del base_model, model, merged
    check_same(before, logits(AutoModelForCausalLM.from_pretrained(out, **options)), dtype, adapter)


def logits(model: PreTrainedModel | PeftModel) -> Tensor:
    """Return a model's logits for the first 32 token ids: [1, tokens, vocabulary]."""
    ids = torch.arange(min(32, model.config.get_text_config().vocab_size))[None]
    with torch.no_grad():
        result: Tensor = model.eval()(ids).logits
    return result


def check_same(before: Tensor, after: Tensor, dtype: torch.dtype, adapter: Path) -> None:
    """Check that a merge has not changed the outputs.

    Raises:
        UserError: They differ too much; says by how much.
    """
    difference = float((before - after).norm() / before.norm().clamp(min=1e-12))
    if not difference <= MAX_DIFFERENCE.get(
        dtype, MAX_DIFFERENCE[torch.bfloat16]
    ):  # NaN is refused too
        raise UserError(
            f"{adapter}: merging it changes the outputs (by {difference:.1%}); use adapter=lora"
        )
