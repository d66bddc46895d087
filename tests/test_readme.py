"""The pages: the same sections and commands in both languages, and every command on them exists."""

import configparser
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from typer import Exit
from typer.core import TyperGroup
from typer.main import get_command

from panjue.finetune.make import VARIABLES
from panjue.prompts.cli import app

ROOT = Path(__file__).parents[1]
FOLDERS = (".", "prompts", "finetune", "serve", "eval")
ENGLISH = [*(f"{folder}/README.md" for folder in FOLDERS), "finetune/BASES.md", "serve/ANSWERS.md"]
READMES = [page for english in ENGLISH for page in (english, english.replace(".md", ".zh.md"))]
PAGES = [
    *READMES,
    *("prompts/OFFICIAL.md", "prompts/OFFICIAL.zh.md"),
    *("serve/DEPLOY.md", "finetune/EXPERIMENTS.md", "tests/README.md", "tests/bench/README.md"),
    "CONTRIBUTING.md",
    "CHANGELOG.md",
]
MADE = {".venv", "RUN", "runs", "data", "chat", "emo"}
"""First folders of paths that the user has, or that a command makes."""
TABLES = ["prompts/DATA.md", "prompts/DATA.zh.md", "finetune/NAMES.md"]  # have tests of their own
STANDS_FOR = {"=…": "=x", " …": "", "[key=value …]": "", "COMMAND": "score", "URL#MODEL": "u#m"}


