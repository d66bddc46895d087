"""The model card of an adapter."""

import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from panjue.eval.card import NOTES, scored_on, write_card
from panjue.prompts.model import model_sha256
from panjue.prompts.plumbing.files import read_json
from panjue.prompts.plumbing.run import RunRecord
from panjue.prompts.render import prompt_files


def test_the_card_says_what_the_adapter_is(trained: Path) -> None:
    folder = trained / "adapter"
    made, card = read_json(folder / "manifest.json"), ModelCard.load(folder / "README.md")
    assert card.data.base_model == Path(made["base"]).name
    assert made["base"] not in card.text, "no folder of this machine"
    assert card.data.library_name == "peft"
    assert card.data.language == ["zh"]
    assert card.data.tags == ["panjue", "judgment"]
    for name in ("base_sha256", "train_sha256", "prompt_sha256"):
        assert made[name] in card.text
    assert f"{made['examples']:,} examples" in card.text
    assert "Not scored yet" in card.text
    assert (folder / "prompt.md").read_bytes() == prompt_files("judgment")[0].read_bytes()
    before = model_sha256(folder)
    scores: dict[str, Any] = {"examples": 285, "final": 0.5, "event": None}
    scores["interval"] = {"event": [None, None], "final": [0.4, 0.6]}
    told = scored_on(scores, "a file with SHA-256 abc, greedy")
    write_card(folder, told)
    assert "On 285 examples, a file with SHA-256 abc, greedy:" in told
    assert told.endswith("| event | - | - - - |\n| final | 0.5000 | 0.4000 - 0.6000 |")
    assert told in (folder / "README.md").read_text("utf-8")
    assert model_sha256(folder) == before, "the card is no part of the model"


def test_what_a_person_notes_below_a_card_stays(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run/adapter"
    shutil.copytree(trained / "adapter", folder)
    write_card(folder)
    card = folder / "README.md"
    own = "\n## 备注\n\n{name} 与 ``` 和 ---\n"
    card.write_text(card.read_text("utf-8") + own, "utf-8")
    write_card(folder, "On 285 examples:")
    again = card.read_text("utf-8")
    assert again.endswith(f"{NOTES}\n{own}")
    assert "On 285 examples:" in again
    write_card(folder, "On 285 examples:")
    assert card.read_text("utf-8") == again


def test_every_prompt_and_every_data_file_is_named(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run/adapter"
    shutil.copytree(trained / "adapter", folder)
    data = {"mix_sha256": "m" * 64, "dev_sha256": "d" * 64}
    RunRecord.read(folder).model_copy(update={"task": "dialogue", **data}).write(folder)
    write_card(folder)
    text = (folder / "README.md").read_text("utf-8")
    names = {path.name for path in folder.glob("prompt*.md")}
    assert len(names) == len(prompt_files("dialogue")) > 1
    for word in (*(f"`{name}`" for name in names), *data.values()):
        assert word in text
