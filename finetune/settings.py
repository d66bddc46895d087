"""Settings of a training run, and the checks that need no torch."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, PrivateAttr, field_validator
from pydantic_core import to_jsonable_python

from panjue.finetune.start import completed, open_start, refuse_unequal
from panjue.finetune.trained import Trained
from panjue.prompts.columns import check_columns
from panjue.prompts.gpu import check_gpu
from panjue.prompts.model import is_hub_name, model_folder
from panjue.prompts.plumbing.config import (
    DATA_FILES,
    Config,
    built_section,
    load_values,
    refuse_options,
    section_values,
    settings_of,
)
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import flat
from panjue.prompts.plumbing.ours import followed
from panjue.prompts.plumbing.run import refuse_unadopted
from panjue.prompts.plumbing.signals import stopping_signals
from panjue.prompts.reader import OnBadRow, Reader
from panjue.prompts.render import names_opinions
from panjue.prompts.task import load_task

STRATEGIES = ("logging_strategy", "eval_strategy", "save_strategy")
"""trl settings that may be `no`: when to log, evaluate and save."""

PATTERNS = ("rank_pattern", "alpha_pattern")
"""Settings of peft that name modules, with dots."""

OF_RECORD = ("run", "task", "model", "from", "dry_run", *DATA_FILES)
"""Settings that say what is trained, on what and where."""

OTHER_RUN = "run=FOLDER (make: RUN=FOLDER)"
"""Words that choose another run folder, for messages."""

LONGEST_STEP_S = 1800
"""Time for a step, its evaluation and its saving after a signal. Then torchrun kills all processes;
by default it would kill them after 30 s."""

LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
"""Environment variables that a launcher sets in each process."""


class SftConfig(Config):
    """Settings of one training. A copy with all values is saved in the run folder."""

    task: str = "judgment"
    """Name of the task: a folder in prompts/tasks/."""
    run: Path
    """Folder for all output of this run."""
    model: str
    """Base model: a folder, or a name on the hub."""
    from_run: Path | None = Field(default=None, alias="from")
    """Run folder, or folder of an adapter: this training starts with its weights and its labels.
    Base, task, method and LoRA settings are then by default those of that training."""
    train: Path
    """Training cases."""
    dev: Path | None = None
    """File of held-out cases; their loss chooses the checkpoint. Without it, a tenth of `train` is
    held out, chosen by hash."""
    mix: Path | None = None
    """Further cases to train on, for example cases of one defendant. They are never held out."""
    mix_ratio: float = Field(1.0, ge=0, allow_inf_nan=False)
    """Number of cases of `mix` for each case of `train`, chosen by hash; all if `mix` has fewer."""
    columns: dict[str, str] = Field(default_factory=dict)
    """panjue's name of a column -> its name in these files: columns.fact=content. For a column of
    the objects in a list: columns.outcomes/charges=NAME."""
    limit: int | None = Field(None, ge=1)
    """For a trial: train on the first `limit` cases of each file, and hold out as many others. The
    default name of the run folder then ends in -limit20."""
    on_bad_row: OnBadRow = "stop"
    """What to do with a row of these files that is no valid case: `stop` the run, or `skip` the row
    and list it."""
    method: Literal["lora", "qlora", "full"] = "lora"
    """Train LoRA matrices (lora), LoRA matrices on a four-bit base (qlora), or all weights
    (full)."""
    batch: int = Field(16, ge=1)
    """Number of examples or packs in one step, over all processes. Each process takes at most
    `trainer.per_device_train_batch_size` of them at once; by default a GPU takes as many as its
    memory allows."""
    max_tokens: int = Field(4096, ge=64)
    """Limit on the tokens of prompt plus reply. Longer prompts are shortened and counted. Replies
    are never cut."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the base weights. `auto` means bfloat16 if they are frozen and `trainer.bf16` is
    on."""
    opinions: bool = True
    """Show the model what the text classifier thinks of each case, if the task's prompt contains
    `{opinions}`. If false, the model judges from the facts alone."""
    solve: dict[str, Any] = Field(default_factory=dict)
    """Settings of a task that takes several calls for an example. Training uses the same calls."""
    patience: int = Field(3, ge=1)
    """Training stops after this many evaluations without a lower held-out loss."""
    keep: int = Field(1, ge=1)
    """Number of adapters to keep: the one with the lowest held-out loss, and those of the last
    other evaluations. `panjue choose` chooses the best of them by the task's metric."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of the order of the data, of the adapter's initial weights, and of dropout."""
    dry_run: bool = False
    """Print the plan and one example as the model sees it, then stop before the first step."""
    attn_implementation: Literal[
        "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "eager"
    ] = "sdpa"
    """Attention of transformers. `sdpa` becomes `eager` for models that it cannot compute, such as
    Gemma 2. FlashAttention needs its own package."""
    gpus: int = Field(1, ge=1)
    """Number of processes that train together, one for each GPU. accelerate starts them."""
    accelerate: Path | None = None
    """Config file of accelerate, to divide weights among GPUs: finetune/configs/fsdp2.yaml."""
    trainer: dict[str, Any] = Field(default_factory=dict)
    """Settings that are passed unchanged to trl's SFTConfig."""
    lora: dict[str, Any] = Field(default_factory=dict)
    """Settings that are passed unchanged to peft's LoraConfig."""
    quantization: dict[str, Any] = Field(default_factory=dict)
    """Passed unchanged to transformers' BitsAndBytesConfig; used by `method: qlora`."""
    _start: Trained | None = PrivateAttr(None)

    @field_validator("trainer")
    @classmethod
    def _no_is_a_strategy(cls, trainer: dict[str, Any]) -> dict[str, Any]:
        # YAML reads an unquoted `no` as false.
        trainer = dict(trainer)
        for key in STRATEGIES:
            if trainer.get(key) is False:
                trainer[key] = "no"
        return trainer

    @field_validator("lora")
    @classmethod
    def _patterns_have_dots(cls, lora: dict[str, Any]) -> dict[str, Any]:
        # `lora.rank_pattern.self_attn.q_proj=64` is a pattern, no settings within settings.
        lora = dict(lora)
        for key in PATTERNS:
            if isinstance(lora.get(key), Mapping):
                lora[key] = dict(flat(lora[key]))
        return lora

    @property
    def start(self) -> Trained | None:
        """Return the training that `from` names, as it was opened when the settings were read."""
        return self._start

    @property
    def result(self) -> Path:
        """Folder of the trained weights: `adapter/`, or `model/` if all weights are trained."""
        return self.run / ("model" if self.method == "full" else "adapter")


