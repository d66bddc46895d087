"""Labels that look equal are named before they are trained on."""

from pathlib import Path

import pytest

from panjue.finetune.settings import sft_settings
from panjue.finetune.sft import train as sft

TWO = "charges '盗窃', '盗窃罪' look equal; keep one spelling"


def test_the_plan_of_a_training_names_them(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = tmp_path / "train.jsonl"
    text = (workshop / "demo/train.jsonl").read_text("utf-8")
    train.write_text(text.replace('"盗窃罪"', '"盗窃"', 9), "utf-8")
    words = [f"run={tmp_path}/run", f"train={train}", "dry_run=true"]
    sft(sft_settings(workshop / "sft.yaml", words))
    assert f"labels       {TWO}\n" in capsys.readouterr().out
