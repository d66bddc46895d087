"""A training that is stopped, killed or fails goes on as if nobody had disturbed it."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from panjue.finetune.checkpoints import newest_complete

from .conftest import adapter_bytes, lend_classifier, logged, main

AT_THE_END = ["trainer.max_steps=8", "trainer.eval_strategy='no'", "trainer.save_steps=8"]
BY_EPOCH = ["trainer.max_steps=20", "trainer.eval_strategy=epoch", "trainer.save_strategy=epoch"]
STOPS: list[tuple[signal.Signals, list[str]]] = [
    (signal.SIGTERM, AT_THE_END),
    (signal.SIGINT, [*AT_THE_END, "trainer.train_sampling_strategy=group_by_length"]),
]
DROPOUT = "lora.lora_dropout=0.2"
"""Without the random state of the checkpoint, the steps after it would differ."""
OFTEN = ["trainer.eval_steps=3", "trainer.save_steps=3"]

EVALUATIONS: list[tuple[str, int, int, list[str]]] = [
    ("signal", 6, 7, [DROPOUT]),
    ("kill", 6, 3, [DROPOUT, *OFTEN]),
    ("kill", 20, 14, BY_EPOCH),
]
"""What comes during an evaluation, at which step, the newest checkpoint, and the words."""

FORKS = """
import json, os, signal, sys
from panjue.finetune.journal import Journal
from panjue.finetune.trainer import ReplyTrainer
from panjue.prompts.cli import main

def told_to_stop(number, *words):
    logged = Journal.on_log

    def on_log(self, args, state, control, **more):
        logged(self, args, state, control, **more)
        if state.global_step == 2:  # twice: `make` and launchers pass on what all got
            os.kill(os.getpid(), int(number))
            os.kill(os.getpid(), int(number))

    Journal.on_log = on_log
    sys.argv[1:] = ["sft", *words]
    main()

def while_evaluating(what, step, *words):
    evaluate = ReplyTrainer.evaluation_loop

    def disturbed(self, *args, **kwargs):
        if self.state.global_step == int(step):
            os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGTERM)
        return evaluate(self, *args, **kwargs)

    ReplyTrainer.evaluation_loop = disturbed
    sys.argv[1:] = ["sft", *words]
    main()

ends = []
for name, words, errors in json.loads(sys.argv[1]):
    if not (child := os.fork()):
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
        globals()[name](*words)
        sys.exit(0)
    ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(ends))
"""
"""Each training is a process of its own, forked from one that has imported torch for all."""


@dataclass(frozen=True)
class Ended:
    """How the process of a training ended."""

    run: Path
    code: int
    errors: str


@pytest.fixture(scope="module")
def ended(
    trained: Path, workshop: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Ended]:
    """Return how trainings ended: `stop-0` got a signal, `evaluation-0` was disturbed in one."""
    folder, config = tmp_path_factory.mktemp("ended"), str(workshop / "sft.yaml")
    tries = {
        f"stop-{n}": ("told_to_stop", [str(int(number)), config, f"run={folder}/stop-{n}", *saves])
        for n, (number, saves) in enumerate(STOPS)
    }
    for n, (name, step, _, words) in enumerate(EVALUATIONS):
        run = f"run={folder}/evaluation-{n}"
        tries[f"evaluation-{n}"] = ("while_evaluating", [name, str(step), config, run, *words])
    for key in tries:
        lend_classifier(workshop, folder / key)
    given = [(name, words, f"{folder}/{key}.err") for key, (name, words) in tries.items()]
    words = [sys.executable, "-c", FORKS, json.dumps(given)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout.splitlines()[-1])
    return {
        key: Ended(folder / key, code, (folder / f"{key}.err").read_text("utf-8"))
        for key, code in zip(tries, codes, strict=True)
    }


Undisturbed = Callable[[list[str]], Path]


@pytest.fixture(scope="module")
def undisturbed(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Return what gives the run folder of a training with these words that nobody disturbed."""
    folder, made = tmp_path_factory.mktemp("undisturbed"), dict[tuple[str, ...], Path]()

    def once(words: list[str]) -> Path:
        run = made.setdefault(tuple(words), folder / str(len(made)))
        main(workshop / "sft.yaml", [f"run={run}", *words])  # a finished one is left alone
        return run

    return once


@pytest.mark.parametrize("stop", range(len(STOPS)))
def test_a_training_that_is_told_to_stop_saves_first_and_goes_on(
    stop: int, ended: dict[str, Ended], undisturbed: Undisturbed, workshop: Path
) -> None:
    (number, words), training = STOPS[stop], ended[f"stop-{stop}"]
    told = training.errors
    assert training.code == 128 + number, told
    assert told.count("stopping after this step is saved") == 1
    assert "which is saved; run the same command to resume" in told.splitlines()[-1]
    assert "Traceback" not in told
    assert not (training.run / "adapter").exists()
    stopped_at = newest_complete(training.run / "checkpoints")
    assert stopped_at is not None
    assert 2 <= int(stopped_at.name.split("-")[1]) < 8
    main(workshop / "sft.yaml", [f"run={training.run}", *words])
    assert adapter_bytes(training.run) == adapter_bytes(undisturbed(words))


def losses(run: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["eval_loss"]) for row in logged(run, "eval_loss")]


@pytest.mark.parametrize("number", range(len(EVALUATIONS)))
def test_a_training_that_ends_during_an_evaluation_goes_on_from_the_checkpoint_before(
    number: int, ended: dict[str, Ended], undisturbed: Undisturbed, workshop: Path
) -> None:
    (what, _, saved, words), cut = EVALUATIONS[number], ended[f"evaluation-{number}"]
    codes = {"signal": 128 + signal.SIGTERM, "kill": -signal.SIGKILL}
    assert cut.code == codes[what], cut.errors
    newest = newest_complete(cut.run / "checkpoints")
    assert newest is not None
    assert newest.name == f"checkpoint-{saved}"
    main(workshop / "sft.yaml", [f"run={cut.run}", *words])
    once = undisturbed(words)
    assert adapter_bytes(cut.run) == adapter_bytes(once)
    assert losses(cut.run) == losses(once)