class BaseConfig(SftConfig):
    """Settings of the tiny base: those of full fine-tuning, and the shape of the model."""

    shape: dict[str, Any] = Field(default_factory=dict)
    """Settings passed unchanged to transformers' Qwen3Config; `vocab_size` includes the 256
    bytes."""


C = TypeVar("C", bound=SftConfig)


def sft_settings(path: Path, overrides: Sequence[str] = ()) -> SftConfig:
    """Read the section `sft` of the config at `path` and check it before torch is imported."""
    config = _settings(SftConfig, path, overrides)
    if is_hub_name(config.model):
        return config
    try:
        model_folder(config.model)
    except UserError as error:
        if config.start is None or config.model != config.start.record.base:
            raise
        of_start = f"the base of {config.from_run}; if it has moved, say model=FOLDER"
        raise UserError(f"{error} ({of_start})") from None
    return config


def base_settings(path: Path, overrides: Sequence[str] = ()) -> BaseConfig:
    """Read the settings of `panjue base` for the demo's base; refuse `--batch 8` for `batch=8`."""
    refuse_options(overrides, settings_of(BaseConfig))
    return _settings(BaseConfig, path, overrides)


def _settings(cls: type[C], path: Path, overrides: Sequence[str]) -> C:
    """Read the section `sft`, complete it by the training that `from` names, and check it."""
    load_values(path)  # raises if the file is missing; `section_values` would take it for empty
    values = section_values(cls, path, "sft", overrides)
    start = open_start(values)
    if start:
        values = completed(values, start)
    config = built_section(cls, values, path, overrides)
    if start:
        check_start(config, start)
        config._start = start
    check_data(config)
    if followed(Path(config.model)) in (followed(config.run), followed(config.result)):
        where = f"{config.model} is where this run writes"
        raise UserError(f"model: {where}; choose another {OTHER_RUN}")
    refuse_unadopted(config.run)
    return config


