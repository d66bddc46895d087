"""The model card beside an adapter: what it is, how it scores, how to load it, what it is not."""

from collections.abc import Mapping
from pathlib import Path
from string import Formatter
from typing import Any

from panjue.prompts.files import read_json, whole_file
from panjue.prompts.labels import load_labels
from panjue.prompts.render import TEMPLATES

CARD = Path(__file__).parent / "card.md"


def write_card(
    folder: Path, scores: Mapping[str, Any] | None = None, name: str | None = None
) -> None:
    """Write `README.md` and `prompt.md` into the folder of an adapter or a model.

    Args:
        folder: Has the training's manifest.json and labels.json.
        scores: What `panjue score --json` wrote of it, if it has been scored.
        name: Of the run; by default that of its folder.
    """
    from huggingface_hub import ModelCard, ModelCardData

    made = read_json(folder / "manifest.json")
    template = (TEMPLATES / f"{made['task']}.md").read_text("utf-8")
    fields = dict.fromkeys(name for _, name, *_ in Formatter().parse(template) if name)
    is_adapter = (folder / "adapter_config.json").exists()
    data = ModelCardData(
        language="zh",
        base_model=made["base"],
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["panjue", made["task"]],
    )
    counts = load_labels(folder / "labels.json").counts
    labels = ", ".join(f"{len(of)} {kind}" for kind, of in counts.items())
    text = CARD.read_text("utf-8").format(
        name=f"{made['task']}-{name or folder.parent.name}",
        kind="A LoRA adapter" if is_adapter else "A model, all its weights fine-tuned,",
        task=made["task"],
        base=made["base"],
        base_sha256=made["base_sha256"],
        examples=f"{made['examples']:,}" if "examples" in made else "the",
        train_sha256=made["train_sha256"],
        labels=f"labels: {labels}" if labels else "no label sets",
        prompt_sha256=made["prompt_sha256"],
        max_tokens=made["max_tokens"],
        method=made["method"],
        steps=_told(made["trainer"]),
        metrics=_metrics(scores),
        fields={name: f"<{name}>" for name in fields},
    )
    with whole_file(folder / "prompt.md") as out:
        out.write(template)
    with whole_file(folder / "README.md") as out:
        out.write(str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}")))


def _told(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items()) or "trl's defaults"


def _metrics(scores: Mapping[str, Any] | None) -> str:
    if not scores:
        return "Not scored yet: `panjue score` and `panjue report` do. 尚未评分。"
    by = f", texts compared by {scores['compared_by']}" if "compared_by" in scores else ""
    rows = [
        f"| {name} | {scores[name]:.4f} | {low:.4f} - {high:.4f} |"
        for name, (low, high) in scores["interval"].items()
    ]
    head = f"On {scores['examples']} examples{by}:"
    return "\n".join([head, "", "| metric | score | 95% interval |", "|---|---|---|", *rows])
