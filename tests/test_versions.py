"""Every record of a run has the version and the commit of panjue."""

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np

from panjue.prompts.model import CLASSIFIER
from panjue.prompts.plumbing.files import read_json
from panjue.prompts.plumbing.version import IN_BUNDLE, panjue_version

Panjue = Callable[..., CompletedProcess[str]]


def test_every_record_has_version_and_commit(
    trained: Path, workshop: Path, tmp_path: Path, panjue: Panjue
) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    answers = run / "answers/test"
    gold = workshop / "demo/test.jsonl"
    json_file = tmp_path / "numbers.json"
    packed = tmp_path / "out.zip"
    for words in (
        ("generate", run, gold, "answer=classifier", "answers=test"),
        ("score", gold, answers, "--json", json_file),
        ("report", answers),
        ("bundle", answers, packed),
        ("generate", run, gold, "answer=classifier", "answers=second"),
        ("vote", gold, tmp_path / "vote", answers, run / "answers/second"),
    ):
        done = panjue(*words)
        assert done.returncode == 0, done.stderr
    version = panjue_version()
    for folder in (run, run / "adapter", answers, tmp_path / "vote", workshop / "base/model"):
        assert read_json(folder / "manifest.json")["versions"]["panjue"] == version
    for file in (
        answers / "scores.json",
        answers / "decode.json",
        tmp_path / "vote/decode.json",
        json_file,
        workshop / "base/untrained/start.json",
    ):
        assert read_json(file)["panjue"] == version, file
    with np.load(run / "adapter" / CLASSIFIER) as arrays:
        assert json.loads(arrays["about"].tobytes())["panjue"] == version
    with zipfile.ZipFile(packed) as archive:
        assert json.loads(archive.read("expected.json"))["panjue"] == version
        assert archive.read(f"code/panjue/{IN_BUNDLE}").decode().strip() == version
    assert f"panjue {version}" in (run / "adapter/README.md").read_text("utf-8")
    page = (answers / "report.html").read_text("utf-8")
    assert page.count(version) >= 3, "of the training, the answers and the page"


def test_ray_compares_version_and_commit() -> None:
    from panjue.serve import ray  # imports vLLM

    assert ray.versions("judgment")["panjue"] == panjue_version()
