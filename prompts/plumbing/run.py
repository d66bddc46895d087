"""The places in a run folder: where weights, answers and their records lie.

- `RUN/config.yaml`: all settings, in the sections `sft`, `generate` and `serve`.
- `RUN/adapter/`: the result of the training; `RUN/model/` if full.
- `RUN/kept/step-N/`: the adapter of another step.
- `RUN/answers/NAME/`: the answers to one test file.

`records.py` defines the content of the files.
"""

import re
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_lines
from panjue.prompts.plumbing.ours import lies_in_ours, record_keys
from panjue.prompts.plumbing.records import (
    CHOICE,
    CHOSEN,
    MANIFEST,
    SCORES,
    SUMMARY,
    AnswersRecord,
    Choice,
)

CONFIG = "config.yaml"
ANSWERS = "answers"
HELD_OUT = "held-out"
"""Name of the folder of answers to held-out cases; for answers=X, it is `held-out-X`. They decide
who answers; that choice lies with the weights."""

CASES_FILE = "cases.jsonl"
"""File beside answers with the hash of the text of each case."""

KEPT = "kept"
"""Folder in a run folder with adapters of other steps than the one with the lowest loss."""

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
"""Files that peft writes to the folder of an adapter; old versions wrote weights as a pickle."""

RESULTS = ("adapter", "model")
"""Folders in a run folder that hold the result of a training: LoRA weights, or all weights."""
REPLACED = (
    *(CONFIG, MANIFEST, *RESULTS, "merged", "unmerged"),
    *(KEPT, CHOSEN, "checkpoints", "log.jsonl", "skipped-train.jsonl", SUMMARY),
)
"""Names that commands replace in a run folder. A folder of answers has its own record."""
REPLACED_ANSWERS = (
    *(MANIFEST, CHOICE, CASES_FILE, "labels.json", "completions.jsonl", "skipped-test.jsonl"),
    *("decode.json", "confidence.jsonl", SCORES, "report.html"),
)
"""Names that commands replace in a folder of answers, besides the submission of the task."""


def kept_place(run: Path, step: int) -> Path:
    """Return the folder for the adapter of a step that does not have the lowest loss."""
    return run / KEPT / f"step-{step}"


def kept_adapters(run: Path) -> dict[int, Path]:
    """Return step -> folder of the adapters in RUN/kept."""
    found = {}
    for path in (run / KEPT).glob("step-*"):
        step = step_of_kept(path)
        if step is not None:
            found[step] = path
    return dict(sorted(found.items()))


def step_of_kept(trained: Path) -> int | None:
    """Return the step of an adapter in RUN/kept; None for the result of a training."""
    number = trained.name.removeprefix("step-")
    return int(number) if trained.parent.name == KEPT and number.isdecimal() else None


def step_of_checkpoint(folder: Path) -> int | None:
    """Return N of a folder `checkpoint-N`, as transformers names it; None for any other name."""
    found = re.fullmatch(r"checkpoint-(\d+)", folder.name)
    return int(found[1]) if found else None


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """Return step -> folder of the checkpoints, the oldest first."""
    found = {}
    for path in folder.glob("checkpoint-*"):
        step = step_of_checkpoint(path)
        if step is not None:  # `checkpoint-best` would be a user's copy
            found[step] = path
    return dict(sorted(found.items()))


def held_out_losses(run: Path) -> dict[int, float]:
    """Return step -> held-out loss, from the log of a run folder."""
    log = run / "log.jsonl"
    entries = [entry for _, entry in read_lines(log)] if log.exists() else []
    return {entry["step"]: entry["eval_loss"] for entry in entries if "eval_loss" in entry}


def run_around(trained: Path) -> Path:
    """Return the run folder around a result or an adapter of another step."""
    return trained.parent.parent if trained.parent.name == KEPT else trained.parent


def weights_folder(run: Path, chosen: Choice | None = None) -> Path | None:
    """Return the folder with the LoRA weights or the whole model of a run; None without any.

    Of several adapters, it is the chosen one, or else the result of the training, with the lowest
    loss. The folder of an adapter or model outside a run, e.g. a downloaded one, is its own run.
    """
    if chosen:
        place = run / chosen.adapter
        if not (place / MANIFEST).is_file():
            missing = f"{place}, which is missing; restore it, or delete the file"
            raise UserError(f"{run / CHOSEN}: names {missing}")
        return place
    for name in (*RESULTS, "."):
        place = run / name
        if (place / "labels.json").is_file() and (place / MANIFEST).is_file():
            return place
    return None


def foreign_adapters(folder: Path) -> list[Path]:
    """Return the folders of adapters in another trainer's folder: itself, or its checkpoints.

    Adapters in a folder of panjue do not count, e.g. in checkpoints of an unfinished training.
    """
    found = []
    for place in (folder, *checkpoints_in(folder).values()):
        has_weights = any((place / name).is_file() for name in (ADAPTER_WEIGHTS, PICKLED))
        if has_weights and (place / ADAPTER_CONFIG).is_file() and not lies_in_ours(place):
            found.append(place)
    return found


def way_to_adopt(folder: Path) -> str:
    """Return how to make a run from another trainer's adapter; empty if there is none."""
    found = foreign_adapters(folder)
    if not found:
        return ""
    place = folder if folder in found else found[-1]
    return f"`panjue adopt {shlex.quote(str(place))} run=RUN train=FILE` makes a run of it"


