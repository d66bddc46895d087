"""The trained adapter from which a training starts (`from=RUN`), and the settings it decides."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from panjue.finetune.trained import Trained, check_classes, open_trained, refuse_other_choice
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump
from panjue.prompts.task import load_task


def open_start(values: Mapping[str, Any]) -> Trained | None:
    """Open the training that the setting `from` names; None if it is not set.

    UserError: it has no adapter, its labels have changed, or `panjue choose` chose another adapter.
    """
    run = values.get("from")
    if not isinstance(run, str):  # pydantic refuses any other type
        return None
    try:
        start = open_trained(Path(run))
        refuse_other_choice(start)
    except UserError as error:
        raise UserError(f"from: {error}") from None
    folder = start.folder
    if not start.is_adapter:
        raise UserError(f"from: {folder} is a whole model; leave out `from`, set model={folder}")
    if start.labels_sha256 != start.record.labels_sha256:
        raise UserError(f"from: {folder}/labels.json has changed since training; restore it")
    check_classes(load_task(start.record.task), start.labels, folder)
    return start


def completed(values: Mapping[str, Any], start: Trained) -> dict[str, Any]:
    """Return the settings; those that are absent or null come from `start`.

    These are base, task, method, LoRA settings, `solve`, and whether prompts show opinions.
    """
    record = start.record
    of_start = {
        "task": record.task,
        "model": record.base,
        "method": record.method,
        "opinions": record.opinions,
    }
    given = {key: value for key, value in values.items() if value is not None}
    settings = {**values, **of_start, **given}
    # The weights come from `start`, so it does not matter how those were initialized.
    lora = {name: value for name, value in record.lora.items() if name != "init_lora_weights"}
    for section, before in (("lora", lora), ("solve", record.solve)):
        now = given.get(section, {})
        if isinstance(now, Mapping):  # pydantic refuses any other type
            settings[section] = {**before, **now}
    if settings["method"] == "qlora" and not given.get("quantization"):
        settings["quantization"] = record.quantization
    return settings


def refuse_unequal(name: str, value: Any, of_start: Any, run: Path | None) -> NoReturn:
    """Refuse a setting that must be as in the training of `run`, but is not."""
    now, before = (one if isinstance(one, str) else dump(one) for one in (value, of_start))
    way_out = f"leave out {name}, or set {name}={before}"
    raise UserError(f"{name}: is {now}, and {run} was trained with {before}; {way_out}")
