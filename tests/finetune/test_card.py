"""The model card: its own snippets load the adapter, with nothing of panjue's."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from panjue.prompts.card import write_card
from panjue.prompts.files import read_json
from panjue.prompts.model import model_sha256
from panjue.prompts.render import TEMPLATES


def snippets(folder: Path) -> dict[str, str]:
    text = (folder / "README.md").read_text("utf-8")
    found = re.findall(r"^```python\n# plain (\w+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return dict(found)


def test_the_card_says_what_the_adapter_is(trained: Path) -> None:
    folder = trained / "adapter"
    made, card = read_json(folder / "manifest.json"), ModelCard.load(folder / "README.md")
    assert card.data.base_model == made["base"]
    assert card.data.library_name == "peft"
    for told in ("base_sha256", "train_sha256", "prompt_sha256"):
        assert made[told] in card.text
    assert f"{made['examples']:,} examples" in card.text
    assert "Not scored yet" in card.text
    assert (folder / "prompt.md").read_bytes() == (TEMPLATES / "judgment.md").read_bytes()
    before = model_sha256(folder)
    write_card(folder, {"examples": 285, "final": 0.5, "interval": {"final": [0.4, 0.6]}})
    assert "| final | 0.5000 | 0.4000 - 0.6000 |" in (folder / "README.md").read_text("utf-8")
    assert model_sha256(folder) == before, "the card is no part of the model"


@pytest.mark.slow
@pytest.mark.parametrize("library", ["peft", "vLLM"])
def test_the_adapter_loads_by_the_cards_own_snippet(
    library: str, trained: Path, tmp_path: Path
) -> None:
    script = tmp_path / "snippet.py"
    script.write_text(snippets(trained / "adapter")[library], "utf-8")
    done = subprocess.run(
        [sys.executable, script],
        cwd=trained / "adapter",
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "{" in done.stdout
