"""Bad rows: each kind has its outcome, and under `skip` the good ones around it are all read."""

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump
from panjue.prompts.plumbing.records import AnswersRecord
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.prompts.tasks.judgment.penalties import sentence

TASK = load_task("judgment")
OUTCOME = {
    "name": "甲",
    "penalty": sentence(imprisonment=12),
    "charges": ["盗窃罪"],
    "articles": ["264"],
}
ROW: dict[str, Any] = {"id": 1, "fact": "甲盗窃。", "defendants": ["甲"], "outcomes": [OUTCOME]}


def row(**changes: Any) -> bytes:
    return json.dumps({**ROW, **changes}, ensure_ascii=False).encode()


BAD: dict[str, tuple[bytes, str]] = {
    "an id that came before": (row(id=0), "id 0 is already used at 1"),
    "no facts": (b'{"id": 1, "defendants": ["\xe7\x94\xb2"]}', "'fact' must be"),
    "a NUL byte": (row().replace(b"\xe7", b"\x00", 1), "not"),
    "half a character": (row()[:30], "not"),
    "a lone surrogate": (row(fact="x").replace(b'"x"', rb'"\ud800"'), "a lone"),
    "another encoding": (row().decode().encode("gb18030"), "not UTF-8 at byte"),
    "no object": (b"[1, 2]", "expected a JSON object"),
    "half a row": (row()[:-20], "not JSON"),
    "deep nesting": (b'{"id":' + b"[" * 200_000, "not JSON"),
    "a number of 5,000 digits": (b'{"id": ' + b"9" * 5000 + b"}", "not JSON"),
}
ODD: dict[str, bytes] = {
    "a byte order mark": b"\xef\xbb\xbf" + row(),
    "CRLF": row() + b"\r",
    "a remark": b"// a remark\n" + row(),
    "a defendant not in the facts": row(defendants=["丁"], outcomes=[{**OUTCOME, "name": "丁"}]),
    "labels that training never saw": row(outcomes=[{**OUTCOME, "charges": ["新罪"]}]),
    "an escaped NUL": row(fact="甲\x00盗窃。"),
    "10 MB": row(fact="甲盗窃。" * 800_000),
    "no end of line": row(),
}


@pytest.mark.parametrize(("line", "reason"), BAD.values(), ids=BAD)
def test_a_bad_row_stops_or_is_listed(line: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_bytes(row(id=0) + b"\n" + line + b"\n" + row(id=2) + b"\n")
    with pytest.raises(UserError, match=reason) as error:
        list(Reader(TASK).read(path))
    reader = Reader(TASK, on_bad_row="skip")
    for _ in range(2):  # it is listed once
        assert [example.id for example in reader.read(path)] == [0, 2]
    reader.skipped.write(tmp_path / "skipped.jsonl")
    [listed] = map(json.loads, (tmp_path / "skipped.jsonl").read_text("utf-8").splitlines())
    assert (listed["file"], listed["place"]) == (str(path), 2)
    assert str(error.value) == f"{path}:2: {listed['reason']}"
    assert str(reader.skipped).startswith(f"bad rows skipped: 1; the first: {path}:2: ")


@pytest.mark.parametrize("line", ODD.values(), ids=ODD)
def test_an_odd_row_is_read(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_bytes(line)
    assert [example.id for example in Reader(TASK).read(path)] == [1]


ANSWERED = AnswersRecord(
    task="judgment", test="gold.jsonl", test_sha256="", prompt_sha256="", adapter="none",
    constrained=True, max_tokens=1, seed=0, engine={}, sampling={}, samples=0, on_bad_row="skip",
)  # fmt: skip
"""The record of answers to a file whose bad rows were skipped."""


def test_every_stage_stops_or_skips(
    workshop: Path, tmp_path: Path, panjue: Callable[..., CompletedProcess[str]]
) -> None:
    torn = b'{"id": "torn", "fact": "\xe7\x94'
    train = tmp_path / "train.jsonl"
    train.write_bytes((workshop / "demo/train.jsonl").read_bytes() + torn)
    gold = tmp_path / "gold.jsonl"
    gold.write_bytes((workshop / "demo/test.jsonl").read_bytes() + torn)
    submission = tmp_path / "submission.jsonl"
    with submission.open("w", encoding="utf-8") as out:
        for example in Reader(TASK).read(workshop / "demo/test.jsonl"):
            out.write(f"{dump(TASK.gold(example))}\n")
    short = ["trainer.max_steps=1", "trainer.save_strategy='no'", "trainer.eval_strategy='no'"]
    sft = ["sft", workshop / "sft.yaml", f"run={tmp_path}/run", f"train={train}", *short]
    for words, skip, place in (
        (sft, ["on_bad_row=skip"], f"{train}:121"),
        (["score", gold, submission], [], f"{gold}:25"),
        (["check", submission, "--cases", gold], [], f"{gold}:25"),
    ):
        (tmp_path / "manifest.json").unlink(missing_ok=True)
        stopped = panjue(*words)
        assert stopped.returncode == 2, stopped.stderr
        assert stopped.stderr.startswith(f"panjue: {place}: not UTF-8"), stopped.stderr
        ANSWERED.write(tmp_path)
        skipped = panjue(*words, *skip)
        assert skipped.returncode == 0, skipped.stderr
        assert f"bad rows skipped: 1; the first: {place}: " in skipped.stdout
    [listed] = (tmp_path / "run/skipped-train.jsonl").read_text("utf-8").splitlines()
    assert json.loads(listed)["place"] == 121
