"""The model card of an adapter: what it is, its scores, how to load it, its limits."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from string import Formatter
from typing import Any

from panjue.eval.answers import Run
from panjue.prompts.labels import load_labels
from panjue.prompts.model import lora_rank
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
# Existing cards have this line: if it changes, the notes below it are lost.
NOTES = "<!-- Your own notes: what stands below is kept. 以下由您填写，会保留。 -->"
VLLM_SNIPPET = "```python\n# plain vLLM\n"
NO_VLLM = """\
vLLM loads this adapter only merged: `panjue merge RUN`. vLLM 只能加载合并后的模型。
"""
SCORES = re.compile(r"^## How it scores[^\n]*\n\n(.*?)\n\n## ", re.MULTILINE | re.DOTALL)


def card_files(folder: Path) -> list[Path]:
    """Return the card and the prompt files of a folder."""
    return [folder / CARD, *sorted(folder.glob("prompt*.md"))]


def write_card(folder: Path, scored: str = UNSCORED, name: str | None = None) -> None:
    """Write `README.md`, and the task's prompts as `prompt*.md`, into an adapter or model folder.

    The card has no path of this machine. Text that a person wrote below the line `NOTES` is kept.

    Args:
        folder: Has the training's manifest.json and labels.json.
        scored: The table of scores, from `scored_on`.
        name: The run's name; by default that of its folder.
    """
    from huggingface_hub import ModelCard, ModelCardData

    manifest = scrubbed(read_json(folder / "manifest.json"))
    task = manifest["task"]
    prompts, languages = _write_prompts(folder, task), load_task(task).data.languages
    is_adapter = (folder / "adapter_config.json").exists()
    base = manifest["base"]
    base = base if _is_on_hub(folder, base) else Path(base).name
    data = ModelCardData(
        language=list(languages),
        base_model=base,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["panjue", task],
    )
    words = {
        **manifest,
        "name": f"{task}-{name or folder.parent.name}",
        "kind": "A LoRA adapter" if is_adapter else "A model, all its weights fine-tuned,",
        "base": base,
        "examples": f"{manifest['examples']:,}" if "examples" in manifest else "the",
        "data": ", ".join(_data(manifest)),
        "labels": _labels(folder),
        "prompts": ", ".join(f"`{name}`" for name in prompts),
        "steps": ", ".join(f"{key} {value}" for key, value in manifest["trainer"].items()),
        "metrics": scored,
        "names": PSEUDONYMS if "zh" in languages else "",
        "fields": {name: f"<{name}>" for name in _fields(prompts.values())},
    }
    words["load"] = _snippets(folder, words)
    text = (HERE / "card.md").read_text("utf-8").format(**words)
    card, notes = ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}"), _notes(folder / CARD)
    with atomic_write(folder / CARD) as out:
        out.write(f"{str(card).rstrip()}\n\n{NOTES}{notes}")


def _snippets(folder: Path, words: Mapping[str, Any]) -> str:
    """Return the code that loads the adapter or model with plain libraries."""
    path = folder / "adapter_config.json"
    if not path.exists():
        return (HERE / "card-model.md").read_text("utf-8").format(**words)
    rank, snippets = lora_rank(folder), (HERE / "card-adapter.md").read_text("utf-8")
    if rank is None or read_json(path).get("use_dora"):
        snippets = snippets.partition(VLLM_SNIPPET)[0] + NO_VLLM
    return snippets.format(**words, rank=rank)


def _is_on_hub(folder: Path, base: str) -> bool:
    """Say whether a base has a name like Qwen/Qwen3-8B and is not a local folder."""
    path = folder / "adapter_config.json"
    name = read_json(path)["base_model_name_or_path"] if path.exists() else base
    return base.count("/") == 1 and name == base and not Path(base).exists()


def _notes(card: Path) -> str:
    """Return the text that a person wrote at the end of a card."""
    return (card.read_text("utf-8") if card.exists() else "").partition(NOTES)[2] or "\n"


def _write_prompts(folder: Path, task: str) -> dict[str, str]:
    """Write the prompts of a task, one per kind of call; return file name -> text."""
    prompts = {path.name: path.read_text("utf-8") for path in prompt_files(task)}
    for name, text in prompts.items():
        with atomic_write(folder / name) as out:
            out.write(text)
    return prompts


def _fields(prompts: Iterable[str]) -> list[str]:
    """Return the template fields of the first prompt; the snippets fill them in."""
    names = (name for _, name, *_ in Formatter().parse(next(iter(prompts))) if name)
    return list(dict.fromkeys(names))


def _data(manifest: Mapping[str, Any]) -> Iterable[str]:
    """Yield each data file of the training with its hash."""
    for name in DATA:
        if digest := manifest.get(f"{name}_sha256"):
            yield f"{name} file SHA-256 `{digest}`"


def _labels(folder: Path) -> str:
    counts = load_labels(folder / "labels.json").counts
    sizes = ", ".join(f"{len(labels)} {field}" for field, labels in counts.items())
    return f"labels: {sizes}" if sizes else "no label sets"


def write_scores(run: Run, scores: Mapping[str, Any], tested: str) -> str:
    """Write the scores into the card of the adapter that answered; return a line to print."""
    if folder := run.card_folder():
        write_card(folder, scored_on(scores, tested))
        return f"written: {folder / CARD}"
    return f"{run.trained}: missing or changed since it answered; no card is written"


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


def scored_in(folder: Path) -> str:
    """Return the table of scores of an existing card."""
    match = SCORES.search((folder / CARD).read_text("utf-8")) if (folder / CARD).exists() else None
    return match[1] if match else UNSCORED


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
