"""A large file is worked on by several processes: nothing changes but the time."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from threading import Timer
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from panjue.eval import cores, means
from panjue.eval.answers import decode_run
from panjue.eval.cores import on_all_cores
from panjue.eval.score import score
from panjue.prompts import reader
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump
from panjue.prompts.plumbing.rows import Rows
from panjue.prompts.reader import Reader, Share
from panjue.prompts.task import load_task
from panjue.prompts.tasks.judgment.demo import write_demo

TASK = load_task("judgment")


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have three processes share even a small file, five rows at a time."""
    monkeypatch.setattr(cores, "LARGE", 1)
    monkeypatch.setattr(reader, "BLOCK", 5)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cases")
    write_demo(folder, {"train": 1, "test": 43, "base": 1})
    return folder / "test.jsonl"


@given(st.integers(1, 9), st.integers(1, 50))
def test_shares_are_the_file(cases: Path, of: int, block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "BLOCK", block)
        shares = [list(Reader(TASK).blocks(cases, Share(i, of))) for i in range(of)]
    found = []
    for turn in range(max(len(share) for share in shares)):
        found += [e.id for share in shares if turn < len(share) for e in share[turn]]
    assert found == [example.id for example in Reader(TASK).read(cases)]


def test_results_come_in_order_from_several_processes(several: None, cases: Path) -> None:
    def work(share: Share) -> Iterator[tuple[int, int]]:
        for number in range(share.number, 20, share.of):
            yield number, os.getpid()

    results = list(on_all_cores(work, Reader(TASK), cases))
    assert [number for number, _ in results] == list(range(20))
    assert len({process for _, process in results} - {os.getpid()}) == 3


def test_an_error_of_a_process_is_raised_in_its_turn(several: None, cases: Path) -> None:
    def work(share: Share) -> Iterator[int]:
        yield share.number
        if share.number == 1:
            raise UserError("line 7: is broken")
        yield share.number + 3

    found = []
    with pytest.raises(UserError, match="line 7: is broken"):
        found += list(on_all_cores(work, Reader(TASK), cases))
    assert found == []


@pytest.mark.parametrize("size", [0, 2**20])
def test_a_process_that_is_killed_ends_the_work(several: None, cases: Path, size: int) -> None:
    """Between two results, or in the middle of a large one."""

    def work(share: Share) -> Iterator[str]:
        yield "字"
        if share.number == 2:
            Timer(0.3, os.kill, [os.getpid(), signal.SIGKILL]).start()
            if size:
                yield "字" * size
            time.sleep(60)
        yield "字"

    results = on_all_cores(work, Reader(TASK), cases)
    next(results)
    time.sleep(1)
    with pytest.raises(UserError, match="one of 3 processes has ended"):
        list(results)


def test_a_bug_in_a_process_keeps_its_traceback(several: None, cases: Path) -> None:
    def work(share: Share) -> Iterator[int]:
        shares: dict[str, int] = {}
        yield shares[f"of share {share.number}"]

    with pytest.raises(RuntimeError, match=r"in work\n(.|\n)*KeyError: 'of share 0'"):
        list(on_all_cores(work, Reader(TASK), cases))


def test_no_process_outlives_one_that_is_killed(cases: Path) -> None:
    script = f"""
import os, time
from pathlib import Path
from panjue.eval import cores
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
cores.LARGE = 1
os.sched_getaffinity = lambda _: {{0, 1, 2}}
def work(share):
    print(os.getpid(), flush=True)
    while True:
        yield "x" * 2**20
results = cores.on_all_cores(work, Reader(load_task("judgment")), Path({str(cases)!r}))
next(results)
time.sleep(60)
"""
    words = [sys.executable, "-c", script]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        children = [psutil.Process(int(parent.stdout.readline())) for _ in range(3)]
        parent.kill()
    _gone, alive = psutil.wait_procs(children, timeout=10)
    assert [child for child in alive if child.status() != psutil.STATUS_ZOMBIE] == []


def test_processes_that_read_the_same_rows_do_not_disturb_each_other(
    several: None, cases: Path, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    texts = {str(i): f"案{i}" * (1 + 97 * i % 7000) for i in range(400)}
    path.write_text("".join(dump({"id": k, "text": v}) + "\n" for k, v in texts.items()), "utf-8")
    rows = Rows(path)

    def work(share: Share) -> Iterator[bool]:
        for _ in range(5):
            found = {key: rows.get(key) for key in texts}
            yield all(row and row["text"] == texts[key] for key, row in found.items())

    assert list(on_all_cores(work, Reader(TASK), cases)) == [True] * 15


def answers(folder: Path) -> dict[str, bytes]:
    names = ("submission.jsonl", "decode.json", "confidence.jsonl")
    return {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}


def test_submission_and_scores_are_those_of_one_process(
    answered: Path, tmp_path: Path, workshop: Path, request: pytest.FixtureRequest
) -> None:
    run = shutil.copytree(answered, tmp_path / "run") / "answers/test"
    gold = workshop / "demo/test.jsonl"
    decode_run(run)
    alone = answers(run)
    scores = score(Reader(TASK), gold, run).to_json()
    request.getfixturevalue("several")
    for name in alone:
        (run / name).unlink()
    decode_run(run)
    assert answers(run) == alone
    assert score(Reader(TASK), gold, run).to_json() == scores


def test_progress_is_told(
    several: None,
    answered: Path,
    workshop: Path,
    panjue: Callable[..., CompletedProcess[str]],
) -> None:
    done = panjue("score", workshop / "demo/test.jsonl", answered / "answers/test")
    assert done.returncode == 0, done.stderr
    assert "24/24  " in done.stdout


def test_bad_rows_are_found_by_all_processes(
    several: None,
    answered: Path,
    workshop: Path,
    tmp_path: Path,
    panjue: Callable[..., CompletedProcess[str]],
) -> None:
    gold = tmp_path / "gold.jsonl"
    lines = (workshop / "demo/test.jsonl").read_text("utf-8").splitlines()
    gold.write_text("\n".join(["{", *lines[:12], "[]", *lines[12:]]) + "\n", "utf-8")
    words = ("score", gold, answered / "answers/test")
    assert f"panjue: {gold}:1: not JSON" in panjue(*words).stderr
    assert "bad rows skipped: 2" in panjue(*words, "--on-bad-row", "skip").stdout


def test_an_id_that_is_used_twice_is_refused(
    several: None,
    answered: Path,
    workshop: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(means, "COMPARED", 3)  # or the comparison would find it
    gold = tmp_path / "gold.jsonl"
    lines = (workshop / "demo/test.jsonl").read_text("utf-8").splitlines()
    rows: list[Any] = [json.loads(line) for line in lines]
    rows[20]["id"] = rows[1]["id"]
    gold.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    with pytest.raises(UserError, match=f"id {rows[1]['id']} is used twice"):
        score(Reader(TASK), gold, answered / "answers/test")
