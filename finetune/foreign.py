"""LoRA adapters of other trainers: the arguments of `panjue adopt`, and what it refuses.

This file looks only at the config of an adapter. `adopt.py` looks at its weights and its base.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from panjue.finetune.settings import SftConfig, check_data
from panjue.finetune.words import config_for_gpu, configs
from panjue.prompts.architecture import quantization_of
from panjue.prompts.model import config_folder, is_hub_name
from panjue.prompts.plumbing.config import load_section, refuse_options
from panjue.prompts.plumbing.errors import UserError, did_you_mean
from panjue.prompts.plumbing.files import dump, quoted, read_object
from panjue.prompts.plumbing.ours import followed, lies_in_ours
from panjue.prompts.plumbing.run import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    PICKLED,
    foreign_adapters,
    step_of_checkpoint,
)

OF_ADOPTION = {
    "run": "run",
    "task": "task",
    "train": "train",
    "dev": "dev",
    "base": "model",
    "columns": "columns",
    "limit": "limit",
    "on_bad_row": "on_bad_row",
    "max_tokens": "max_tokens",
}
"""Setting of `panjue adopt` -> its name in `panjue sft`. All others are for training steps."""

FOUR_BITS = ("-unsloth-bnb-4bit", "-bnb-4bit")
"""Suffix of the names of Unsloth's uploads in four bits."""

OF_FILES = (
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version"),
    *("revision", "runtime_config", "task_type"),
)
"""Settings of peft that say where an adapter comes from, but not what it does."""

OF_LORA = (
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules"),
    *("target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern", "bias"),
    *("fan_in_fan_out", "modules_to_save", "trainable_token_indices", "use_dora", "lora_bias"),
    *("ensure_weight_tying", "lora_dropout", "init_lora_weights"),
)
"""Settings of peft that say what an adapter does, and that peft can merge."""

UNUSED = (
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),  # of `init_lora_weights`
    *("qalora_group_size", "megatron_core"),  # of `use_qalora` and `megatron_config`
)
"""Settings of peft that do nothing unless another one is set."""

PLAIN_INITIALIZATIONS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""Values of `init_lora_weights` that do not change the base, as in vllm/lora/peft_helper.py.
Others, such as pissa, train on a changed base, which no longer exists."""


@dataclass(frozen=True)
class ForeignAdapter:
    """An adapter that another trainer wrote."""

    folder: Path
    config: dict[str, Any]  # the content of its adapter_config.json
    step: int | None  # of its training, if its folder's name or its files say it

    @property
    def weights(self) -> Path:
        return self.folder / ADAPTER_WEIGHTS

    @property
    def lora(self) -> dict[str, Any]:
        """Return its settings of LoRA, without empty ones."""
        return {name: self.config[name] for name in OF_LORA if self.config.get(name)}


@dataclass(frozen=True)
class Adoption:
    """What `panjue adopt` adopts, opened once."""

    adapters: Sequence[ForeignAdapter]  # the last one becomes RUN/adapter
    config: SftConfig  # the settings of a training, without unknown ones such as steps
    base: Path  # folder with the configs of the base


def adoption(words: Sequence[str]) -> Adoption:
    """Return what the words of `panjue adopt` mean; UserError: it cannot be adopted."""
    refuse_options(words, OF_ADOPTION)
    folders = [Path(word) for word in words if "=" not in word or Path(word).is_dir()]
    settings = [word for word in words if "=" in word and not Path(word).is_dir()]
    given = dict(word.split("=", 1) for word in settings)
    if not folders or not {"run", "train"} <= given.keys():
        example = "panjue adopt FOLDER run=runs/adopted task=judgment train=train.jsonl"
        raise UserError(f"adopt: give FOLDER, run=RUN and train=FILE, e.g. {example}")
    as_sft = words_of_sft(settings)
    for folder in folders:
        if folders.count(folder) > 1:
            raise UserError(f"{folder}: is given twice")
    adapters = [read_foreign(folder) for folder in folders]
    check_steps(adapters)
    *_, last = adapters  # the result of the run; the others are earlier steps of it
    if "base" not in given:
        as_sft.append(f"model={dump(base_of(last))}")
    # No config has a section `adopt`, so only the words count. The run folder gets a copy of this
    # config's sections `generate` and `serve`.
    path = configs() / f"{config_for_gpu()}.yaml"
    config = load_section(SftConfig, path, "adopt", as_sft)
    check_places(config, adapters)
    check_data(config)
    base = base_folder(config.model, last)
    is_four_bits = bool(quantization_of(base))
    known: dict[str, Any] = {"method": "qlora" if is_four_bits else "lora", "lora": last.lora}
    known["opinions"] = False  # the adapter was trained without panjue's text classifier
    return Adoption(adapters, config.model_copy(update=known), base)


def words_of_sft(settings: Sequence[str]) -> list[str]:
    """Return settings of `panjue adopt` as those of `panjue sft`: base=X -> model=X.

    UserError: there is no such setting. `columns.fact=X` has the same name in both commands.
    """
    given = {}
    for word in settings:
        name, _, value = word.partition("=")
        first = name.partition(".")[0]
        if first not in OF_ADOPTION:
            hint = did_you_mean(first, OF_ADOPTION) or f" (there are {', '.join(OF_ADOPTION)})"
            raise UserError(f"{word}: `panjue adopt` has no setting {first!r}{hint}")
        given[name] = value
    # Settings without a dot get their names in `panjue sft`; those with a dot stay as they are.
    words = [f"{OF_ADOPTION[name]}={value}" for name, value in given.items() if "." not in name]
    return words + [word for word in settings if "." in word.partition("=")[0]]


def read_foreign(folder: Path) -> ForeignAdapter:
    """Open the folder of another trainer; UserError: it has no adapter that can be adopted."""
    if folder.is_file():
        raise UserError(f"{folder}: is a file; give its folder, {folder.parent}")
    if not folder.is_dir():
        download = ""
        if is_hub_name(str(folder)):
            download = f"; of the hub: hf download {folder} --local-dir FOLDER first"
        raise UserError(f"{folder}: there is no such folder{download}")
    if lies_in_ours(folder):
        raise UserError(f"{folder}: is panjue's own already; ask it: panjue generate RUN TEST")
    found = foreign_adapters(folder)
    if found and folder not in found:
        names = shlex.join(map(str, found))
        raise UserError(f"{folder}: has no adapter itself; give one or several of {names}")
    place = folder / ADAPTER_CONFIG
    if not found:
        what = f"has no {ADAPTER_CONFIG} with {ADAPTER_WEIGHTS}"
        if (folder / "config.json").exists() and not place.exists():
            what = "is a whole model, and no LoRA adapter"
        raise UserError(f"{folder}: {what}; give the adapter's folder, e.g. a checkpoint-N")
    config = read_object(place)
    check_kind(place, config)
    check_features(place, config)
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise UserError(
            f"{folder}: has its weights in {PICKLED} alone, a pickle, which panjue never opens; "
            "where it was trained, load it with peft and save_pretrained(FOLDER), which writes "
            f"{ADAPTER_WEIGHTS}"
        )
    return ForeignAdapter(folder, config, step_of_foreign(folder))


def check_kind(place: Path, config: dict[str, Any]) -> None:
    """Refuse anything that is no LoRA adapter of a language model."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UserError(f"{place}: peft_type {kind}; panjue takes LoRA adapters: train one")
    task_type = config.get("task_type")
    if task_type not in (None, "CAUSAL_LM"):
        way_out = "train one of a language model, CAUSAL_LM"
        raise UserError(f"{place}: task_type {task_type}; {way_out}")
    if not isinstance(config.get("r"), int):
        raise UserError(f"{place}: has no rank r; restore the file")


