"""Several processes of one training: DDP equals one process, FSDP2 equals DDP, signals and kills.

accelerate shards on accelerators only. Here two processes on a CPU, which meet over gloo, take
themselves for two GPUs. What takes seconds, their imports, is done once for all trainings.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import psutil
import pytest
import torch

from panjue.finetune import distributed
from panjue.finetune.data import cached, pack
from panjue.finetune.distributed import check_environment, check_sharding
from panjue.finetune.settings import LAUNCHED
from panjue.finetune.settings import launch as launch_processes
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_lines
from tests.served import until

from .conftest import EXACT, a_config, adapter_bytes, lend_rows, main

ROOT = Path(__file__).parents[2]
FSDP2 = ROOT / "finetune/configs/fsdp2.yaml"

TRAIN = """
import json, os, signal, sys
from pathlib import Path
import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.fsdp import FSDPModule
from panjue.finetune import distributed, sft
from panjue.finetune.training_run import TrainingRun
from panjue.finetune.settings import sft_settings
from panjue.finetune.trainer import ReplyTrainer
from panjue.prompts.plumbing.errors import Stopped

begin, save, lose = PartialState.__init__, TrainingRun.save, ReplyTrainer.compute_loss
rank = os.environ["RANK"]

def say(line):
    os.write(1, f"{line}\\n".encode())  # whole: both processes write to one file, print in pieces

