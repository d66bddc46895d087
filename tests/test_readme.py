"""What the README tells people to copy is at least well formed."""

import configparser
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)


def blocks(language: str) -> list[str]:
    text = (ROOT / "README.md").read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_the_systemd_unit() -> None:
    [unit] = blocks("ini")
    parser = configparser.ConfigParser(strict=True, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(unit)
    assert parser.sections() == ["Unit", "Service", "Install"]
    assert "panjue serve serve/configs/" in parser["Service"]["ExecStart"]
    seconds = int(parser["Service"]["TimeoutStopSec"])
    assert seconds > 30, "longer than drain_s"


def test_the_compose_file() -> None:
    [text] = blocks("yaml")
    compose = yaml.safe_load(text)
    [service] = compose["services"].values()
    assert "panjue serve serve/configs/" in " ".join(service["command"])
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    named = {volume.split(":")[0] for volume in service["volumes"] if volume[0] != "/"}
    assert named == compose["volumes"].keys()


@pytest.mark.parametrize("readme", ["README.md", "README.zh.md"])
def test_make_targets_and_config_files_that_are_named_exist(readme: str) -> None:
    text = (ROOT / readme).read_text("utf-8")
    for line in re.findall(r"^make ([a-z -]+?)(?= *[A-Z#]|$)", text, re.MULTILINE):
        assert set(line.split()) <= set(TARGETS), line
    for config in re.findall(r"(?:serve|finetune)/configs/[\w.-]+\.yaml", text):
        assert (ROOT / config).exists(), config
