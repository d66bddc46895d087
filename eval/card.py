"""The model card beside an adapter: what it is, how it scores, how to load it, what it is not."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from string import Formatter
from typing import Any

from panjue.eval.answers import Run
from panjue.prompts.labels import load_labels
from panjue.prompts.plumbing.config import DATA, scrubbed
from panjue.prompts.plumbing.files import atomic_write, read_json
from panjue.prompts.render import prompt_files
from panjue.prompts.task import load_task

HERE = Path(__file__).parent
CARD = "README.md"
PSEUDONYMS = (
    "Names in published Chinese judgments are mostly pseudonyms. 公开文书中的姓名多为化名。\n"
)
UNSCORED = "Not scored yet: `panjue report RUN` writes it here. 尚未评分。"
NOTES = "<!-- Your own notes: what stands below is kept. 以下由您填写，会保留。 -->"
SCORES = re.compile(r"^## How it scores[^\n]*\n\n(.*?)\n\n## ", re.MULTILINE | re.DOTALL)


def card_files(folder: Path) -> list[Path]:
    """Return the card of a folder and the prompts beside it."""
    return [folder / CARD, *sorted(folder.glob("prompt*.md"))]


def write_card(folder: Path, scored: str = UNSCORED, name: str | None = None) -> None:
    """Write `README.md`, and the task's prompts as `prompt*.md`, beside an adapter or a model.

    It names no folder of this machine. What a person wrote below the line `NOTES` is kept.

    Args:
        folder: Has the training's manifest.json and labels.json.
        scored: How it scores, as `scored_on` says it.
        name: Of the run; by default that of its folder.
    """
    from huggingface_hub import ModelCard, ModelCardData

    made = scrubbed(read_json(folder / "manifest.json"))
    prompts, languages = (
        _write_prompts(folder, made["task"]),
        load_task(made["task"]).data.languages,
    )
    is_adapter = (folder / "adapter_config.json").exists()
    base = made["base"] if _is_on_hub(folder, made["base"]) else Path(made["base"]).name
    data = ModelCardData(
        language=list(languages),
        base_model=base,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["panjue", made["task"]],
    )
    told = {
        "name": f"{made['task']}-{name or folder.parent.name}",
        "kind": "A LoRA adapter" if is_adapter else "A model, all its weights fine-tuned,",
        "base": base,
        "examples": f"{made['examples']:,}" if "examples" in made else "the",
        "data": ", ".join(_data(made)),
        "labels": _labels(folder),
        "prompts": ", ".join(f"`{name}`" for name in prompts),
        "steps": ", ".join(f"{name} {value}" for name, value in made["trainer"].items()),
        "metrics": scored,
        "names": PSEUDONYMS if "zh" in languages else "",
        "fields": {name: f"<{name}>" for name in _fields(prompts.values())},
    }
    load = HERE / ("card-adapter.md" if is_adapter else "card-model.md")
    words = {**made, **told}
    words["load"] = load.read_text("utf-8").format(**words)
    text = (HERE / "card.md").read_text("utf-8").format(**words)
    card, kept = ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}"), _notes(folder / CARD)
    with atomic_write(folder / CARD) as out:
        out.write(f"{str(card).rstrip()}\n\n{NOTES}{kept}")


def _is_on_hub(folder: Path, base: str) -> bool:
    """Say whether a base has a name like Qwen/Qwen3-8B, and is no folder of that name."""
    place = folder / "adapter_config.json"
    found = read_json(place)["base_model_name_or_path"] if place.exists() else base
    return base.count("/") == 1 and found == base and not Path(base).exists()


def _notes(card: Path) -> str:
    """Return what a person wrote at the end of a card."""
    return (card.read_text("utf-8") if card.exists() else "").partition(NOTES)[2] or "\n"


def _write_prompts(folder: Path, task: str) -> dict[str, str]:
    """Write the prompts of a task, of its several calls one each; return them by their names."""
    found = {}
    for path in prompt_files(task):
        found[path.name] = path.read_text("utf-8")
        with atomic_write(folder / path.name) as out:
            out.write(found[path.name])
    return found


def _fields(prompts: Iterable[str]) -> list[str]:
    """Return the fields of the first prompt, which the snippets fill in."""
    return list(
        dict.fromkeys(name for _, name, *_ in Formatter().parse(next(iter(prompts))) if name)
    )


def _data(made: Mapping[str, Any]) -> Iterable[str]:
    """Yield each data file of a training by its hash."""
    for name in DATA:
        if digest := made.get(f"{name}_sha256"):
            yield f"{name} file SHA-256 `{digest}`"


def _labels(folder: Path) -> str:
    counts = load_labels(folder / "labels.json").counts
    listed = ", ".join(f"{len(of)} {kind}" for kind, of in counts.items())
    return f"labels: {listed}" if listed else "no label sets"


def write_scores(run: Run, scores: Mapping[str, Any], tested: str) -> str:
    """Write the scores into the card of the adapter that answered, and say so."""
    if folder := run.card_folder():
        write_card(folder, scored_on(scores, tested))
        return f"written: {folder / CARD}"
    return f"{run.trained}: is not what answered any more; its card is left as it is"


def scored_on(scores: Mapping[str, Any], tested: str) -> str:
    """Return the card's table of scores.

    Args:
        scores: What `panjue score --json` wrote.
        tested: On which examples, and how they were answered.
    """
    by = f", texts compared by {scores['compared_by']}" if "compared_by" in scores else ""
    rows = [
        f"| {name} | {_number(scores[name])} | {_number(low)} - {_number(high)} |"
        for name, (low, high) in scores["interval"].items()
    ]
    head = f"On {scores['examples']} examples, {tested}{by}:"
    return "\n".join([head, "", "| metric | score | 95% interval |", "|---|---|---|", *rows])


def scored_in(folder: Path) -> str:
    """Return the table of scores that a card has already."""
    found = SCORES.search((folder / CARD).read_text("utf-8")) if (folder / CARD).exists() else None
    return found[1] if found else UNSCORED


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
