"""The model card of an adapter: what it is, its scores, how to load it, its limits."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from panjue.prompts.labels import load_labels
from panjue.prompts.model import is_hub_name, model_sha256
from panjue.prompts.plumbing.config import DATA, scrubbed
from panjue.prompts.plumbing.files import atomic_write
from panjue.prompts.plumbing.run import Answers, RunRecord
from panjue.prompts.render import prompt_files
from panjue.prompts.task import load_task

HERE = Path(__file__).parent
CARD = "README.md"
PSEUDONYMS = (
    "Names in published Chinese judgments are mostly pseudonyms. 公开文书中的姓名多为化名。\n"
)
UNSCORED = "Not scored yet: `panjue report RUN` writes it here. 尚未评分。"
# Existing cards have this line: if it changes, the notes below it are lost.
NOTES = "<!-- Your own notes: what stands below is kept. 以下由您填写，会保留。 -->"


def write_card(folder: Path, scored: str = UNSCORED) -> None:
    """Write `README.md`, and the task's prompts as `prompt*.md`, into an adapter or model folder.

    The card has no path of this machine. Text that a person wrote below the line `NOTES` is kept.
    `scored` is the table of scores, from `scored_on`.
    """
    record = RunRecord.read(folder)
    languages = load_task(record.task).data.languages
    is_adapter = (folder / "adapter_config.json").exists()
    prompts = {path.name: path.read_text("utf-8") for path in prompt_files(record.task)}
    words = {
        **record.model_dump(),
        "name": f"{record.task}-{folder.resolve().parent.name}",
        "kind": "A LoRA adapter" if is_adapter else "A model, all its weights fine-tuned,",
        "library": "peft" if is_adapter else "transformers",
        "languages": json.dumps(languages),
        "base": record.base if is_hub_name(record.base) else Path(record.base).name,
        "data": ", ".join(_data(record)),
        "labels": _labels(folder),
        "prompts": ", ".join(f"`{name}`" for name in prompts),
        "steps": ", ".join(f"{key} {value}" for key, value in scrubbed(record.trainer).items()),
        "metrics": scored,
        "names": PSEUDONYMS if "zh" in languages else "",
    }
    card = (HERE / "card.md").read_text("utf-8").format(**words)
    old = (folder / CARD).read_text("utf-8") if (folder / CARD).exists() else ""
    notes = old.partition(NOTES)[2] or "\n"
    for name, text in {**prompts, CARD: f"{card.rstrip()}\n\n{NOTES}{notes}"}.items():
        with atomic_write(folder / name) as out:
            out.write(text)


def _data(record: RunRecord) -> Iterable[str]:
    """Yield each data file of the training with its hash."""
    for name in DATA:
        if digest := getattr(record, f"{name}_sha256"):
            yield f"{name} file SHA-256 `{digest}`"


def _labels(folder: Path) -> str:
    counts = load_labels(folder / "labels.json").counts
    sizes = ", ".join(f"{len(labels)} {field}" for field, labels in counts.items())
    return f"labels: {sizes}" if sizes else "no label sets"


def write_scores(answers: Answers, scores: Mapping[str, Any], tested: str) -> str:
    """Write the scores into the card of the adapter that answered; return a line to print."""
    folder = answers.trained
    if folder and folder.is_dir() and model_sha256(folder) == answers.record.trained_sha256:
        write_card(folder, scored_on(scores, tested))
        return f"written: {folder / CARD}"
    return f"{folder}: missing or changed since it answered; no card is written"


def scored_on(scores: Mapping[str, Any], tested: str) -> str:
    """Return the card's table of scores.

    Args:
        scores: The content of the file of `panjue score --json`.
        tested: The test file, and how it was answered.
    """
    compared = f", texts compared by {scores['compared_by']}" if "compared_by" in scores else ""
    rows = [
        f"| {name} | {_number(scores[name])} | {_number(low)} - {_number(high)} |"
        for name, (low, high) in scores["interval"].items()
    ]
    heading = f"On {scores['examples']} examples, {tested}{compared}:"
    return "\n".join([heading, "", "| metric | score | 95% interval |", "|---|---|---|", *rows])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
