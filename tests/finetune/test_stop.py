"""Signals while several processes train, worked out step by step."""

import os
import signal
from collections.abc import Iterator
from io import StringIO
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from rich.console import Console
from transformers import TrainerControl, TrainerState

from panjue.finetune import stop
from panjue.finetune.stop import StopOnSignal
from panjue.prompts.plumbing.errors import Stopped
from panjue.prompts.plumbing.signals import STOPPING

STATE = TrainerState(global_step=3, max_steps=9, epoch=0.5)


@pytest.fixture
def one_of_two(monkeypatch: pytest.MonkeyPatch) -> Iterator[StopOnSignal]:
    """Return what the first of two processes listens with."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in STOPPING}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # `make test &` and nohup ignore some
    state = SimpleNamespace(num_processes=2, is_local_main_process=True)
    monkeypatch.setattr(stop, "PartialState", lambda: state)
    listening = StopOnSignal(Console(file=StringIO()))
    listening.on_train_begin()
    yield listening
    listening._restore_handlers()
    for number, handler in before.items():
        signal.signal(number, handler)


def end_of_step(listening: StopOnSignal) -> bool:
    control = TrainerControl()
    listening.on_step_end(None, STATE, control)
    assert control.should_training_stop == control.should_save
    return bool(control.should_training_stop)


def test_a_signal_at_the_last_step_leaves_the_evaluation_of_a_partial_epoch(
    one_of_two: StopOnSignal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop, "gather_object", lambda mine: [*mine, signal.SIGTERM])
    last, control = TrainerState(global_step=9, max_steps=9, epoch=1.5), TrainerControl()
    one_of_two.on_step_end(None, last, control)
    assert not control.should_save, "the checkpoint would be without the evaluation"
    control.should_evaluate = control.should_save = True
    one_of_two.on_epoch_end(None, last, control)
    assert control.should_evaluate
    assert control.should_save
    one_of_two.on_train_end(None, last)


def test_a_signal_while_the_processes_agree_is_for_the_next_step(
    one_of_two: StopOnSignal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gather(mine: list[int]) -> list[int]:
        os.kill(os.getpid(), signal.SIGTERM)
        return [*mine, 0]

    monkeypatch.setattr(stop, "gather_object", gather)
    assert not end_of_step(one_of_two)  # as the other process, which knows of none
    monkeypatch.setattr(stop, "gather_object", lambda mine: [*mine, 0])
    assert end_of_step(one_of_two)
    os.kill(os.getpid(), signal.SIGINT)  # raises KeyboardInterrupt where nobody listens any more
    with pytest.raises(Stopped, match="stopped at step 3 of 9") as stopped:
        one_of_two.on_train_end(None, STATE)
    assert stopped.value.exit_code == 128 + signal.SIGTERM


@pytest.mark.parametrize("number", STOPPING)
def test_every_signal_that_stops_a_command_saves_the_step(
    number: signal.Signals, one_of_two: StopOnSignal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop, "gather_object", lambda mine: [*mine, 0])
    os.kill(os.getpid(), number)
    assert end_of_step(one_of_two)
    with pytest.raises(Stopped) as stopped:
        one_of_two.on_train_end(None, STATE)
    assert stopped.value.exit_code == 128 + number


def test_a_signal_that_was_ignored_at_the_start_stays_ignored(
    one_of_two: StopOnSignal, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_of_two._restore_handlers()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    one_of_two.on_train_begin()
    monkeypatch.setattr(stop, "gather_object", lambda mine: [*mine, 0])
    os.kill(os.getpid(), signal.SIGHUP)
    assert not end_of_step(one_of_two)
    one_of_two.on_train_end(None, STATE)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_a_second_signal_ends_it_at_once(
    one_of_two: StopOnSignal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop, "SIGNAL_DEBOUNCE_S", 1e9)
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)  # passed on by `make`
    monkeypatch.setattr(stop, "SIGNAL_DEBOUNCE_S", -1.0)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_nobody_reads_the_word_any_more(
    one_of_two: StopOnSignal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "write", Mock(side_effect=BrokenPipeError))
    monkeypatch.setattr(stop, "gather_object", lambda mine: [*mine, 0])
    os.kill(os.getpid(), signal.SIGINT)
    assert one_of_two._console.quiet
    assert end_of_step(one_of_two)


def test_a_signal_of_our_own_after_the_others_is_no_second_one(
    one_of_two: StopOnSignal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop, "gather_object", lambda mine: [*mine, signal.SIGINT])
    assert end_of_step(one_of_two)
    os.kill(os.getpid(), signal.SIGINT)  # raises KeyboardInterrupt where nobody listens any more
    with pytest.raises(Stopped) as stopped:
        one_of_two.on_train_end(None, STATE)
    assert stopped.value.exit_code == 130
