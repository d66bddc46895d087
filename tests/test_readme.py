"""What the README tells people to copy is at least well formed."""

import configparser
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
ROOMS = ("prompts", "finetune", "serve", "eval")
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)


def blocks(language: str) -> list[str]:
    text = (ROOT / "serve/README.md").read_text("utf-8")
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
    # An engine that never came up ends like a wrong setting; at boot that may be for a minute only.
    assert parser["Service"]["Restart"] == "always"
    assert "RestartPreventExitStatus" not in parser["Service"]
    assert int(parser["Service"]["RestartSec"]) >= 10
    assert parser["Unit"]["StartLimitIntervalSec"] == "0"


def test_the_compose_file() -> None:
    [text] = blocks("yaml")
    compose = yaml.safe_load(text)
    [service] = compose["services"].values()
    assert "panjue serve serve/configs/" in " ".join(service["command"])
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    named = {volume.split(":")[0] for volume in service["volumes"] if volume[0] != "/"}
    assert named == compose["volumes"].keys()


READMES = [
    f"{room}/{name}" for room in (".", "api", *ROOMS) for name in ("README.md", "README.zh.md")
]


@pytest.mark.parametrize("readme", READMES)
def test_links_lead_somewhere(readme: str) -> None:
    text = (ROOT / readme).read_text("utf-8")
    for place, heading in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", text):
        file = (ROOT / readme).parent / place if place else ROOT / readme
        assert file.exists(), place
        heads = re.findall(r"^## (.*)$", file.read_text("utf-8"), re.MULTILINE) if heading else []
        anchors = [re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads]
        assert not heading or heading in anchors, (place, heading, anchors)


def test_the_first_page_is_short() -> None:
    for readme in READMES[:2]:
        assert len((ROOT / readme).read_text("utf-8").splitlines()) <= 120


@pytest.mark.parametrize("readme", READMES)
def test_make_targets_and_config_files_that_are_named_exist(readme: str) -> None:
    text = (ROOT / readme).read_text("utf-8")
    for line in re.findall(r"^make ([a-z -]+?)(?= *[A-Z#]|$)", text, re.MULTILINE):
        assert set(line.split()) <= set(TARGETS), line
    for config in re.findall(r"(?:serve|finetune)/configs/[\w.-]+\.yaml", text):
        assert (ROOT / config).exists(), config


def in_a_run(readme: str) -> set[str]:
    """Return the files and folders that are said to lie in a run's folder."""
    text = (ROOT / readme).read_text("utf-8")
    [listed] = re.findall(r"^.*`runs/<.*\n((?:\n|(?:- |  ).*\n)+)", text, re.MULTILINE)
    return set(re.findall(r"`([a-z*.-]+?)/?`", listed))


def test_what_lies_in_a_run_is_listed() -> None:
    listed = in_a_run("README.md")
    assert listed == in_a_run("README.zh.md")
    code = "".join(
        file.read_text("utf-8") for room in ROOMS for file in (ROOT / room).rglob("*.py")
    )
    written = set(re.findall(r"\b(?:run|(?:run|config|opened)\.folder) / \"([\w.-]+)\"", code))
    assert written >= {"config.yaml", "report.html", "skipped-test.jsonl"}
    assert not [name for name in written if not any(fnmatch(name, one) for one in listed)]
    makes = (ROOT / "Makefile").read_text("utf-8")
    assert listed >= set(re.findall(r"\$\(RUN\)/([\w.-]+)", makes))
