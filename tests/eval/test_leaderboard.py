"""The line of a run for the leaderboard."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from panjue.eval import leaderboard
from panjue.eval.answers import decode_run
from panjue.prompts.model import is_demo
from panjue.prompts.plumbing.files import read_json, write_json

Panjue = Callable[..., CompletedProcess[str]]
PREFIX = "for a leaderboard: "


@pytest.fixture
def scored(
    answered: Path, workshop: Path, tmp_path: Path, panjue: Panjue, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], str]:
    """Return what scores a copy of a finished run, as if its base were no demo."""
    monkeypatch.setattr(leaderboard, "is_demo", lambda _: False)
    shutil.copytree(answered, tmp_path / "run")
    gold, out = workshop / "demo/test.jsonl", tmp_path / "scores.json"

    def score() -> str:
        done = panjue("score", gold, tmp_path / "run", "--json", out)
        assert done.returncode == 0
        lines = [line for line in done.stdout.splitlines() if line.startswith(PREFIX)]
        return lines[0].removeprefix(PREFIX) if lines else ""

    return score


def test_the_line_has_the_scores(scored: Callable[[], str], tmp_path: Path) -> None:
    decode_run(tmp_path / "run", greedy=True)
    line = scored()
    scores = json.loads((tmp_path / "scores.json").read_text("utf-8"))
    low, high = scores["interval"]["final"]
    values = [f"{scores[name]:.3f}" for name in ("charge_f1", "article_f1", "penalty_accuracy")]
    final = f"{scores['final']:.3f} ({low:.3f} to {high:.3f})"
    assert line == f"| model, lora, greedy | 24 | {' | '.join(values)} | {final} |  |"


@pytest.mark.parametrize(
    ("decoding", "how"),
    [
        ({"decided": 24, "classifier": {"penalty": [1, 1]}}, "decided with the text classifier"),
        ({"decided": 24, "classifier": None}, "decided"),
    ],
)
def test_it_says_how_the_answers_were_decided(
    scored: Callable[[], str], tmp_path: Path, decoding: dict[str, object], how: str
) -> None:
    decode_run(tmp_path / "run", greedy=True)
    path = tmp_path / "run/answers/test/decode.json"
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **decoding}), "utf-8")
    assert scored().startswith(f"| model, lora, {how} | 24 |")


@pytest.mark.parametrize(
    ("changed", "has_line"),
    [({}, True), ({"endpoint": "http://x/v1#y"}, False), ({"trained": "gone/adapter"}, False)],
)
def test_only_what_a_known_training_answered_has_a_line(
    scored: Callable[[], str], tmp_path: Path, changed: dict[str, str], has_line: bool
) -> None:
    path = tmp_path / "run/answers/test/manifest.json"
    manifest = json.loads(path.read_text("utf-8"))
    manifest["generate"] |= changed
    path.write_text(json.dumps(manifest), "utf-8")
    if "trained" in changed:
        shutil.rmtree(tmp_path / "run/adapter")
    assert bool(scored()) == has_line


def test_scores_of_other_cases_or_in_sample_have_no_line(
    scored: Callable[[], str], tmp_path: Path
) -> None:
    answers, adapter = tmp_path / "run/answers/test", tmp_path / "run/adapter"
    path = answers / "submission.jsonl"
    rows = path.read_text("utf-8").splitlines(keepends=True)
    other = rows[-1].replace('"id": ', '"id": 10')
    for changed in (rows[:-1], [*rows, other]):
        path.write_text("".join(changed), "utf-8")
        assert not scored()
    path.write_text("".join(rows), "utf-8")
    assert scored()
    record = read_json(answers / "manifest.json")
    asked = {**record["generate"], "trained": str(adapter)}
    write_json(answers / "manifest.json", {**record, "generate": asked})
    training = read_json(adapter / "manifest.json")
    write_json(adapter / "manifest.json", {**training, "train_sha256": asked["test_sha256"]})
    assert not scored()


def test_neither_the_demo_nor_a_bare_submission_has_a_line(
    scored: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert scored()
    with monkeypatch.context() as patch:
        patch.setattr(leaderboard, "is_demo", is_demo)
        assert not scored()
    (tmp_path / "run/answers/test/decode.json").unlink()
    assert not scored()