def text(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


def blocks(shown: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", shown, re.MULTILINE | re.DOTALL)


def commands(shown: str) -> list[str]:
    """Return the commands of all `sh` blocks of a text, without remarks, continued lines joined."""
    lines = "".join(blocks(shown, "sh")).replace("\\\n", " ").splitlines()
    return [re.sub(r"\s+# .*", "", line).strip() for line in lines]


def prose(page: str) -> str:
    """Return a page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", text(page), flags=re.MULTILINE | re.DOTALL)


def spans(page: str) -> list[str]:
    """Return the commands within sentences and tables."""
    return re.findall(r"`((?:make|panjue) [^`\n]+)`", prose(page))


def called(tool: str) -> Iterator[str]:
    """Yield the words that the pages give to `make` or `panjue`."""
    for page in PAGES[:-1]:  # the changelog names commands that are gone
        for command in [*commands(text(page)), *spans(page)]:
            for one in re.split(r"&&|;", command):
                words = re.match(rf"\W*(?:\w+=\S+ )*(?:\.venv/bin/)?{tool} (?!…)(.+)", one.strip())
                if words:
                    yield words[1]


@pytest.mark.parametrize("given", sorted(set(called("panjue"))))
def test_panjue_takes_every_command(given: str) -> None:
    for mark, meaning in STANDS_FOR.items():
        given = given.replace(mark, meaning)
    words = shlex.split(given)
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    name, chosen, rest = group.resolve_command(group.make_context("panjue", [*words]), words)
    assert chosen is not None
    if rest:  # without words a page only names the command
        with suppress(Exit):  # of --help
            chosen.make_context(name, rest)


@pytest.mark.parametrize("given", sorted(set(called("make"))))
def test_make_takes_every_command(given: str, tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    words = shlex.split(given.replace("=…", "=x"))
    subprocess.run(["make", "-n", *words], cwd=tmp_path, check=True)
    assert {word.partition("=")[0] for word in words if "=" in word} <= {*VARIABLES}


@pytest.mark.parametrize("english", ENGLISH)
def test_both_languages_have_the_same_commands(english: str) -> None:
    chinese = english.replace(".md", ".zh.md")
    assert commands(text(english)) == commands(text(chinese))
    assert set(spans(english)) == set(spans(chinese))


def test_the_score_of_the_demo_has_the_digits_that_every_processor_gives() -> None:
    rows = r"^(?:charge_f1|article_f1|penalty_accuracy|final) +\d.*"
    english, chinese = (re.findall(rows, text(page), re.MULTILINE) for page in READMES[:2])
    assert len(english) == 4
    assert english == chinese
    assert {len(digits) for digits in re.findall(r"\.(\d+)", "".join(english))} == {2}


@pytest.mark.parametrize("page", [*PAGES, *TABLES])
def test_links_lead_somewhere(page: str) -> None:
    for place, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", prose(page)):
        file = (ROOT / page).parent / place if place else ROOT / page
        assert file.exists(), place
        if anchor:
            headings = re.findall(r"^## (.*)$", file.read_text("utf-8"), re.MULTILINE)
            plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
            assert anchor in [heading.replace(" ", "-") for heading in plain], (place, anchor)
    for config in re.findall(r"finetune/configs/[\w.-]+\.yaml", text(page)):
        assert (ROOT / config).exists() or "NAME" in config, config


@pytest.mark.parametrize("page", PAGES[:-1])  # the changelog names files that are gone
def test_files_that_a_page_names_exist(page: str) -> None:
    for name in re.findall(r"`((?:[\w.-]+/)+[\w.-]*|test_\w+\.py)`", text(page)):
        places = [ROOT / name, (ROOT / page).parent / name]
        is_pattern = name.partition("/")[0] in MADE or "NAME" in name
        # Links are not followed: that of .venv may lead out of the checkout.
        there = [Path(os.path.normpath(place)) for place in places if place.exists()]
        assert is_pattern or there, name
        assert all(place.is_relative_to(ROOT) for place in there), f"{name}: only we have it"


def test_pages_and_help_give_one_time_for_the_suite_and_its_machine() -> None:
    shown = re.findall(r"^make test +# the tests: (\d+) minutes (on .*)$", text("README.md"), re.M)
    [(minutes, machine)] = shown
    assert f": {minutes} minutes {machine}\n" in text("Makefile")
    page = text("tests/README.md")
    assert f"| time {machine} |\n" in page
    assert re.search(rf"^\| `make test` \|.*\| {minutes} minutes \|$", page, re.MULTILINE)
    assert re.search(rf"^make test +# .* {minutes} 分钟$", text("README.zh.md"), re.MULTILINE)


CHINESE = [*READMES[1::2], "prompts/DATA.zh.md", "prompts/OFFICIAL.zh.md"]


@pytest.mark.parametrize("chinese", CHINESE)
def test_both_languages_have_the_same_sections(chinese: str) -> None:
    pages = (chinese.replace(".zh.md", ".md"), chinese)
    english, other = (re.findall(r"^(#+) ", prose(page), re.MULTILINE) for page in pages)
    assert english == other


@pytest.mark.parametrize("chinese", CHINESE)
def test_a_chinese_page_says_once_that_commands_speak_english(chinese: str) -> None:
    assert text(chinese).count("命令的输出和帮助是英文") == 1
    assert "您" not in text(chinese), "the reader is 你 on every page"


def test_the_files_to_deploy_with() -> None:
    [unit] = blocks(text("serve/DEPLOY.md"), "ini")
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string(unit)
    assert parser["Service"]["ExecStart"].endswith("panjue serve runs/mine")
    # An engine that never came up ends like a wrong setting; at boot that may be for a minute only.
    assert parser["Service"]["Restart"] == "always"
    assert parser["Unit"]["StartLimitIntervalSec"] == "0"
    [block] = blocks(text("serve/DEPLOY.md"), "yaml")
    [service] = yaml.safe_load(block)["services"].values()
    assert "panjue serve runs/mine" in " ".join(service["command"])
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert service["shm_size"], "Docker's 64 MiB are too few for NCCL between two GPUs"
    training, generation = blocks(text("serve/DEPLOY.md"), "bash")
    for script in (training, generation):
        subprocess.run(["bash", "-n", "-c", script], check=True)
        assert '=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)' in script
    assert "accelerate launch --config_file finetune/configs/fsdp2.yaml" in training
    assert ".venv/bin/panjue sft finetune/configs/qwen3-32b-lora.yaml run=runs/mine" in training
    assert "ray symmetric-run --address $MAIN:6379 --min-nodes $SLURM_NNODES --" in generation
    assert "panjue generate runs/mine test.jsonl ray=auto replicas=" in generation
