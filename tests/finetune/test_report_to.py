"""Where a training is reported to: wandb and SwanLab for real where they are installed, offline."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from panjue.finetune.settings import sft_settings
from panjue.finetune.sft import train
from panjue.prompts.plumbing.errors import UserError

from .conftest import lend_rows, main

LOGGED = (b"train/loss", b"train/learning_rate", b"train/num_tokens", b"eval/loss")


@pytest.mark.parametrize(
    ("package", "file"),
    [("wandb", "wandb/offline-run-*/*.wandb"), ("swanlab", "swanlog/run-*/*.swanlab")],
)
def test_a_training_is_reported_offline(
    package: str, file: str, workshop: Path, tmp_path: Path
) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    run = tmp_path / "run"
    lend_rows(workshop, run)
    words = ["trainer.max_steps=2", "trainer.eval_steps=1", "trainer.save_steps=1"]
    command = [sys.executable, "-m", "panjue.prompts.cli", "sft", workshop / "sft.yaml"]
    offline = {"WANDB_MODE": "offline", "SWANLAB_MODE": "offline"}
    subprocess.run(
        [*map(str, command), f"run={run}", *words, f"trainer.report_to={package}"],
        env={**os.environ, **offline},
        cwd=tmp_path,
        check=True,
    )
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "all lies in the run folder"
    [written] = run.glob(file)
    values = written.read_bytes()
    assert [name for name in LOGGED if name not in values] == []


def test_what_is_not_installed_is_named_before_anything_is_made(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if find_spec("clearml"):
        pytest.skip("clearml is installed")
    words = ["trainer.report_to=clearml"]
    said = rf"^trainer.report_to: clearml is not installed; {sys.executable} -m pip install "
    with pytest.raises(UserError, match=said):
        train(sft_settings(workshop / "sft.yaml", [f"run={tmp_path}/run", *words]))
    assert not list(tmp_path.glob("run/rows/*/rows.arrow"))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("package", ["wandb", "swanlab"])
def test_a_broken_package_is_named_too(
    package: str, workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("raise TypeError('no descriptors')\n", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, package, raising=False)
    said = rf"{package} does not work here \(no descriptors\); .* install --upgrade {package}$"
    with pytest.raises(UserError, match=said):
        main(workshop / "sft.yaml", [f"run={tmp_path}/run", f"trainer.report_to=[{package}]"])
