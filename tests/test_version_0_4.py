"""A run that version 0.4 made (commit bc9a267, invented cases) is used by the code of today.

`version_0_4/` has a tiny base, a training, and two folders of answers: `test`, which the classifier
answered, and `model`. Only a path in it was shortened.
"""

import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from panjue.prompts.plumbing.files import read_json, sha256
from panjue.prompts.plumbing.records import Choice, if_any
from tests.served import PanjueServe

Panjue = Callable[..., CompletedProcess[str]]
OLD = Path(__file__).parent / "version_0_4"


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of what 0.4 left behind, which is the working directory now."""
    folder = shutil.copytree(OLD, tmp_path / "old")
    (folder / "demo").mkdir()
    (folder / "test.jsonl").rename(folder / "demo/test.jsonl")
    monkeypatch.chdir(folder)
    return folder


def done(panjue: Panjue, *words: object) -> str:
    result = panjue(*words)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("name", ["test", "model"])
def test_its_answers_are_decoded_to_the_same_submission(
    old: Path, panjue: Panjue, name: str
) -> None:
    folder = old / "run/answers" / name
    before = sha256(folder / "submission.jsonl")
    done(panjue, "decode", folder)
    assert sha256(folder / "submission.jsonl") == before
    assert read_json(folder / "decode.json")["by_field"] == dict.fromkeys(
        ("charges", "articles", "penalty"), "model" if name == "model" else "classifier"
    )
    done(panjue, "check", folder, "--cases", "demo/test.jsonl")


def test_its_answers_are_scored_as_before_and_reported(old: Path, panjue: Panjue) -> None:
    before = read_json(old / "run/answers/model/scores.json")
    done(panjue, "score", "demo/test.jsonl", "run/answers/model", "--json", "scores.json")
    after = read_json(old / "scores.json")
    same = ("final", "charge_f1", "article_f1", "penalty_accuracy", "examples", "interval")
    assert {name: after[name] for name in same} == {name: before[name] for name in same}
    assert after["baselines"].keys() == before["baselines"].keys()
    done(panjue, "report", "run/answers/model")
    done(panjue, "explain", "run/answers/model", "0")
    two = panjue("score", "demo/test.jsonl", "run")
    assert two.returncode == 2
    assert "run: has several answers; say which: run/answers/model, run/answers/test" in two.stderr


def test_its_answers_are_bundled(old: Path, panjue: Panjue) -> None:
    done(panjue, "bundle", "run/answers/test", "out.zip")
    with zipfile.ZipFile("out.zip") as archive:
        assert "answer: classifier" in archive.read("config.yaml").decode()


def test_it_answers_again(old: Path, panjue: Panjue) -> None:
    """The same file again; then, with the model asked anew, another folder."""
    pytest.importorskip("vllm")
    before = sha256(old / "run/answers/model/submission.jsonl")
    words = ("generate", "run", "demo/test.jsonl", "answer=model")
    said = done(panjue, *words, "answers=model")
    assert "all 8 are answered already" in said
    assert sha256(old / "run/answers/model/submission.jsonl") == before
    done(panjue, *words, "answers=again")
    assert (old / "run/answers/again/submission.jsonl").exists()


@pytest.mark.endurance
def test_it_is_served(old: Path, without_proxies: None) -> None:
    server = PanjueServe(old / "run")
    try:
        server.ready()
        with server.client() as client:
            case: dict[str, Any] = {"fact": "被告人甲某盗窃手机一部。", "defendants": ["甲某"]}
            answer = client.post("/v1/judgments", json=case)
        assert answer.status_code == 200
        assert [one["name"] for one in answer.json()["judgments"]] == ["甲某"]
    finally:
        server.end()


def test_a_choice_of_0_4_is_not_read_as_one_of_today(old: Path) -> None:
    [folder] = old.glob("run/answers/held-out-*")
    assert not (folder.parent / "held-out").exists()
    assert os.listdir(folder)
    with pytest.raises(Exception, match=r"choice\.json: .*; delete it"):
        if_any(Choice, folder / "choice.json")
