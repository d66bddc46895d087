"""What answers were made from: found before they are made, and recorded beside them."""

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from panjue.prompts.labels import Labels, load_labels
from panjue.prompts.model import model_sha256, prompt_sha256
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import (
    delete,
    difference,
    manifest_diff,
    read_json,
    sha256,
    write_json,
)
from panjue.prompts.render import RULES
from panjue.prompts.task import Task
from panjue.serve.settings import RESOURCES, GenerateConfig, trained_folder

DECODED = ("decode.json", "confidence.jsonl", "scores.json", "report.html")
"""Files that are derived from completions, besides the submission."""


@dataclass(frozen=True)
class Training:
    """What generation takes from a training result.

    Attributes:
        folder: Folder of the training result; None for an endpoint without one.
        labels: The label sets of the training.
        max_tokens: Limit on prompt plus reply; 0 leaves the limit to the endpoint.
        solve: Settings of examples with several calls: those of training, then those of the config.
    """

    folder: Path | None
    labels: Labels
    max_tokens: int
    solve: dict[str, Any]


def find_training(config: GenerateConfig, task: Task) -> Training:
    """Find the training result, which an endpoint needs only for the labels.

    Raises:
        UserError: There is no training result, and the task or the engine needs one.
    """
    if config.endpoint and config.trained is None:
        return Training(None, Labels(), config.max_tokens or 0, config.solve)
    trained = trained_folder(config)
    manifest = read_json(trained / "manifest.json")
    solve = {**manifest.get("solve", {}), **config.solve}
    max_tokens = config.max_tokens or manifest["max_tokens"]
    return Training(trained, load_labels(trained / "labels.json"), max_tokens, solve)


def check_held_out(trained: Path | None, test_sha256: str) -> None:
    """Check that training held out a tenth of this test file.

    Raises:
        UserError: Training had a `dev` file or another training file, or there is no training.
    """
    if trained is None:
        raise UserError("held_out: needs a training; set trained=FOLDER")
    manifest = read_json(trained / "manifest.json")
    if manifest.get("dev_sha256"):
        raise UserError(f"held_out: {trained} was trained with a dev file; set test to that file")
    if test_sha256 != manifest["train_sha256"]:
        raise UserError(
            f"held_out: test must be the training file of {trained}: {manifest['train']}"
        )


def provenance(config: GenerateConfig, training: Training, task: Task) -> dict[str, Any]:
    """Return what the completions depend on; a run resumes only with the same values."""
    trained = training.folder
    return {
        "task": config.task,
        "test": str(config.test),
        "test_sha256": sha256(config.test),
        "trained": trained and str(trained),
        "trained_sha256": trained and model_sha256(trained),
        "labels_sha256": trained and sha256(trained / "labels.json"),
        "prompt_sha256": prompt_sha256(config.task),
        "adapter": config.adapter,
        "constrained": config.constrained,
        "max_tokens": training.max_tokens,
        "seed": config.seed,
        "engine": config.engine,
        "sampling": config.sampling,
        "samples": config.samples,
        "held_out": config.held_out,
        **({"endpoint": config.endpoint} if config.endpoint else {}),
        **task.answer.provenance(),
        **({"on_bad_row": "skip"} if config.on_bad_row == "skip" else {}),
        "versions": {
            "prompt rules": RULES,
            **{name: version(name) for name in ("llguidance", "transformers")},
        },
    }


def without_resources(record: dict[str, Any]) -> dict[str, Any]:
    """Return a provenance record without the engine's settings of memory and speed."""
    engine = {key: value for key, value in record.get("engine", {}).items() if key not in RESOURCES}
    return {**record, "engine": engine}


def claim(
    folder: Path, task: Task, record: dict[str, Any], labels: Labels, console: Console
) -> None:
    """Write the manifest and the labels of these completions to `folder`.

    Other library versions are allowed and printed. If the completions were deleted, the files
    derived from them are deleted too, and named.

    Raises:
        UserError: The folder has completions from other settings; names what differs.
    """
    path, completions = folder / "manifest.json", folder / "completions.jsonl"
    manifest = read_json(path) if path.exists() else {}
    old_record = manifest.get("generate", {})
    if completions.exists():
        changed = manifest_diff(without_resources(old_record), without_resources(record))
        if changed or not old_record:
            raise UserError(
                f"{folder}: has answers made with other settings "
                f"({changed or 'they were not recorded'}); they are kept: "
                "name another folder for these with answers=NAME (make: ANSWERS=NAME)"
            )
        if changed := difference(old_record["versions"], record["versions"]):
            console.print(f"resuming with other versions: {changed}", highlight=False, markup=False)
            record = {**record, "versions": old_record["versions"]}
    elif old_record:
        names = (task.data.submission.name, *DECODED)
        stale = [folder / name for name in names if (folder / name).exists()]
        for file in stale:
            delete(file)
        if stale:
            deleted = ", ".join(file.name for file in stale)
            console.print(f"{folder}: deleted {deleted}: their completions are gone", markup=False)
    labels.save(folder)
    write_json(path, {**manifest, "generate": record})
