"""The model to train: the base model, optionally in four bits, optionally with LoRA."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias
from warnings import catch_warnings, simplefilter

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from pyarrow import compute
from rich.console import Console
from safetensors import SafetensorError
from torch.nn import Dropout
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.utils import import_utils

from panjue.finetune.distributed import is_sharded
from panjue.finetune.packed_attention import (
    SHORT_TOKENS,
    logits_only_of,
    places_at_ends,
    probe_examples,
    probe_tokens,
    repeatable_training,
    use_packed_attention,
)
from panjue.finetune.settings import BaseConfig, SftConfig
from panjue.finetune.trained import Trained
from panjue.finetune.vllm_probe import UNKNOWN_TO_VLLM, is_listed, vllm_problem
from panjue.prompts.architecture import is_part, load_language_model, quantization_of, text_config
from panjue.prompts.fingerprint import model_sha256
from panjue.prompts.model import config_folder
from panjue.prompts.plumbing.errors import LIBRARY_ERRORS, UserError, first_line, of_library
from panjue.prompts.plumbing.run import ADAPTER_WEIGHTS

Model: TypeAlias = PreTrainedModel | PeftModel


def check_trainable(config: SftConfig, console: Console) -> None:
    """Refuse a base that this config cannot train or vLLM does not know, before the download."""
    folder = config_folder(config.model)
    text = text_config(folder)
    if getattr(text, "quantization_config", None) and config.method != "qlora":
        raise UserError(f"method: {config.model} has weights in four bits; set method=qlora")
    context = context_of(text)
    if 0 < context < config.max_tokens:
        reason = f"{config.model} reads at most {context} tokens"
        raise UserError(f"max_tokens: {reason}; set max_tokens={context}")
    # vLLM knows the class of the demo's base. Of several processes, only the first one asks vLLM:
    # the consoles of the others are quiet.
    if isinstance(config, BaseConfig) or console.quiet:
        return
    [architecture] = text.architectures
    # vLLM can load the classes that it lists. But with the language model of a multimodal base, it
    # may import the vision part too, which may fail.
    if is_listed(architecture) and not is_part(folder):
        return
    problem = vllm_problem(architecture)
    if problem == UNKNOWN_TO_VLLM:
        raise UserError(f"{architecture}: vLLM cannot answer with it; take another base model")
    if problem:
        reason = f"not on this machine: vLLM cannot load {architecture} ({problem})"
        console.print(f"{'answering':12s} {reason}")


def check_lora_layers(config: SftConfig) -> None:
    """Refuse an adapter that cannot be trained or merged, by adding it to a model without weights.

    If the training starts from an adapter, that one was checked before.
    """
    if config.method == "full" or config.start:
        return
    text = text_config(config_folder(config.model))
    with torch.device("meta"), catch_warnings():
        simplefilter("ignore")  # peft's warning about tied embeddings
        model = AutoModelForCausalLM.from_config(text)
        adapted = with_lora(model, config.lora).get_base_model()
    if isinstance(adapted.get_output_embeddings(), LoraLayer):
        raise UserError("lora.target_modules: trl trains no LoRA of the output layer; leave it out")
    if adapts_tied_embeddings(adapted):
        raise UserError(
            "lora.target_modules: the embeddings of this base are its output layer too (tied), so "
            "that LoRA on them cannot be merged; leave them out"
        )


def adapts_tied_embeddings(model: PreTrainedModel) -> bool:
    """Say whether LoRA is on embeddings that are the output layer too.

    Such an adapter cannot be merged, because that would change the output layer, too.
    """
    is_adapted = isinstance(model.get_input_embeddings(), LoraLayer)
    return is_adapted and bool(model.config.tie_word_embeddings)


def context_of(text: Any) -> int:
    """Return an upper bound of the tokens that a language model reads; 0 if its config has none."""
    of_command_r = getattr(text, "model_max_length", None)
    length = of_command_r or getattr(text, "max_position_embeddings", None) or 0
    rope = getattr(text, "rope_parameters", None) or {}
    scalings = [rope, *rope.values()]  # one for all layers, or one for each type of layer
    factors = [one.get("factor") or 1 for one in scalings if isinstance(one, Mapping)]
    return int(length * max(factors))  # too many if `length` is already scaled


def load_model(config: SftConfig, folder: Path, args: Any) -> Model:
    """Return the base model for `method`, with LoRA layers unless all weights are trained."""
    quantization = config.quantization if config.method == "qlora" else None
    # Each process loads all weights straight to its device. Under FSDP one reads and divides them.
    loads_all = torch.accelerator.is_available() and not is_sharded()
    device = PartialState().device if loads_all else None
    dtype = base_dtype(config, args)
    model: Model = load_base(folder, dtype, quantization, config.attn_implementation, device)
    if config.method != "full":
        torch.manual_seed(config.seed)  # LoRA starts from random matrices
        model = with_lora(model, config.lora, config.start)
    return model


def base_dtype(config: SftConfig, args: Any) -> torch.dtype:
    """Return the type of the base's weights. For frozen weights, `auto` is that of the training."""
    if config.dtype != "auto":
        dtype: torch.dtype = getattr(torch, config.dtype)
        return dtype
    is_frozen = config.method != "full"
    if is_frozen and args.bf16:
        return torch.bfloat16
    if is_frozen and args.fp16:
        return torch.float16
    return torch.float32


