"""Clients that nobody here wrote, against the running server; and the README's curl."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import openai
import pytest

from panjue.prompts.plumbing.files import sha256
from panjue.prompts.reader import Reader
from panjue.prompts.task import closed_object, load_task
from panjue.prompts.tasks.judgment.demo import write_demo
from panjue.serve.middleware import PAGE
from tests.served import KEY

HERE = Path(__file__).parent

SAY = [{"role": "user", "content": "你好"}]
VERDICT = closed_object({"guilty": {"enum": ["yes", "no"]}})
FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "v", "schema": VERDICT, "strict": True},
}


def test_openais_client(server: Any) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY)
    assert [model.id for model in client.models.list()] == ["panjue"]
    assert client.models.retrieve("panjue").id == "panjue"
    asked: Any = {"model": "panjue", "messages": SAY, "temperature": 0, "tools": []}
    whole = client.chat.completions.create(**asked, max_completion_tokens=8)
    pieces = client.chat.completions.create(**asked, max_tokens=8, stream=True)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == whole.choices[0].message.content
    judged = client.chat.completions.create(**asked, response_format=FORMAT)
    assert json.loads(judged.choices[0].message.content or "").keys() == {"guilty"}
    told = client.completions.create(model="panjue", prompt="你好", max_tokens=8, temperature=0)
    assert told.usage
    assert 0 < told.usage.completion_tokens <= 8
    response = client.responses.create(model="panjue", input="你好", temperature=0)
    assert response.usage
    assert response.usage.output_tokens > 0
    events = client.responses.create(model="panjue", input="你好", stream=True)
    kinds = [event.type for event in events]
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="another").models.list()
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**{**asked, "model": "another"})


def python_with(lock: Path) -> Path:
    """Return a Python that has what is locked there; it is made once."""
    folder = Path("build").absolute() / f"{lock.stem}-{sha256(lock)[:12]}"
    python = folder / "bin/python"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([".ci/uv", "venv", "--quiet", str(folder)], check=True)
        words = [".ci/uv", "pip", "install", "--quiet", "--python", str(python), "-r", str(lock)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"the clients cannot be installed here: {done.stderr[-300:]}")
        (folder / "complete").touch()
    return python


RARE = ("litellm", "llm", "inspect")
CLIENTS = ["langchain", *(pytest.param(name, marks=pytest.mark.endurance) for name in RARE)]


@pytest.mark.parametrize("name", CLIENTS)
def test_other_clients(name: str, server: Any, tmp_path: Path) -> None:
    python = python_with(HERE / ("litellm.lock" if name == "litellm" else "clients.lock"))
    words = [str(python), str(HERE / "clients.py"), name, f"{server.url}/v1", KEY, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith(f"{name} works\n")


README_FILES = ("serve/README.md", "serve/README.zh.md")
SAMPLE = json.loads((PAGE / "sample.json").read_text("utf-8"))


def test_the_example_is_a_test_case_of_the_demo_with_its_answer(tmp_path: Path) -> None:
    write_demo(tmp_path, {"test": 200})
    task = load_task("judgment")
    [example] = [e for e in Reader(task).read(tmp_path / "test.jsonl") if e.text == SAMPLE["fact"]]
    assert SAMPLE["defendants"] == list(example.names)
    judgments = json.dumps(task.gold(example)["judgments"], ensure_ascii=False)
    for readme in README_FILES:
        text = (HERE.parents[1] / readme).read_text("utf-8")
        assert f"-d '{json.dumps(SAMPLE, ensure_ascii=False)}'" in text
        assert f'"judgments": {judgments}, …' in text


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
@pytest.mark.parametrize("readme", README_FILES)
def test_the_readmes_curl(server: Any, readme: str) -> None:
    text = (HERE.parents[1] / readme).read_text("utf-8")
    command = text[text.index("curl -s") :].partition("\n```")[0]
    asked = f"{command} -H 'Authorization: Bearer {KEY}'"
    asked = asked.replace("http://127.0.0.1:8000", server.url)
    whole = subprocess.run(asked, shell=True, capture_output=True, check=True).stdout
    judged = [judgment["name"] for judgment in json.loads(whole)["judgments"]]
    assert judged == SAMPLE["defendants"]