def check_features(place: Path, config: dict[str, Any]) -> None:
    """Refuse settings with which the adapter can be neither merged nor loaded correctly."""
    how = config.get("init_lora_weights")
    if isinstance(how, str) and how.lower() not in PLAIN_INITIALIZATIONS:
        raise UserError(
            f"{place}: init_lora_weights={how} changed the base that it was trained on; convert "
            "it, where it was trained: save_pretrained(…, path_initial_model_for_weight_conversion="
            "…) of peft"
        )
    for name, value in config.items():
        if value and name not in (*OF_FILES, *OF_LORA, *UNUSED):
            reason = f"{name}={quoted(value)} is not known to be right when it is merged or served"
            raise UserError(f"{place}: {reason}; train without it")


def step_of_foreign(folder: Path) -> int | None:
    """Return the step of an adapter, from its folder's name or trainer_state.json; else None."""
    step = step_of_checkpoint(folder.resolve())
    if step is not None:
        return step
    state = folder / "trainer_state.json"
    known = read_object(state).get("global_step") if state.is_file() else None
    return known if isinstance(known, int) else None


def check_steps(adapters: Sequence[ForeignAdapter]) -> None:
    """Refuse several adapters unless they are different steps of one training."""
    if len(adapters) == 1:
        return
    folders: dict[int, Path] = {}
    for adapter in adapters:
        if adapter.step is None:
            way_out = "name the folders checkpoint-N, or adopt each into a run of its own"
            raise UserError(f"{adapter.folder}: nobody knows of which step it is; {way_out}")
        if adapter.step in folders:
            both = f"{folders[adapter.step]} is of step {adapter.step} too"
            raise UserError(f"{adapter.folder}: {both}; give one of them")
        folders[adapter.step] = adapter.folder


def base_of(adapter: ForeignAdapter) -> str:
    """Return the base that an adapter names; UserError: it names no usable base."""
    place = adapter.folder / ADAPTER_CONFIG
    name = adapter.config.get("base_model_name_or_path")
    if not name:
        raise UserError(f"{place}: names no base; say base=FOLDER, or a name on the hub")
    name = str(name)
    if Path(name).is_dir():
        return name
    for ending in FOUR_BITS:
        if name.endswith(ending):
            plain = name.removesuffix(ending)
            raise UserError(
                f"{place}: names the base {name}, a copy in four bits; say base={plain}, or "
                "base=FOLDER, with the same model in 16 bits"
            )
    revision = adapter.config.get("revision")
    if revision not in (None, "main"):
        there = f"names revision {revision} of the base {name}"
        raise UserError(f"{place}: {there}; download that one, and say base=FOLDER")
    return name


def base_folder(name: str, adapter: ForeignAdapter) -> Path:
    """Return the folder with the configs of a base; UserError: it is missing."""
    try:
        return config_folder(name)
    except UserError as error:
        raise UserError(f"{error} (the base of {adapter.folder}; say base=FOLDER)") from None


def check_places(config: SftConfig, adapters: Sequence[ForeignAdapter]) -> None:
    """Refuse a run folder that contains an adapter or the base, or that lies in one of them."""
    run = followed(config.run)
    for folder in (*(adapter.folder for adapter in adapters), Path(config.model)):
        place = followed(folder)
        if folder.is_dir() and (run.is_relative_to(place) or place.is_relative_to(run)):
            lie = f"{config.run} and {folder}, which is kept, lie in each other"
            raise UserError(f"run: {lie}; choose another run=FOLDER")