def unadopted(folder: Path) -> str:
    """Return a text if a folder has another trainer's adapter, with the way out; else empty."""
    way_out = way_to_adopt(folder)
    return f"has an adapter that panjue did not train; {way_out}" if way_out else ""


def refuse_unadopted(folder: Path) -> None:
    """Refuse a folder with another trainer's adapter in place of a run folder.

    `panjue adopt` makes a run folder of such an adapter; the error says so.
    """
    if problem := unadopted(folder):
        raise UserError(f"{folder}: {problem}")


def refuse_answers(run: Path) -> None:
    """Refuse a folder of answers as a run folder; it has labels and a manifest, too."""
    if "test_sha256" in record_keys(run / MANIFEST):
        raise UserError(f"{run}: has answers; give the run folder, with its training")


def weights_that_answered(answers: Path, recorded: str | None) -> Path | None:
    """Return the folder of the weights that answered, from the path in the record of answers.

    Weights in the run folder around the answers count before the recorded path. If the run was
    moved, other weights may lie at that path.
    """
    if not recorded:
        return None
    folder = answers.resolve()
    if folder.parent.name == ANSWERS:
        run = folder.parent.parent
        name = Path(recorded).name
        # Every folder of weights has labels.json. Weights that were downloaded alone are their own
        # run folder, `run`. If it also has weights of the recorded name, those are meant.
        for place in (run / name, run / KEPT / name, run):
            if (place / "labels.json").is_file():
                return place
    return Path(recorded)


def find_answers(path: Path, gold: Path | None = None, gold_sha256: str = "") -> Path | None:
    """Return the folder of answers in a run folder, or the one around a submission; else None.

    Of several in a run, take those to the file `gold`. If there are none, `gold` may be the test
    file with gold answers added, so take those of its name. Then prefer folders with a reply, and
    answers to all cases. If several are left, raise UserError. Answers to held-out cases are found
    only if `path` is their folder.
    """
    if path.name == ANSWERS and not (path / MANIFEST).is_file():  # RUN/answers in place of RUN
        path = path.parent
    start = path if path.is_dir() else path.parent
    for place in (start, start.parent):  # a submission may itself be a folder
        if _is_of_answers(place):
            return place
    folders = answer_folders(path)
    # A condition that no folder meets is dropped: `or folders`.
    if gold and len(folders) > 1:
        same_file = [one for one in folders if _recorded(one, "test_sha256") == gold_sha256]
        same_name = [one for one in folders if one.name == gold.stem]
        folders = same_file or same_name or folders
    folders = list(filter(has_answers, folders)) or folders
    if len(folders) > 1:
        folders = [one for one in folders if _recorded(one, "limit") is None] or folders
    if len(folders) > 1:
        names = ", ".join(map(str, folders))
        raise UserError(f"{path}: has several answers; say which: {names}")
    if not folders:  # for another trainer's folder, the error names the way out
        refuse_unadopted(path)
    return folders[0] if folders else None


def refuse_unanswered(path: Path) -> NoReturn:
    """Refuse a path in place of a folder of answers, or of a run folder that has some."""
    if not path.exists():
        raise UserError(f"{path}: there is no such folder; `panjue runs` lists the trainings")
    if not path.is_dir():
        raise UserError(f"{path}: is a file alone; give the folder of answers, or its run folder")
    weights = weights_folder(path)
    run = run_around(path)
    is_adapter = weights == path  # RUN/adapter was given in place of RUN
    if is_adapter and any(run.glob(f"{ANSWERS}/*/{MANIFEST}")):
        raise UserError(f"{path}: has no answers; give its run folder, {run}")
    other = "" if weights else " in a run folder, and nothing trained is in this one"
    raise UserError(f"{path}: has no answers; `panjue generate` makes them{other}")


def _recorded(folder: Path, entry: str) -> Any:
    """Return an entry of the record of answers; None if it cannot be read."""
    with suppress(UserError):
        return getattr(AnswersRecord.read(folder), entry)
    return None


def answer_folders(run: Path) -> list[Path]:
    """Return the folders of answers in a run folder, without those to held-out cases."""
    folders = [manifest.parent for manifest in sorted(run.glob(f"{ANSWERS}/*/{MANIFEST}"))]
    return [folder for folder in folders if not is_held_out_name(folder.name)]


def is_held_out_name(name: str) -> bool:
    """Say whether answers of this name are to held-out cases, of a generation or of a step."""
    return name == HELD_OUT or name.startswith((f"{HELD_OUT}-", f"{HELD_OUT}."))


def has_answers(folder: Path) -> bool:
    """Say whether a generation got beyond its start, so that there is a reply or a submission."""
    files = [*folder.glob("completions.jsonl"), *folder.glob("submission*")]
    return any(file.stat().st_size for file in files)


def _is_of_answers(folder: Path) -> bool:
    """Say whether a folder has the answers to one test file, in a run or copied from one."""
    path = folder / MANIFEST
    if not path.is_file():
        return False
    if folder.parent.name == ANSWERS and not (folder / CONFIG).is_file():
        return True  # RUN/answers/NAME, even with a broken manifest.json
    return "test_sha256" in record_keys(path)  # the manifest.json of a training has no such entry