def check_start(config: SftConfig, start: Trained) -> None:
    """Refuse settings that do not fit the training that this one starts from.

    The base is compared when its files are hashed, the LoRA settings where peft knows them.
    """
    record = start.record
    run = config.from_run
    folder = followed(start.folder)
    if followed(config.run) in (folder, *folder.parents):
        raise UserError(f"from: {run} is where this run writes; choose another {OTHER_RUN}")
    if config.method == "full":
        way_out = f"leave out method; or `panjue merge {run}`, and train the merged model"
        raise UserError(f"method: full trains no adapter, and {run} has one; {way_out}")
    if config.task != record.task:
        refuse_unequal("task", config.task, record.task, run)
    shows_opinions = load_task(config.task).answer.fields and names_opinions(config.task)
    if shows_opinions and config.opinions != record.opinions:
        refuse_unequal("opinions", config.opinions, record.opinions, run)


def changed_settings(config: SftConfig) -> dict[str, Any]:
    """Return the settings that the command line changed: name with dots -> value, None if emptied.

    Settings in `OF_RECORD` are left out; the record of the training has them.
    """
    if config.path is None:
        return {}
    defaults = {}
    for name, field in settings_of(type(config)).items():
        if not field.is_required():
            defaults[name] = field.get_default(call_default_factory=True)
    # Not validated: what the command line replaces may be anything in the file.
    section = load_values(config.path).get("sft") or {}
    of_file = to_jsonable_python({**defaults, **section})
    before = {name: value for name, value in flat(of_file) if name not in OF_RECORD}
    now = dict(flat(config.model_dump(mode="json")))
    now = {name: value for name, value in now.items() if name not in OF_RECORD}
    return {name: now.get(name) for name in before | now if now.get(name) != before.get(name)}


def check_data(config: SftConfig) -> None:
    """Refuse a task or data file that does not exist, and a file whose first row is no example."""
    task = load_task(config.task)
    check_columns(task.data, config.columns)
    for name in DATA_FILES:
        file = getattr(config, name)
        if file is None:
            continue
        if not file.exists():
            raise UserError(f"{name}: no file {file}")
        reader = Reader(task, columns=config.columns, on_bad_row=config.on_bad_row)
        first = next(reader.read(file), None)  # finds out at once that a file has another form
        if first is None and not reader.skipped.rows:
            raise UserError(f"{name}: {file} is empty")


def is_launched() -> bool:
    """Say whether torchrun or accelerate has started this process, as one of several."""
    return all(name in os.environ for name in LAUNCHED)


def launch(config: SftConfig, path: Path, words: Sequence[str]) -> None:
    """Replace this process by a launcher of `gpus` processes; do nothing for one, or in them."""
    if config.accelerate and config.gpus == 1:
        raise UserError("accelerate: is for several processes; say how many, e.g. gpus=8")
    if config.gpus == 1 or is_launched():
        return
    from torch.cuda import device_count

    check_gpu()  # once, not in every process
    gpus = device_count()
    if 0 < gpus < config.gpus:  # without any GPU, accelerate says so
        raise UserError(f"gpus: this machine has {gpus} for training; set gpus={gpus}")
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    if config.accelerate:
        command += ["--config_file", str(config.accelerate)]
    else:
        command += ["--multi_gpu", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command += ["--num_processes", str(config.gpus), "--num_machines", "1"]
    command += ["--main_process_port", "0", "-m", "panjue.prompts.cli", "sft", str(path), *words]
    # torchrun passes these signals on to its processes, which then save their step. Its default has
    # SIGHUP, which would end a training even under `nohup`, and no SIGUSR1, with which Slurm would
    # end torchrun alone.
    passed_on = [number.name for number in stopping_signals()]
    environment = {
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(LONGEST_STEP_S),
        "PET_SIGNALS_TO_HANDLE": ",".join([*passed_on, "SIGQUIT"]),
        **os.environ,
    }
    # Without it, a folder of the working directory could hide a package.
    environment["PYTHONSAFEPATH"] = "1"
    os.execve(sys.executable, command, environment)
