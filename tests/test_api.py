"""`import panjue`: what it gives, and that importing it does nothing else."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

import panjue
from panjue.prompts.labels import load_labels
from panjue.prompts.plumbing.files import generation
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task

ROOT = Path(__file__).parents[1]
IMPORTED = """
import logging, os, sys, warnings
before = set(sys.modules), dict(os.environ), [*warnings.filters], [*logging.root.handlers]
import panjue
assert (dict(os.environ), [*warnings.filters], [*logging.root.handlers]) == before[1:]
print(*{name.partition(".")[0] for name in set(sys.modules) - before[0]})
"""


def test_importing_it_imports_and_changes_nothing_else() -> None:
    words = [sys.executable, "-c", IMPORTED]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "panjue" in done.stdout.split()
    assert not set(done.stdout.split()) - {"panjue"} - sys.stdlib_module_names


def test_the_version_is_that_of_the_package() -> None:
    assert panjue.__version__ == version("panjue")


def test_every_public_name_is_documented_and_typed() -> None:
    readmes = [(ROOT / f"api/README{kind}.md").read_text("utf-8") for kind in ("", ".zh")]
    functions = {name for name in panjue.__all__ if callable(getattr(panjue, name))}
    for name in functions - {"UserError"}:
        function = getattr(panjue, name)
        assert function.__doc__
        assert "return" in function.__annotations__
        assert all(f"\n| `{name}(" in readme for readme in readmes)


def test_cases_are_read_and_replies_decoded_as_the_commands_do(answered: Path) -> None:
    folder, task = answered / "answers/test", load_task("judgment")
    test, labels = generation(folder)["test"], folder / "labels.json"
    cases = list(panjue.read_cases(test))
    assert cases == list(Reader(task).read(Path(test)))
    assert cases == list(panjue.read_cases(Path(test), panjue.load_task("judgment")))
    reply = '```{"judgments": []}'
    decoded = panjue.decode(reply, cases[0], str(labels))
    assert decoded == task.ask.decode(reply, cases[0], load_labels(labels))
    assert decoded == panjue.decode(reply, cases[0], load_labels(labels), task)
    with pytest.raises(panjue.UserError, match="did you mean 'judgment'"):
        panjue.load_task("judgement")


def test_the_score_is_what_the_command_writes(
    answered: Path, workshop: Path, tmp_path: Path, panjue: Callable[..., CompletedProcess[str]]
) -> None:
    from panjue import score

    gold, out = workshop / "demo/test.jsonl", tmp_path / "scores.json"
    assert panjue("score", gold, answered, "--json", out).returncode == 0
    written = json.loads(out.read_text("utf-8"))
    assert json.loads(json.dumps(score(str(gold), str(answered)))) == written


@pytest.fixture
def judge(
    trained: Path, tmp_path: Path, small: dict[str, Any], llm: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """Return the judge of the tiny trained model, on the engine that runs already."""

    @contextmanager
    def running(*_: object) -> Iterator[Any]:
        yield llm

    monkeypatch.setattr("panjue.serve.local.engine", running)
    with panjue.load(tmp_path, {**small, "trained": trained / "adapter"}) as started:
        yield started
    with pytest.raises(panjue.UserError, match="the engine has stopped; call judge within the"):
        started.judge("被告人甲")


def test_a_judgment_is_the_reply_over_http(judge: Any, workshop: Path) -> None:
    case = next(panjue.read_cases(workshop / "demo/test.jsonl"))
    result = judge.judge(case.text, list(case.names))
    assert [one["name"] for one in result["judgments"]] == result["defendants"] == [*case.names]
    assert result["finish"] == "stop"
    assert judge.judge(case.text)["defendants"] == [*case.names], "found in the facts"
    assert len(judge.judge(case.text, samples=2)["confidence"]) == len(case.names)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("天气很好。",), "'fact' names no defendant after 被告人; list them in 'defendants'"),
        (("天气很好。", []), "defendants"),
        ((1, ["甲"]), "fact: Input should be a valid string"),
    ],
)
def test_a_case_that_cannot_be_asked_is_a_user_error(
    judge: Any, words: tuple[Any, ...], complaint: str
) -> None:
    with pytest.raises(panjue.UserError, match=complaint):
        judge.judge(*words)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"adaptor": "lora"}, "no setting 'adaptor'; did you mean 'adapter'?"),
        ({"engine": {"dtyp": "float32"}}, "engine: no setting 'dtyp'; did you mean 'dtype'?"),
        ({}, "nothing trained is there; run `panjue sft` first"),
    ],
)
def test_a_wrong_setting_is_a_user_error(
    settings: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(panjue.UserError, match=re.escape(complaint)):
        panjue.load(tmp_path, settings).__enter__()
    assert not any(tmp_path.iterdir())


def example(readme: str) -> str:
    [block] = re.findall(r"^```python\n(.*?)^```", (ROOT / readme).read_text("utf-8"), re.M | re.S)
    return str(block)


def test_the_example_of_the_readme(checkout: Path) -> None:
    texts = [example(f"api/README{kind}.md") for kind in ("", ".zh")]
    codes = [[line.partition("  #")[0] for line in text.splitlines()] for text in texts]
    assert codes[0] == codes[1]
    (checkout / "example.py").write_text(texts[0], "utf-8")
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert re.search(r"^final 0\.\d{4}, 24 cases, panjue [\d.]+$", done.stdout, re.MULTILINE)
    debug = (checkout / "runs/demo/debug.log").read_text("utf-8")
    assert re.search(r"^\d{4}-\d\d-\d\d .*Warning", debug, re.MULTILINE)