def on_gpus(self, *args, **kwargs):
    begin(self, *args, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.MULTI_GPU

def tell(run, trainer, *args):
    is_sharded = isinstance(trainer.model_wrapped, FSDPModule)
    if is_sharded:
        parts = [part for part in trainer.model.modules() if isinstance(part, FSDPModule)]
        states = [part._get_fsdp_state() for part in parts]
        policies = {state._mp_policy for state in states if state._fsdp_param_group}
        say(*(f"computes in {one.param_dtype}, sums in {one.reduce_dtype}" for one in policies))
    weights = trainer.model.parameters() if is_sharded else ()
    say(f"share of each weight: { {len(w._local_tensor) / len(w) for w in weights} }")
    save(run, trainer, *args)

def kill_launcher(trainer, *args, **kwargs):
    if trainer.state.global_step == 1 and rank == "0":
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()
    return lose(trainer, *args, **kwargs)

def signalled(trainer, *args, **kwargs):
    if rank == "1" and trainer.state.global_step == 0:
        ReplyTrainer.compute_loss = lose
        os.kill(os.getpid(), signal.SIGTERM)
    return lose(trainer, *args, **kwargs)

distributed.check_sharding, TrainingRun.save = lambda *_: None, tell
say(f"process {rank} is {os.getpid()}")
for name, words in json.loads(sys.argv[2]):
    is_sharded = name.startswith("fsdp")
    os.environ["ACCELERATE_USE_FSDP"] = "true" if is_sharded else "false"
    PartialState.__init__ = on_gpus if is_sharded else begin
    disturbed = {"fsdp-killed": kill_launcher, "stopped": signalled}
    ReplyTrainer.compute_loss = disturbed.get(name, lose)
    try:
        sft.train(sft_settings(Path(sys.argv[1]), words))
    except Stopped as stopped:
        say(f"process {rank} {stopped}")
    options = _get_default_group()._get_backend(torch.device("cpu")).options
    say(f"waits at most {options._timeout.total_seconds()} seconds")
"""
OFTEN = ("trainer.logging_steps=1", "trainer.eval_steps=1", "trainer.save_steps=1")
EVALUATED = ("trainer.max_steps=2", "trainer.ddp_timeout=4321", *OFTEN, *EXACT)
UNEVEN = (
    *("batch=8", "trainer.per_device_train_batch_size=2", "trainer.num_train_epochs=2"),
    *("trainer.eval_strategy='no'", "trainer.save_strategy='no'", "trainer.logging_steps=1"),
    *("train=few.jsonl", "dev=one.jsonl", *EXACT),
)
"""Of thirteen cases: in the last two of an epoch's rounds one process has fewer, or none."""
TRAININGS = {
    "stopped": EVALUATED,
    "stopped-again": EVALUATED,
    "ddp": EVALUATED,
    "uneven": UNEVEN,
    "fsdp": EVALUATED,
    "ddp-full": (*EVALUATED, "method=full"),
    "fsdp-full": (*EVALUATED, "method=full"),
    "ddp-from": EVALUATED,
    "fsdp-from": EVALUATED,
    "fsdp-bf16": (*OFTEN, "trainer.max_steps=1", "trainer.bf16=true"),
    "fsdp-killed": EVALUATED,
    "fsdp-resumed": EVALUATED,
}
"""Name -> words, in this order; what begins with `fsdp` is trained by FSDP2, all other by DDP."""


class Launched(NamedTuple):
    """What two processes did: run folders by name, what was printed, the processes left over."""

    folder: Path
    said: str
    left: list[int]


def launch(config: Path, folder: Path, *names: str) -> str:
    """Train under each name in two processes and return what was printed."""
    (folder / "train.py").write_text(TRAIN, "utf-8")
    runs = {name: folder / name.removesuffix("-again") for name in names}
    for run in runs.values():
        lend_rows(config.parent, run)
    trainings = []
    for name, run in runs.items():
        start = [f"from={config.parent}/run"] if name.endswith("-from") else []
        trainings.append((name, [*TRAININGS[name], f"run={run}", *start]))
    cases = (config.parent / "demo/train.jsonl").read_text("utf-8").splitlines(keepends=True)
    (folder / "few.jsonl").write_text("".join(cases[:13]), "utf-8")
    (folder / "one.jsonl").write_text(cases[13], "utf-8")
    words = [sys.executable, "-m", "accelerate.commands.launch", f"--config_file={FSDP2}"]
    words += ["--num_processes=2", "--main_process_port=0", str(folder / "train.py")]
    with (folder / "said.txt").open("w") as said:  # no pipe: processes that are left would hold it
        command = [*words, str(config), json.dumps(trainings)]
        subprocess.run(command, cwd=folder, stdout=said, stderr=subprocess.STDOUT, check=False)
    return (folder / "said.txt").read_text("utf-8")


@pytest.fixture(scope="module")
def launched(trained: Path, workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """Run all trainings until the launcher is killed; then resume that one."""
    folder = tmp_path_factory.mktemp("two")
    *names, resumed = TRAININGS
    said = launch(workshop / "sft.yaml", folder, *names)
    pids = {int(pid) for pid in re.findall(r"^process \d is (\d+)$", said, re.MULTILINE)}
    assert len(pids) == 2, said
    with suppress(psutil.NoSuchProcess):
        psutil.wait_procs([psutil.Process(pid) for pid in pids], timeout=60)
    left = [pid for pid in pids if psutil.pid_exists(pid)]
    checkpoints = (folder / "fsdp-killed/checkpoints").glob("checkpoint-*")
    assert [path.name for path in checkpoints] == ["checkpoint-1"], said
    with pytest.raises(UserError, match=r"holds another run \(processes: 2 -> 1\)"):
        main(workshop / "sft.yaml", [f"run={folder}/fsdp-killed", *EVALUATED])
    (folder / "fsdp-killed").rename(folder / resumed)
    return Launched(folder, said + launch(workshop / "sft.yaml", folder, resumed), left)


def numbers(run: Path) -> list[dict[str, float]]:
    """Return what a training logged, without times."""
    kept = ("step", "loss", "grad_norm", "num_tokens", "eval_loss")
    rows = [{k: row[k] for k in kept if k in row} for _, row in read_lines(run / "log.jsonl")]
    return [row for row in rows if "loss" in row or "eval_loss" in row]


def test_two_processes_give_the_losses_of_one_at_the_same_batch(
    workshop: Path, tmp_path: Path, launched: Launched
) -> None:
    """Of the held-out cases too: no case counts twice, and no mean of batches is taken."""
    words = [f"run={tmp_path}/one", *EVALUATED, "trainer.per_device_eval_batch_size=4"]
    main(workshop / "sft.yaml", words)
    assert "processes    2, DDP; each has 4 × 1 examples of each step" in launched.said
    assert launched.said.count(" 2, each of 8 examples or packs") == len(TRAININGS) - 2
    for one, two in zip(numbers(tmp_path / "one"), numbers(launched.folder / "ddp"), strict=True):
        assert one.get("loss", 0) == pytest.approx(two.get("loss", 0), rel=1e-3)
        assert one.get("eval_loss", 0) == pytest.approx(two.get("eval_loss", 0), abs=1e-4)
    assert launched.said.count("waits at most 4321.0 seconds") >= len(TRAININGS), "as is said"


def test_no_case_is_trained_on_twice_at_the_end_of_an_epoch(
    workshop: Path, tmp_path: Path, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(launched.folder)
    main(workshop / "sft.yaml", [f"run={tmp_path}/one", *UNEVEN])
    one, two = (numbers(run) for run in (tmp_path / "one", launched.folder / "uneven"))
    assert len(one) == len(two) == 4, "two epochs of eight cases and five"
    for alone, shared in zip(one, two, strict=True):
        assert alone["loss"] == pytest.approx(shared["loss"], rel=1e-3)


def test_a_signal_to_one_process_stops_both_and_the_weights_are_the_same(
    launched: Launched,
) -> None:
    for process in (0, 1):
        assert f"process {process} stopped at step 1 of 2, which is saved; " in launched.said
    stopped, once = (launched.folder / name for name in ("stopped", "ddp"))
    assert adapter_bytes(stopped) == adapter_bytes(once)
    assert [row["step"] for row in numbers(stopped) if "eval_loss" in row] == [1, 2]
    assert numbers(stopped) == numbers(once)


WAIT = """
import os, signal, sys

def end(number, _):
    os.write(1, f"got {signal.Signals(number).name}\\n".encode())
    sys.exit()

for number in (signal.SIGHUP, signal.SIGUSR1):
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, end)
os.write(1, b"ready\\n")
while True:
    signal.pause()
"""


def test_the_launcher_passes_on_slurm_s_warning_and_under_nohup_no_closed_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its setting the warning ends the launcher alone, and SIGHUP ends a training."""
    (tmp_path / "wait.py").write_text(WAIT, "utf-8")
    environment: dict[str, str] = {}
    monkeypatch.setattr(os, "execve", lambda *words: environment.update(words[2]))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    launch_processes(a_config(gpus=2), Path("a.yaml"), [])
    signal.signal(signal.SIGHUP, before)
    words = ["nohup", sys.executable, "-m", "accelerate.commands.launch", f"--config_file={FSDP2}"]
    words += ["--num_processes=2", "--main_process_port=0", str(tmp_path / "wait.py")]
    path = tmp_path / "said.txt"
    with (
        path.open("wb") as out,
        subprocess.Popen(words, env=environment, stdout=out, stderr=out) as running,
    ):
        until(lambda: path.read_text("utf-8").count("ready") == 2, 120)
        running.send_signal(signal.SIGHUP)
        running.send_signal(signal.SIGUSR1)
        running.wait(120)
    said = path.read_text("utf-8")
    assert said.count("got SIGUSR1") == 2, said
    assert "got SIGHUP" not in said


def test_fsdp2_equals_ddp_in_losses_norms_and_weights(launched: Launched) -> None:
    assert "processes    2, sharded weights (FSDP); each has 4 × 1 examples" in launched.said
    assert launched.said.count("share of each weight: {0.5}") == 10, "of five trainings"
    ddp, fsdp = (launched.folder / name for name in ("ddp", "fsdp"))
    assert len(numbers(ddp)) == 4
    for one, other in zip(numbers(ddp), numbers(fsdp), strict=True):
        # Summed over shares: with AVX-512 some norms differ in their last bit.
        assert one.pop("grad_norm", 0) == pytest.approx(other.pop("grad_norm", 0), rel=1e-6)
        assert one == other
    assert adapter_bytes(ddp) == adapter_bytes(fsdp)


def test_fsdp2_equals_ddp_where_all_weights_are_trained(launched: Launched) -> None:
    runs = [numbers(launched.folder / f"{way}-full") for way in ("ddp", "fsdp")]
    assert len(runs[0]) == len(runs[1]) == 4
    for one, other in zip(*runs, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_a_training_that_starts_from_an_adapter_does_so_in_all_processes(
    workshop: Path, trained: Path, tmp_path: Path, launched: Launched
) -> None:
    """Under FSDP2 one process reads the weights of the base, and all read the adapter."""
    main(workshop / "sft.yaml", [f"run={tmp_path}/one", *EVALUATED, f"from={trained}"])
    one, ddp, fsdp = (
        numbers(run)
        for run in (tmp_path / "one", launched.folder / "ddp-from", launched.folder / "fsdp-from")
    )
    for alone, two, sharded in zip(one, ddp, fsdp, strict=True):
        assert alone.get("loss", 0) == pytest.approx(two.get("loss", 0), rel=1e-3)
        assert two.pop("grad_norm", 0) == pytest.approx(sharded.pop("grad_norm", 0), rel=1e-6)
        assert two == sharded
    assert one[0]["loss"] < numbers(launched.folder / "ddp")[0]["loss"], "it was trained before"
    assert adapter_bytes(launched.folder / "ddp-from") == adapter_bytes(
        launched.folder / "fsdp-from"
    )


def test_fsdp2_sums_gradients_in_float32_where_it_computes_in_bfloat16(launched: Launched) -> None:
    """As DDP does: in bfloat16 a sum over many processes loses its small parts."""
    assert launched.said.count("computes in torch.bfloat16, sums in torch.float32") == 2
    assert numbers(launched.folder / "fsdp-bf16")


def test_processes_end_with_a_launcher_that_is_killed_and_the_training_resumes(
    launched: Launched,
) -> None:
    assert launched.left == []
    assert f"resuming from {launched.folder}/fsdp-resumed/checkpoints/checkpoint-1" in launched.said
    fsdp, resumed = (launched.folder / name for name in ("fsdp", "fsdp-resumed"))
    assert numbers(resumed)[-2:] == numbers(fsdp)[-2:]
    assert adapter_bytes(resumed) == adapter_bytes(fsdp)


FULL = "FULL_STATE_DICT"
SHARDED = "SHARDED_STATE_DICT"
STORED = "set quantization.bnb_4bit_quant_storage=bfloat16"


@pytest.mark.parametrize(
    ("has_gpu", "saved", "storage", "complaint"),
    [
        (False, FULL, "bfloat16", "shards on accelerators, and there is none; launch without FSDP"),
        (True, SHARDED, "bfloat16", "SHARDED_STATE_DICT saves no adapter; set FULL_STATE_DICT"),
        (True, FULL, "", STORED),
        (True, FULL, "uint8", STORED),
        (True, FULL, "bfloat16", None),
    ],
)
def test_fsdp_that_would_not_shard_or_not_save_is_refused(
    has_gpu: bool, saved: str, storage: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_gpu)
    monkeypatch.setenv("FSDP_STATE_DICT_TYPE", saved)
    qlora = a_config(method="qlora", quantization={"bnb_4bit_quant_storage": storage})
    check_sharding(qlora)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match=complaint) if complaint else nullcontext():
        check_sharding(qlora)


def test_what_is_left_of_a_launcher_is_ignored_and_what_changes_a_training_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    check_environment()
    assert not {"WORLD_SIZE", "ACCELERATE_MIXED_PRECISION"} & os.environ.keys()
    ignored = capsys.readouterr().out.splitlines()
    line = "environment: WORLD_SIZE=4 is ignored: no launcher is at work"
    assert (len(ignored), line in ignored) == (2, True)
    for name in LAUNCHED:
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    check_environment()
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    with pytest.raises(UserError, match=r"^accelerate: dynamo_backend is INDUCTOR; set it to no"):
        check_environment()
    assert not capsys.readouterr().out


def test_the_rows_and_packs_of_the_first_process_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"input_ids": [1], "labels": [1], "length": 1}

    def state() -> SimpleNamespace:
        is_main = threading.current_thread() is threading.main_thread()
        return SimpleNamespace(is_main_process=is_main)

    monkeypatch.setattr(distributed, "PartialState", state)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(cached, tmp_path, {}, lambda _: iter(()))
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.5)
        rows, _ = cached(tmp_path, {}, lambda _: iter([row]))
        assert len(waiting.result(timeout=30)[0]) == 1
        packing = pool.submit(pack, rows, 8)
        with pytest.raises(TimeoutError):
            packing.result(timeout=0.5)
        pack(rows, 8)
        assert len(packing.result(timeout=30)) == 1
