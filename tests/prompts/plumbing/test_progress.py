"""What a long job shows where there is no terminal."""

import io
import time
from pathlib import Path

import pytest
from rich.console import Console
from transformers import TrainerControl, TrainerState, TrainingArguments

from panjue.finetune.journal import Journal
from panjue.prompts.plumbing import progress
from panjue.prompts.plumbing.progress import SETTLED_ITEMS, SETTLED_S, Meter


@pytest.mark.parametrize(
    ("seconds", "items", "line"),
    [
        (SETTLED_S + 1, 1, "1/200  loss 1"),  # the first item of a run takes long
        (1.0, 100, "100/200  loss 1"),
        (60.0, SETTLED_ITEMS, f"{SETTLED_ITEMS}/200  loss 1  39.0 min left"),
    ],
)
def test_the_time_left_is_shown_once_it_has_settled(
    seconds: float, items: int, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    out = io.StringIO()
    meter = Meter(Console(file=out, width=200), total=200, start=0)
    now += seconds + progress.LINE_EVERY_S
    meter._start_time = now - seconds
    meter.to(items, "loss 1")
    assert out.getvalue().strip() == line


def test_evaluations_count_in_the_time_left_but_not_in_the_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, out = 0.0, io.StringIO()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    arguments, control = TrainingArguments(output_dir=tmp_path, report_to=[]), TrainerControl()
    state = TrainerState(max_steps=30)
    journal = Journal(tmp_path, Console(file=out, width=200))
    journal.on_train_begin(arguments, state, control)
    for state.global_step in range(1, 31):
        journal.on_step_begin()
        now += 12  # every step takes as long
        state.num_input_tokens_seen += 1200
        journal.on_step_end(arguments, state, control)
        journal.on_log(arguments, state, control, logs={"loss": 1.0})
        if state.global_step % 10 == 0:
            now += 60  # an evaluation
    lines = {line.split("/")[0]: line for line in out.getvalue().splitlines() if "/30" in line}
    assert lines["9"].endswith("loss 1.0000  100 tokens/s  4.2 min left"), "none was seen yet"
    assert lines["20"].endswith("100 tokens/s  2.5 min left"), "ten steps, and half an evaluation"
