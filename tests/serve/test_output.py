"""What a signal does to a generation: its calls end, and a message says how to resume."""

import asyncio
import os
import signal
import threading

import pytest

from panjue.prompts.example import Example
from panjue.prompts.plumbing.errors import Stopped
from panjue.serve.ask import answer_all
from panjue.serve.output import StopSignals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_ends_all_calls_and_says_how_to_resume(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_DFL)  # not so under nohup
    running: set[int | str] = set()
    ended: set[int | str] = set()

    async def answer(example: Example) -> None:
        running.add(example.id)
        if len(running) == 3:
            os.kill(os.getpid(), number)
        try:
            await asyncio.sleep(60)
        finally:
            ended.add(example.id)

    examples = (Example(number, "甲") for number in range(3))
    work = answer_all(examples, answer, asyncio.Semaphore(8))
    with pytest.raises(Stopped, match=r"resume$") as stopped, StopSignals() as signals:
        asyncio.run(signals.until_stopped(work))
    assert stopped.value.exit_code == 128 + number
    assert running == ended == {0, 1, 2}


def test_a_signal_that_nothing_was_there_to_receive_ends_the_block() -> None:
    """The engine gets a Ctrl-C before we do, and fails; ours comes a moment later."""
    from panjue.serve.engine import EngineEnded  # imports vLLM

    def end(*, late_signal: bool = False) -> None:
        if late_signal:
            threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT]).start()
        raise EngineEnded("engine: its process has ended")

    with pytest.raises(Stopped, match=r"^stopped; no row was finished") as stopped, StopSignals():
        end(late_signal=True)
    assert stopped.value.exit_code == 130
    with pytest.raises(EngineEnded), StopSignals():
        end()
