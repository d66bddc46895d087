"""A training whose terminal is closed saves its step; one under `nohup` goes on until it is told.

These are real processes: what a terminal and `nohup` do is done to them.
"""

import os
import pty
import signal
import sys
from pathlib import Path
from subprocess import Popen

import pytest

from panjue.finetune.checkpoints import newest_complete
from panjue.prompts.plumbing.run import step_of_checkpoint
from tests.served import until

from .conftest import lend_rows, logged

PANJUE = str(Path(sys.executable).with_name("panjue"))
LONG = ("trainer.max_steps=100000", "trainer.eval_strategy='no'", "trainer.save_steps=100000")
LONGEST_S = 300


@pytest.fixture
def words(trained: Path, workshop: Path, tmp_path: Path) -> list[str]:
    """Return a training that would take hours; its run folder is `run`."""
    lend_rows(trained.parent, tmp_path / "run")
    return [PANJUE, "sft", str(workshop / "sft.yaml"), f"run={tmp_path}/run", *LONG]


def steps(run: Path) -> int:
    """Return how many steps a training has logged."""
    log = run / "log.jsonl"
    return len(logged(run, "loss")) if log.exists() else 0


def test_a_closed_terminal_saves_and_nohup_ignores_it(words: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    terminal, its_end = pty.openpty()
    # A process that leads a session, and whose first terminal this is, gets it as its own.
    begin = ["env", "--default-signal=HUP", "setsid", "--ctty", "--wait"]
    with Popen([*begin, *words], stdin=its_end, stdout=its_end, stderr=its_end) as running:
        os.close(its_end)
        until(lambda: steps(run) > 0 or running.poll() is not None, LONGEST_S)
        os.close(terminal)
        assert running.wait(LONGEST_S) == 128 + signal.SIGHUP
    stopped_at = step_of_checkpoint(newest_complete(run / "checkpoints") or Path("checkpoint-0"))
    assert stopped_at == steps(run) > 0, "no step is lost"

    log = tmp_path / "said.txt"
    with log.open("wb") as out, Popen(["nohup", *words], stdout=out, stderr=out) as running:
        until(lambda: steps(run) > stopped_at or running.poll() is not None, LONGEST_S)
        running.send_signal(signal.SIGHUP)
        seen = steps(run)
        until(lambda: steps(run) > seen + 1 or running.poll() is not None, LONGEST_S)
        running.send_signal(signal.SIGUSR1)
        assert running.wait(LONGEST_S) == 128 + signal.SIGUSR1, log.read_text("utf-8")
    said = log.read_text("utf-8")
    assert f"resuming from {run}/checkpoints/checkpoint-{stopped_at}\n" in said
    assert f"stopped at step {steps(run)} of 100000, which is saved; run the same command" in said
