"""Find the config and the run folder that the arguments of `panjue sft` mean.

The Makefile's targets use the same functions.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from panjue.finetune.settings import SftConfig
from panjue.prompts.gpu import check_gpu
from panjue.prompts.plumbing.config import (
    check_known,
    load_values,
    refuse_home,
    refuse_options,
    settings_of,
)
from panjue.prompts.plumbing.errors import UserError, did_you_mean
from panjue.prompts.plumbing.records import MANIFEST, RunRecord
from panjue.prompts.plumbing.run import CONFIG

NEEDED = {"model": "NAME", "train": "FILE"}
"""What a new training has to be given."""
AS_IN_START = ("task=null", "model=null", "method=null", "lora={}", "quantization={}")
"""Words that empty settings of a config; `start.completed` then takes them from the training that
`from` names."""
OTHER_DATA = (
    *("train=null", "dev=null", "mix=null", "mix_ratio=1.0", "columns={}"),
    *("on_bad_row=stop", "limit=null"),
)
"""Words that empty what the config of another training says about its data."""
LORA_BYTES = 39_000 * 2**20
"""Least memory of a GPU to train an 8B model in bfloat16; a smaller one needs four bits."""


def training_words(words: Sequence[str]) -> tuple[Path, list[str]]:
    """Return the config of a training, and its settings; add `run` if the config has none.

    The config is the first of these:
    - the first word, if it has no `=`: a file, or a name in finetune/configs;
    - that of the run folder, if `run` names one that has a config;
    - that of the run that `from` names;
    - the one for this machine's GPU.
    With `from`, AS_IN_START and OTHER_DATA remove what the last two say about task, base, method,
    LoRA and data. With `limit` but without `run`, the folder is that of a trial: runs/a-limit20.
    """
    settings = list(words)
    refuse_options(settings, settings_of(SftConfig))
    config = None
    if settings and "=" not in settings[0]:
        config = config_file(settings.pop(0))
    for word in settings:
        if "=" not in word:
            raise UserError(f"{word!r}: settings are written key=value; a config comes before them")
        check_known(word, re.split(r"[.=\[]", word)[:1], settings_of(SftConfig))
    given = dict(word.split("=", 1) for word in settings)
    of_run = Path(given.get("run", ""), CONFIG)
    if config is None and "run" in given and of_run.is_file():
        config = of_run
    section: dict[str, Any] = {}
    if config is not None:
        section = load_values(config).get("sft") or {}
    else:
        refuse_missing(given)
        config = config_of_start(given) or configs() / f"{config_for_gpu()}.yaml"
        if "from" in given:  # the words of the user come last, so they replace these
            settings = [*AS_IN_START, *OTHER_DATA, *settings]
    if "run" not in given and ("run" not in section or "limit" in given):
        run = str(section.get("run") or default_run(config, given))
        limit = str(given.get("limit", section.get("limit")))
        if limit.isdecimal():  # a trial has its own folder
            ending = f"-limit{limit}"
            run = f"{run.removesuffix(ending)}{ending}"
        settings.insert(0, f"run={run}")
    return config, settings


def configs() -> Path:
    """Return the folder of the configs, in this checkout or else in the installed package."""
    here = Path("finetune/configs")
    return here if here.is_dir() else Path(__file__).with_name("configs")


def config_file(word: str) -> Path:
    """Return the config that a word means; UserError: there is none of that name."""
    names = sorted(other.stem for other in configs().glob("*.yaml"))
    if word in names:
        return configs() / f"{word}.yaml"
    file = Path(word)
    # A name may have dots: qwen2.5-0.5b-cpu.
    if file.name != word or file.suffix in (".yaml", ".yml") or file.is_file():
        return file
    hint = did_you_mean(word, names)
    raise UserError(f"no config {word!r}{hint} (there are {', '.join(names)}, or give a file)")


def refuse_missing(given: Mapping[str, str]) -> None:
    """Refuse a training that has neither a config nor a run folder, and lacks settings."""
    missing = [f"{name}={what}" for name, what in NEEDED.items() if name not in given]
    if "from" in given:  # its base is the model
        missing = [one for one in missing if not one.startswith("model=")]
    if not missing:
        return
    refuse_home("run", given.get("run", ""))  # for `~/x`, "x has none" would be misleading
    reason = "" if "run" not in given else f": {given['run']} has none"
    raise UserError(
        f"say {' and '.join(missing)}, or run=FOLDER of a training{reason}; with make in capitals "
        "(CONFIG=demo trains a toy)"
    )


def config_of_start(given: Mapping[str, str]) -> Path | None:
    """Return the config of the run folder that `from` names, if `from` is given and has one.

    Return None for an adapter that another tool trained and `panjue adopt` took over: its config
    does not say how to train.
    """
    if "from" not in given:
        return None
    run = Path(unquoted(given["from"]))
    if (run / MANIFEST).is_file() and RunRecord.read(run).adopted:
        return None
    config = run / CONFIG
    return config if config.is_file() else None


def unquoted(value: str) -> str:
    """Return the value of a word without the quotes that YAML needs around some texts."""
    return value.strip("'\"")


def config_for_gpu() -> str:
    """Return the name of the config for the largest GPU that CUDA may use, or for no GPU.

    Refuse a GPU that cannot be used, because the config for a CPU is for smaller models.
    """
    from torch import cuda  # noqa: PLC0415

    check_gpu()
    if not cuda.is_available():
        return "qwen2.5-0.5b-cpu"
    sizes = [cuda.get_device_properties(n).total_memory for n in range(cuda.device_count())]
    return "qwen3-8b-lora" if max(sizes) >= LORA_BYTES else "qwen3-8b-qlora"


def default_run(config: Path, given: Mapping[str, str]) -> Path:
    """Return the run folder of a config and words: model=q/B train=a.json -> runs/CONFIG-B-a."""
    values = {name: unquoted(value) for name, value in given.items()}
    task = values.get("task", "")
    is_of_start = config == config_of_start(given)  # RUN/config.yaml: its stem says nothing
    parts = [
        "" if is_of_start else config.stem,
        "" if task == "judgment" else task,
        Path(values.get("model", "")).name,
        Path(values.get("from", "")).name,
        Path(values.get("train", "")).stem,
    ]
    return Path("runs", "-".join(filter(None, parts)).replace(" ", "_"))