def load_base(
    folder: Path,
    dtype: torch.dtype,
    quantization: Mapping[str, Any] | None = None,
    attention: str = "sdpa",
    device: torch.device | None = None,
) -> PreTrainedModel:
    """Load the base's language model; quantize it if `quantization` is given and it is not yet.

    The weights go straight to `device`. In the memory of the host, eight processes would need eight
    copies.
    """
    # On an H100 or H200, cuDNN's attention gives NaN gradients with a mask, as packs have, and if
    # the width is 64 above a multiple of 128 (torch 2.11 and later, pytorch/pytorch#196678).
    torch.backends.cuda.enable_cudnn_sdp(False)
    # None is sdpa too, and eager for a model without it.
    asked = None if attention == "sdpa" else attention
    settings: dict[str, Any] = {"dtype": dtype, "attn_implementation": asked}
    if device:
        settings["device_map"] = {"": device}
    if quantization and not quantization_of(folder):
        four_bits = {"bnb_4bit_compute_dtype": dtype, **quantization}
        settings["quantization_config"] = BitsAndBytesConfig(**four_bits)
    with of_library(f"{folder}, attn_implementation={attention}"):
        model: PreTrainedModel = load_language_model(folder, **settings)
    if asked is None and getattr(model.config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # sdpa leaves out the softcap of Gemma 2
    for module in model.modules():
        # In an evaluation on a CPU with AVX-512 BF16, bitsandbytes repacks its four-bit layers for
        # inference and never back: later steps pass no gradient through them, without an error.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    model.generation_config = GenerationConfig()  # it loads some that it cannot save
    return model


def with_lora(
    model: PreTrainedModel, settings: Mapping[str, Any], start: Trained | None = None
) -> PeftModel:
    """Freeze `model` and add LoRA matrices to its linear layers, those of `start` if it is given.

    `prepare_model_for_kbit_training` is not called for a four-bit base: it would convert embeddings
    and norms to float32, which takes 2.5 GB more for an 8B model.
    """
    storages = {weight: weight.untyped_storage() for weight in model.parameters()}
    with of_library("lora"):
        lora = lora_of(start, settings) if start else LoraConfig(**settings, task_type="CAUSAL_LM")
        adapted = get_peft_model(model, lora)
    # Some settings of peft replace weights of the base, which then lie in other memory.
    if any(weight.untyped_storage() is not storage for weight, storage in storages.items()):
        raise UserError(
            "lora: these settings change the base's weights too, and the adapter does not fit the "
            "original base; remove kasa_config and similar settings"
        )
    if start:
        load_weights(adapted, start)
    return adapted


def lora_of(start: Trained, settings: Mapping[str, Any]) -> LoraConfig:
    """Return peft's settings of a trained adapter, to train it further with another dropout."""
    lora: LoraConfig = LoraConfig.from_pretrained(str(start.folder))
    lora.inference_mode = False
    lora.init_lora_weights = True  # they are replaced; some values would change the base
    lora.base_model_name_or_path = None  # where it was then, of which peft would warn
    lora.lora_dropout = settings.get("lora_dropout", lora.lora_dropout)
    return lora


def leave_casts_to_autocast(model: Model) -> None:
    """Let autocast choose the type of each product of LoRA.

    PEFT would first convert the inputs of LoRA to float32, and autocast back to 16 bits, which
    takes a tenth of a step without a GPU. Dropout, DoRA and other variants compute in the type of
    their inputs, so they keep PEFT's conversion.
    """
    for module in model.modules():
        if isinstance(module, LoraLayer) and not module.lora_variant:
            parts = module.lora_dropout.values()
            module.cast_input_dtype_enabled = any(isinstance(part, Dropout) for part in parts)


CHECKPOINTING_NAMES = ("activation_checkpointing", "gradient_checkpointing")
"""What transformers calls it since 5.24, and before. transformers 6 drops the old name."""

CHECKPOINTING = next(
    name for name in CHECKPOINTING_NAMES if hasattr(PreTrainedModel, f"{name}_enable")
)
"""What the installed transformers calls it, in its settings and methods."""


def set_checkpointing(args: Any, value: bool, how: dict[str, Any] | None = None) -> None:
    """Set in trl's settings whether activations are computed again, and `how`."""
    for name in CHECKPOINTING_NAMES:
        if hasattr(args, name):  # transformers 5.24 has both names, and trl 1.16 reads the old one
            setattr(args, name, value)
            setattr(args, f"{name}_kwargs", how)


def compute_activations_again(model: Model, args: Any) -> None:
    """Turn on gradient checkpointing at once, with the settings that `args` have for it.

    transformers does the same when a training begins. This is for an estimate before that, and for
    a training that runs out of memory.
    """
    given = dict(getattr(args, f"{CHECKPOINTING}_kwargs") or {})
    # Two settings are arguments of transformers. It passes the others to torch's `checkpoint`.
    of_layers = {name: given.pop(name) for name in ("every_n_layers", "offload") if name in given}
    getattr(model, f"{CHECKPOINTING}_enable")(given or None, **of_layers)


def load_weights(model: PeftModel, start: Trained) -> None:
    """Replace the LoRA matrices of `model` by those of a trained adapter, all of them."""
    folder = start.folder
    file = folder / ADAPTER_WEIGHTS
    if not file.is_file():  # peft would look for a pickle, and on the hub
        raise UserError(f"{file}: is missing; restore it")
    unfit = f"{file}: has other weights than adapter_config.json says; restore them"
    try:
        found = model.load_adapter(str(folder), "default", is_trainable=True, torch_device="cpu")
    except RuntimeError:  # of another shape
        raise UserError(unfit) from None
    except (*LIBRARY_ERRORS, SafetensorError) as error:
        raise UserError(f"{file}: {first_line(error).rstrip('.')}; restore it") from None
    if found.missing_keys or found.unexpected_keys:
        raise UserError(unfit)
    if model_sha256(folder) != start.sha256:
        raise UserError(f"{folder}: was changed while this training began; run the command again")


MAX_CONTAMINATION = 1e-3
"""Largest `contamination` of a model that keeps the examples of a pack apart."""

MAX_DIFFERENCE_IN_PACK = 0.1
"""Largest `difference_in_pack` from another order of sums, in 16 bits and with experts."""


def choose_packing(config: SftConfig, model: Model, args: Any, console: Console) -> bool:
    """Say whether examples are packed, and prepare `model` or `args` for that.

    `auto` asks the loaded model whether it keeps them apart; `true` may be refused. For packs, the
    model gets `packed_attention` if it can; otherwise `args` group the examples by length.
    """
    packing = config.trainer.get("packing", False)
    if not packing:
        return False
    # Under FSDP only the first process has the weights.
    found = [problem_in_packs(model, config.max_tokens) if PartialState().is_main_process else ""]
    broadcast_object_list(found)
    [problem] = found
    if not problem:
        # Not if the user chose an attention, or if processes have only parts of the weights.
        if config.attn_implementation == "sdpa" and not is_sharded():
            use_packed_attention(model, config.max_tokens, computing_dtype(model, args))
        return True
    if packing is True:
        raise UserError(f"trainer.packing: {problem}; set trainer.packing=auto")
    args.train_sampling_strategy = config.trainer.get("train_sampling_strategy", "group_by_length")
    console.print(f"{'packing':12s} no: {problem}; examples are grouped by length")
    console.print(f"{'':12s} batch={config.batch} counts cases then, not packs")
    return False


def computing_dtype(model: Model, args: Any) -> torch.dtype:
    """Return the type that a training computes in: that of the weights without mixed precision."""
    if args.bf16:
        return torch.bfloat16
    return torch.float16 if args.fp16 else model.dtype


def problem_in_packs(model: torch.nn.Module, max_tokens: int) -> str:
    """Return why packs would train a model differently than examples alone; empty if not."""
    tokens = probe_tokens(model, max_tokens)
    leak = contamination(model, tokens)
    if leak > MAX_CONTAMINATION:
        return f"in this model an example in a pack sees the one before it (by {leak:.1e})"
    difference = difference_in_pack(model, tokens)
    if not difference <= MAX_DIFFERENCE_IN_PACK:  # or if it is no number
        return f"in this model an example in a pack differs from itself alone (by {difference:.0%})"
    return ""


def contamination(model: torch.nn.Module, tokens: int = SHORT_TOKENS) -> float:
    """Return the largest change of an example's logits when another one precedes it in its pack.

    The example has `tokens`. The change is in units of their standard deviation. With tiny models
    it was 0 where examples are kept apart, in bfloat16 too, and 0.4 to 6 where layers carry a state
    or ignore `position_ids`.
    """
    before, other, example = probe_examples(model, SHORT_TOKENS, SHORT_TOKENS, tokens)
    with repeatable_training(model):
        one = logits_of_last(model, before, example)
    with repeatable_training(model):
        two = logits_of_last(model, other, example)
    return float((one - two).abs().max() / one.std())


def difference_in_pack(model: torch.nn.Module, tokens: int) -> float:
    """Return the relative L2 difference between an example's logits in a pack and alone.

    It was 0.7 to 1 for models that count chunks of attention from the beginning of the pack.
    """
    before, example = probe_examples(model, SHORT_TOKENS, tokens)
    model.eval()  # dropout in attention would differ, too
    packed = logits_of_last(model, before, example)
    alone = logits_of_last(model, example)
    return float((packed - alone).norm() / alone.norm())


@torch.no_grad()
def logits_of_last(model: torch.nn.Module, *examples: torch.Tensor) -> torch.Tensor:
    """Return the logits of the last example in a pack, at `places_at_ends`, [1, places, ids].

    If the examples before it change them, the model does not keep the examples of a pack apart.
    """
    pack = torch.cat(examples, 1)
    sizes = [part.shape[1] for part in examples]
    positions = torch.cat([torch.arange(size) for size in sizes])[None].to(pack.device)
    start = pack.shape[1] - sizes[-1]
    places = start + places_at_ends(sizes[-1])
    with logits_only_of(model, places.to(pack.device)):
        logits: torch.Tensor = model(pack, position_ids=positions, use_cache=False).logits
    return logits.float()


def has_bf16() -> bool:
    """Return whether the GPU, or without one the CPU, computes in bfloat16.

    A CPU needs AVX-512 BF16 or AMX. A GPU older than Ampere only emulates it slowly. torch counts
    that as support unless it is told not to (torch/cuda/__init__.py, `is_bf16_supported`).
    """
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def gpu_memory() -> int | None:
    """Return the memory of this process's GPU in bytes; None without a GPU."""
    return torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else None


def check_embeddings(folder: Path, model: Model, tokenizer: Any, *rows: Dataset) -> None:
    """Refuse token ids beyond the model's embeddings, with which torch fails at the first step."""
    size = model.get_input_embeddings().weight.shape[0]
    for dataset in rows:
        highest = compute.max(compute.list_flatten(dataset.data.column("input_ids"))).as_py()
        if highest is not None and highest >= size:
            token = tokenizer.convert_ids_to_tokens(highest)
            raise UserError(
                f"{folder}: its tokenizer has a token {highest} ({token!r}), and the model has "
                f"{size} embeddings; restore the files of one of them"
            )


def lacks_kernels(model: Any) -> bool:
    """Say whether a GPU runs this model's linear attention slowly, without the fast packages."""
    types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    if "linear_attention" not in types or not torch.cuda.is_available():
        return False
    has_fla = import_utils.is_flash_linear_attention_available()
    return not (has_fla and import_utils.is_causal_conv1d_available())


@contextmanager
def out_of_memory_named(args: Any) -> Iterator[None]:
    """Raise UserError with the ways out if the GPU runs out of memory; `args` are those of trl."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        fewer = ""
        if args.per_device_train_batch_size > 1:
            fewer = "trainer.per_device_train_batch_size=1, "
        way_out = f"set {fewer}method=qlora, a lower max_tokens or a smaller base"
        raise UserError(f"GPU: {first_line(error)} {way_out}") from None
