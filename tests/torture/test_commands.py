"""Every command of the READMEs runs as it is printed, in a copy of the project.

Words that stand for something of the user's (`RUN`, `TRAIN=…`) are replaced, sizes are small, and
the configs are those of these tests; everything else is verbatim. A new command fails here until
it is said what its words stand for. The suite holds every command to what `make` and `panjue`
take, without running it.
"""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer import Exit
from typer.core import TyperGroup
from typer.main import get_command

from panjue.prompts.cli import app

ROOT = Path(__file__).parents[2]
TASKS = ROOT / "prompts/tasks"
READMES = ("README.md", "README.zh.md")
"""Of the project and of each of its folders."""
LONGEST_S = 600
SAMPLE = "serve/page/sample.txt"
FACT = (ROOT / SAMPLE).read_text("utf-8")


def sections(readme: str) -> list[tuple[str, str]]:
    """Return (heading, text) of every section."""
    parts = re.split(r"^## (.*)\n", whole(readme), flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def whole(readme: str) -> str:
    """Return the pages of one language, one after the other."""
    folders = (".", "finetune", "serve", "eval", "prompts")
    return "\n".join((ROOT / folder / readme).read_text("utf-8") for folder in folders)


def commands(text: str) -> list[str]:
    """Return the commands of all `sh` blocks, without remarks, continued lines joined."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [re.sub(r"\s+# .*", "", line).strip() for line in lines]


def spans(text: str) -> set[str]:
    """Return the commands that stand within sentences and tables."""
    plain = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    starts = r"(?:PANJUE_\w+=\S+ )?(?:make|panjue|pip|python|\.|\.venv/bin/\w+) \S"
    return {one for one in re.findall(r"`([^`\n]+)`", plain) if re.match(starts, one)}


BLOCKS = {heading: lines for heading, text in sections("README.md") if (lines := commands(text))}
DEMO_SECTION = "See it work"
VLLM = (
    "VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_NUM_OF_RESERVED_CPU=0 "
    "python -m vllm.entrypoints.openai.api_server --model tiny --served-model-name MODEL "
    "--port 8001 --host 127.0.0.1 --dtype float32 "
    "--enforce-eager --max-model-len 4096 --max-num-seqs 16"
)
"""Some server that is not ours, for what asks one."""

RUN = {"RUN=runs/qwen3-8b-lora": "RUN=runs/qwen2.5-0.5b-cpu", "test_a": "train_single"}
"""The run of the block's first command without a GPU, and a file for the second."""

MODEL = {"MODEL=…": "MODEL=tiny", "TRAIN=…": "TRAIN=train.jsonl", "TEST=…": "TEST=test.jsonl"}
WORDS: dict[str, dict[str, str]] = {
    "See it work": {},
    "Your own cases, a real model": {**MODEL, **RUN},
    "Settings": MODEL,
    "Several GPUs": {
        "make sft GPUS=8 MODEL": "make sft GPUS=2 CONFIG=demo RUN=runs/two MODEL",
        "make sft GPUS=8 ACCELERATE": "make -n sft GPUS=8 ACCELERATE",  # CPUs cannot shard
        **MODEL,
    },
    "Deciding, not echoing": MODEL,
    "Reading and cloze": MODEL,
    "Fair to whom": {
        **MODEL,
        "GOLD RUN": "test.jsonl runs/s",
        "make sft": "make sft CONFIG=demo RUN=runs/dro",
    },
    "Long dialogues": MODEL,
    "Look at it, hand it in": {
        "RUN_A": "runs/demo",
        "RUN_B": "runs/again",
        "RUN": "runs/demo",
        "TEST": "data/demo/test.jsonl",
    },
    "Ask it": {},
    "Many GPUs, many machines": {
        ".ci/install python3 ray": "ls .ci/install",
        "panjue merge runs/mine": "panjue merge runs/demo",
        "ray start --head": "ray start --head --num-cpus=2 && .venv/bin/ray stop",
        "ray start --address=FIRST:6379": "ray --version",  # there is one machine here
        "make generate RUN=runs/mine": "make -n generate CONFIG=demo RUN=runs/mine",
    },
    "Export": {
        "panjue merge runs/mine": "panjue merge runs/demo",
        ".venv/bin/pip download": "true #",  # 77 MB
        "tar": "true #",
        # Of tokenizers, llama.cpp's converter takes known ones only: not the demo's.
        ".venv/bin/python llama_cpp": "ls runs/demo/merged/Modelfile #",
        "cd runs/mine/merged && ollama create panjue -f Modelfile": "ls runs/demo/merged/Modelfile",
        "make score RUN=runs/mine": "make -n score RUN=runs/demo",
    },
}
"""Heading -> what the words of its blocks stand for."""

GO_ON = {DEMO_SECTION, "Look at it, hand it in", "Ask it", "Many GPUs, many machines", "Export"}
"""The sections whose commands need the demo's finished run."""

OPTIONS = {"[key=value …]": "", "[--": "--", "]": ""}
DEMO = {
    "GOLD": "data/demo/test.jsonl",
    "SUBMISSION": "runs/demo",
    "RUN": "runs/demo",
    "NAME": "judgment",
    "OTHER": "runs/demo/answers/test/submission.jsonl",
    "CASES": "data/demo/test.jsonl",
    "ATTRIBUTES": "defendants",
    "--groups FILE": "--groups groups.jsonl",
    "--json FILE": "--json numbers.json",
    "--html FILE": "--html page.html",
    "--labels FILE": "--labels runs/demo/answers/test/labels.json",
    "FOLDER": "small",
    **OPTIONS,
}
SPANS: dict[str, tuple[str, dict[str, str]]] = {
    "make sft generate check-submission MODEL=… TRAIN=… TEST=…": (
        "Your own cases, a real model",
        {"MODEL=… TRAIN=… TEST=…": "MODEL=Qwen/Qwen3-8B TRAIN=train.jsonl TEST=test.jsonl"},
    ),
    ". .venv/bin/activate": ("See it work", {"activate": "activate && panjue --help"}),
    "panjue demo FOLDER": ("See it work", DEMO),
    "panjue convert FILE OUT [--task NAME]": (
        "See it work",
        {"FILE": "cail.jsonl", "OUT": "converted.jsonl", "NAME": "judgment", **OPTIONS},
    ),
    "panjue convert FILE OUT": (
        "See it work",
        {"FILE": "cail.jsonl", "OUT": "other.jsonl"},
    ),
    "panjue check FILE [--task NAME]": (
        "See it work",
        {"FILE": "data/demo/test.jsonl", "NAME": "judgment", **OPTIONS},
    ),
    "panjue check FILE": ("See it work", {"FILE": "data/demo/test.jsonl"}),
    "panjue base CONFIG": ("See it work", {"CONFIG": "finetune/configs/base.yaml"}),
    "panjue sft CONFIG [key=value …]": (
        "See it work",
        {"CONFIG": "finetune/configs/demo.yaml", **OPTIONS},
    ),
    "panjue merge RUN": ("See it work", DEMO),
    "panjue generate CONFIG [key=value …]": (
        "See it work",
        {"CONFIG": "serve/configs/demo.yaml", "[key=value …]": "test=data/demo/test.jsonl"},
    ),
    "panjue decode RUN [--greedy]": ("See it work", DEMO),
    "panjue decode RUN --greedy": ("See it work", DEMO),
    "panjue decode --greedy": ("See it work", {"--greedy": "runs/demo --greedy"}),
    "panjue tune RUN": ("Deciding, not echoing", {"RUN": "runs/qwen2.5-0.5b-cpu-tiny-train/tune"}),
    "panjue score GOLD SUBMISSION [--task NAME] [--against OTHER] [--json FILE]": (
        "See it work",
        DEMO,
    ),
    "panjue fairness GOLD SUBMISSION --by ATTRIBUTES [--task NAME] [--groups FILE] [--json FILE] "
    "[--html FILE]": ("See it work", DEMO),
    "panjue check SUBMISSION --cases CASES [--task NAME] [--labels FILE]": ("See it work", DEMO),
    "panjue serve CONFIG [key=value …]": (
        "See it work",
        {"CONFIG": "serve/configs/demo.yaml", **OPTIONS},
    ),
    "panjue chat [--url URL] [--file CASE] [--json]": (
        "Ask it",
        {"URL": "http://127.0.0.1:8000", "CASE": "case.txt", **OPTIONS},
    ),
    "make -n sft …": ("See it work", {"…": "MODEL=tiny TRAIN=train.jsonl"}),
    "panjue score IN.json RUN --task reading --out-of-domain OUT.json OTHER_RUN": (
        "Reading and cloze",
        {
            "IN.json": "dev.json",
            "OUT.json": "dev.json",
            "OTHER_RUN": "runs/qwen2.5-0.5b-cpu-reading-tiny-train",
            " RUN": " runs/qwen2.5-0.5b-cpu-reading-tiny-train",
        },
    ),
    "panjue generate CONFIG run=RUN adapter=none answers=base test=…": (
        "Reading and cloze",
        {
            "CONFIG": "serve/configs/demo.yaml task=reading",
            "RUN": "runs/qwen2.5-0.5b-cpu-reading-tiny-train",
            "test=…": "test=dev.json",
        },
    ),
    'PANJUE_API_KEY=… make serve SERVE="host=0.0.0.0"': ("See it work", {"=…": "=secret"}),
    "panjue chat --url … --labels RUN/adapter/labels.json": (
        "Long dialogues",  # where there is a server that is not ours
        {"…": "http://127.0.0.1:8001", "RUN/adapter": "."},
    ),
    "python answer.py TEST OUT": (
        "Look at it, hand it in",
        {
            " OUT": " ../answers",
            "TEST": "../data/demo/test.jsonl",
            "python": "python -m zipfile -e OUT.zip out; cd out; python",
        },
    ),
    'pip install "sentence-transformers>=5"': (
        "See it work",
        {"install": "install --dry-run --no-deps"},
    ),
    "make … ON_BAD_ROW=skip": ("See it work", {"…": "check-submission"}),
    "make install PYTHON=python3.12": ("See it work", {}),
    "make lock": ("See it work", {"lock": "-n lock"}),
    "make dev": ("See it work", {"dev": "-n dev"}),
    ".venv/bin/pip install modelscope": (
        "See it work",
        {"install": "install --dry-run --no-deps"},
    ),
}
"""Command within a sentence -> the section behind whose commands it runs, and what its words
stand for."""

NAMES = re.compile(r"(?:make|panjue) (?:[a-z-]+|…)")
"""What only names a command."""


def test_both_languages_have_the_same_commands() -> None:
    english, chinese = ([commands(text) for _, text in sections(readme)] for readme in READMES)
    assert english == chinese
    ours, theirs = (spans(whole(readme)) for readme in READMES)
    assert ours == theirs


def test_every_command_is_known_here() -> None:
    assert set(BLOCKS) == set(WORDS)
    found = spans(whole("README.md"))
    known = {word for lines in BLOCKS.values() for line in lines for word in words_of(line)}
    known |= {word for span in SPANS for word in words_of(span)}
    for span in found - set(SPANS):
        assert NAMES.fullmatch(span), span
        assert span in known | {"make …"}, span
    assert set(SPANS) <= found


def words_of(command: str) -> Iterator[str]:
    """Yield the targets and subcommands that a command calls."""
    if called := re.search(r"\b(make|panjue) ([a-z][a-z -]*)", command):
        yield from (f"{called[1]} {name}" for name in called[2].split())


def replaced(command: str, words: Mapping[str, str]) -> str:
    for word, meaning in words.items():
        command = command.replace(word, meaning)
    return command


def meant() -> Iterator[str]:
    """Yield every command of the README as it is run."""
    for heading, lines in BLOCKS.items():
        yield from (replaced(line, WORDS[heading]) for line in lines)
    yield from (replaced(span, words) for span, (_, words) in SPANS.items())


@pytest.mark.parametrize("command", [c for c in meant() if re.search(r"\b(make|panjue) ", c)])
def test_make_and_panjue_take_every_command(command: str) -> None:
    words = shlex.split(command.partition("&& ")[2] or command)
    tool = next(n for n, word in enumerate(words) if Path(word).name in ("make", "panjue"))
    given = words[tool + 1 :]
    if words[tool] == "make":
        # Where nothing is trained yet, `RUN=` needs a word that says what to train.
        needed = ["CONFIG=demo"] if any(word.startswith("RUN=") for word in given) else []
        dry = ["make", "-n", *given, *needed]
        done = subprocess.run(
            dry, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    with suppress(Exit):  # of --help
        parsed = group.make_context("panjue", [*given])
        name, chosen, rest = group.resolve_command(parsed, given)
        assert chosen is not None
        chosen.make_context(name, rest)


class House:
    """A copy of the project in which commands run."""

    def __init__(self, place: Path, workshop: Path) -> None:
        if not (Path(sys.prefix) / "installed").exists():
            pytest.skip("not installed by `make install`")
        self.place = place
        shutil.copytree(ROOT / ".ci", place / ".ci")
        for name in ("Makefile", "pyproject.toml"):
            shutil.copy(ROOT / name, place)
        for made in (*place.iterdir(), *(place / ".ci").iterdir()):
            os.utime(made, (0, 0))  # older than what is installed: nothing to do
        (place / ".venv").symlink_to(sys.prefix)
        for room in ("finetune", "serve"):
            shutil.copytree(ROOT / room / "configs", place / room / "configs")
        serve = place / "serve/configs/qwen2.5-0.5b-cpu.yaml"
        eager = "engine:\n  enforce_eager: true\n"  # compiling takes longer than these few replies
        serve.write_text(serve.read_text("utf-8").replace("engine:\n", eager), "utf-8")
        for name, source in (("base", "base"), ("demo", "sft")):
            text = (workshop / f"{source}.yaml").read_text("utf-8")
            for there, here in (("demo", "data/demo"), ("base", "runs/base"), ("run", "runs/demo")):
                text = text.replace(f"{workshop}/{there}", here)
            (place / f"finetune/configs/{name}.yaml").write_text(text, "utf-8")
        (place / "Qwen").mkdir()
        for name in ("tiny", "Qwen/Qwen3-8B"):
            (place / name).symlink_to(workshop / "base/model")
        for name, source in (("train", "train"), ("train_single", "base"), ("test", "test")):
            lines = (workshop / f"demo/{source}.jsonl").read_text("utf-8").splitlines(True)
            (place / f"{name}.jsonl").write_text("".join(lines[:40]), "utf-8")
        (place / SAMPLE).parent.mkdir()
        for file in (SAMPLE, "case.txt"):
            (place / file).write_text(FACT, "utf-8")
        shutil.copy(place / "tiny/labels.json", place)
        term = {"death_penalty": False, "life_imprisonment": False, "imprisonment": 7}
        one = {"criminals": ["张某甲"], "accusation": ["盗窃"], "relevant_articles": [264]}
        write_lines(
            place / "cail.jsonl", [{"fact": FACT, "meta": {**one, "term_of_imprisonment": term}}]
        )
        groups = [{"id": n, "court": "AB"[n % 2]} for n in range(200)]
        write_lines(place / "groups.jsonl", groups)

    def run(self, command: str, **more: str) -> str:
        """Run one command as a user's shell does."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.place,
            env=environment(**more),
            input=FACT,
            capture_output=True,
            text=True,
            check=False,
            timeout=LONGEST_S,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout


def environment(**more: str) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    # A GPU is not for these tests, whatever machine they run on.
    return {**os.environ, "PATH": path, "MAKEFLAGS": "GPU=", "CUDA_VISIBLE_DEVICES": "", **more}


def write_lines(place: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    place.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), "utf-8")


def many(task: str, place: Path, times: int = 12) -> None:
    """Write a task's sample so many times over, each time with other texts and ids."""
    sample = (TASKS / task / "sample.jsonl").read_text("utf-8")
    rows = [json.loads(line) for line in sample.splitlines()]
    key, text = ("qid", "query") if "qid" in rows[0] else ("id", "fact")
    made = [
        {**row, key: f"{row[key]}-{n}", text: f"{row[text]} ({n})"}
        for n in range(times)
        for row in rows
    ]
    write_lines(place, made)


def many_documents(place: Path, times: int = 12) -> None:
    sample, made = (TASKS / "reading/sample.json").read_text("utf-8"), []
    for n in range(times):
        for document in json.loads(sample)["data"]:
            for paragraph in document["paragraphs"]:
                paragraph["context"] += f"({n})"
                for question in paragraph["qas"]:
                    question["id"] += f"-{n}"
            made.append(document)
    place.write_text(json.dumps({"data": made}, ensure_ascii=False), "utf-8")


def many_dialogues(place: Path, times: int) -> None:
    """Write the first sentences of a sample so many times over."""
    chat, emo = (
        json.loads((TASKS / f"dialogue/sample.folder/{name}/{name}_1.json").read_text("utf-8"))
        for name in ("chat", "emo")
    )
    for n in range(times):
        some = [{**one, "sentence": f"{one['sentence']}({n})"} for one in chat[:2]]
        for name, content in (("chat", some), ("emo", emo)):
            (place / name).mkdir(parents=True, exist_ok=True)
            text = json.dumps(content, ensure_ascii=False)
            (place / name / f"{name}_{n}.json").write_text(text, "utf-8")


def furnish(house: House, heading: str) -> None:
    """Put there what a section takes for granted."""
    place = house.place
    if heading == "Reading and cloze":
        for name in ("train", "dev"):
            many_documents(place / f"{name}.json")
            many("cloze", place / f"{name}.jsonl")
    if heading == "Fair to whom":
        for name in ("train", "test"):
            many("severity", place / f"{name}.jsonl", 20)
        house.run("make base")
        task = "task=severity run=runs/s"
        house.run(f"panjue sft finetune/configs/demo.yaml {task} train=train.jsonl model=tiny")
        house.run(f"panjue generate serve/configs/demo.yaml {task} test=test.jsonl")
    if heading == "Long dialogues":
        many_dialogues(place / "train", 16)
        many_dialogues(place / "test", 1)
    if heading == "Look at it, hand it in":
        shutil.copytree(place / "runs/demo", place / "runs/again")


@contextmanager
def serving(house: House, command: str, url: str) -> Iterator[None]:
    """Run a command that serves until the block ends; enter when it can answer."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", int(re.findall(r":(\d+)/", url)[0]))) == 0:
            pytest.fail(f"something else answers at {url}: end it first")
    log = house.place / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=house.place,
            env=environment(),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        until_answered(url, process, log)
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def until_answered(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(LONGEST_S):
        assert process.poll() is None, log.read_text("utf-8")[-3000:]
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(1)
    pytest.fail(f"{url}: nothing answers")


def follow(house: House, lines: Iterable[str]) -> None:
    """Run commands in order; what serves is served until the end, or the next that does."""
    with ExitStack() as served:
        for line in lines:
            if "#MODEL" in line:
                served.enter_context(serving(house, VLLM, "http://127.0.0.1:8001/health"))
            if re.search(r"\b(?:make|panjue) serve\b", line):
                served.close()
                served.enter_context(serving(house, line, "http://127.0.0.1:8000/readyz"))
            else:
                house.run(line)


@pytest.fixture(scope="module")
def demo(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> House:
    """Return the house in which the first section's commands have run: it has a finished run."""
    house = House(tmp_path_factory.mktemp("house"), workshop)
    follow(house, BLOCKS[DEMO_SECTION])
    return house


@pytest.mark.endurance
@pytest.mark.promise("every command of the README runs")
@pytest.mark.parametrize("heading", list(WORDS))
def test_a_section(
    heading: str, workshop: Path, tmp_path: Path, request: pytest.FixtureRequest, promise: Any
) -> None:
    if heading == "Ask it" and not shutil.which("curl"):
        pytest.skip("there is no curl here")
    goes_on = heading in GO_ON
    house = request.getfixturevalue("demo") if goes_on else House(tmp_path, workshop)
    furnish(house, heading)
    # The first section's own commands have run for all that go on with them.
    lines = [] if heading == DEMO_SECTION else BLOCKS[heading]
    inline = [replaced(span, words) for span, (where, words) in SPANS.items() if where == heading]
    commands = [*(replaced(line, WORDS[heading]) for line in lines), *inline]
    with promise.attempt():
        follow(house, commands)
        promise.tries += len(commands) - 1
