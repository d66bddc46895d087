import json
from hashlib import sha256
from pathlib import Path

import pytest

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.prompts.tasks.judgment.demo import write_demo


def test_invented_cases_are_many_different_and_always_the_same(tmp_path: Path) -> None:
    write_demo(tmp_path, {"train": 400, "base": 300})
    written = (tmp_path / "train.jsonl").read_bytes() + (tmp_path / "base.jsonl").read_bytes()
    assert sha256(written).hexdigest()[:16] == "ffa4f7881e45a70d"
    facts = [json.loads(line)["fact"] for line in written.splitlines()]
    assert len(set(facts)) == 700
    task = load_task("judgment")
    counts = task.ask.labels(Reader(task).read(tmp_path / "train.jsonl")).counts
    assert len(counts["charges"]) >= 12
    assert len(counts["penalty"]) >= 5


def test_nobodys_own_cases_are_written_over(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text("own", "utf-8")
    with pytest.raises(UserError, match=r"test.jsonl: exists already; choose another folder$"):
        write_demo(tmp_path, {"train": 4, "test": 2})
    assert (tmp_path / "test.jsonl").read_text("utf-8") == "own"
    assert not (tmp_path / "train.jsonl").exists()
