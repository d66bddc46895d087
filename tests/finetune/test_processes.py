"""Several processes of one training: FSDP2 equals DDP, and what cannot work is refused.

accelerate shards on accelerators only. Here two processes on a CPU, which meet over gloo, take
themselves for two GPUs.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from panjue.finetune.data import RowReport, cached
from panjue.finetune.processes import check_driver, check_number, check_sharding
from panjue.finetune.settings import SftConfig
from panjue.finetune.sft import main
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_lines

ROOT = Path(__file__).parents[2]
FSDP2 = ROOT / "finetune/configs/fsdp2.yaml"

AS_ON_GPUS = """
import json, os, signal, sys
from pathlib import Path
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule
from panjue.finetune import processes, sft
from panjue.finetune.trainer import ReplyTrainer

begin, save, lose = PartialState.__init__, sft.save, ReplyTrainer.training_loss

def say(line):
    os.write(1, f"{line}\\n".encode())  # whole: both processes write to one file, print in pieces

def on_gpus(self, *args, **kwargs):
    begin(self, *args, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.MULTI_GPU

def tell(trainer, *args):
    is_sharded = isinstance(trainer.model_wrapped, FSDPModule)
    weights = trainer.model.parameters() if is_sharded else ()
    say(f"share of each weight: { {len(w._local_tensor) / len(w) for w in weights} }")
    save(trainer, *args)

def kill_launcher(trainer, *args):
    if trainer.state.global_step == 3 and os.environ["RANK"] == "0":
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()
    return lose(trainer, *args)

processes.check_sharding, sft.save = lambda *_: None, tell
for name, words in json.loads(sys.argv[2]):
    say(f"process {os.environ['RANK']} is {os.getpid()}")
    is_ddp = name.startswith("ddp")
    os.environ["ACCELERATE_USE_FSDP"] = "false" if is_ddp else "true"
    PartialState.__init__ = begin if is_ddp else on_gpus
    ReplyTrainer.training_loss = kill_launcher if name == "killed" else lose
    sft.main(Path(sys.argv[1]), words)
"""
WORDS = (
    "trainer.max_steps=4", "trainer.eval_steps=2", "trainer.save_steps=2", "score_examples=5",
    "trainer.per_device_train_batch_size=4", "trainer.logging_steps=1", "dtype=float32",
    "trainer.bf16=false",
)  # fmt: skip


@dataclass(frozen=True)
class Launched:
    """What two processes did: run folders by name, what was printed, the processes left over."""

    folder: Path
    said: str
    left: list[int]

    def words(self, name: str) -> list[str]:
        return [f"run={self.folder}/{name}", *WORDS]


def launch(config: Path, folder: Path, *names: str) -> str:
    """Train under each name in two processes and return what was printed.

    A name that begins with `ddp` is trained by DDP, any other by FSDP2.
    """
    (folder / "train.py").write_text(AS_ON_GPUS, "utf-8")
    trainings = [
        (name, [f"run={folder}/{name}", *WORDS, *(["method=full"] if "full" in name else [])])
        for name in names
    ]
    words = [sys.executable, "-m", "accelerate.commands.launch", f"--config_file={FSDP2}"]
    words += ["--num_processes=2", "--main_process_port=0", str(folder / "train.py")]
    with (folder / "said.txt").open("w") as said:  # no pipe: processes that are left would hold it
        command = [*words, str(config), json.dumps(trainings)]
        subprocess.run(command, stdout=said, stderr=subprocess.STDOUT, check=False)
    return (folder / "said.txt").read_text("utf-8")


@pytest.fixture(scope="session")
def launched(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """Train by DDP, by FSDP2, and by FSDP2 until the launcher is killed; then resume that."""
    folder, config = tmp_path_factory.mktemp("sharded"), workshop / "sft.yaml"
    said = launch(config, folder, "ddp", "fsdp", "ddp-full", "fsdp-full", "killed")
    pids = {int(line.split()[-1]) for line in said.splitlines() if line.startswith("process ")}
    assert len(pids) == 2, said
    with suppress(psutil.NoSuchProcess):
        psutil.wait_procs([psutil.Process(pid) for pid in pids], timeout=60)
    left = [pid for pid in pids if psutil.pid_exists(pid)]
    checkpoints = sorted(path.name for path in (folder / "killed/checkpoints").glob("checkpoint-*"))
    assert checkpoints == ["checkpoint-2"], said
    with pytest.raises(UserError, match="was saved by 2 processes and this training has 1"):
        main(config, [f"run={folder}/killed", *WORDS])
    (folder / "killed").rename(folder / "resumed")
    said += launch(config, folder, "resumed")
    return Launched(folder, said, left)


def numbers(run: Path) -> list[dict[str, float]]:
    """Return what a training logged, without times."""
    kept = ("step", "loss", "grad_norm", "num_tokens", "eval_loss", "eval_charge_f1", "eval_final")
    rows = [{k: row[k] for k in kept if k in row} for _, row in read_lines(run / "log.jsonl")]
    return [row for row in rows if "loss" in row or "eval_loss" in row]


def test_fsdp2_equals_ddp_in_losses_norms_scores_and_weights(launched: Launched) -> None:
    assert "processes    2, DDP; each has 4 × 1 examples of each step" in launched.said
    assert "processes    2, sharded weights (FSDP); each has 4 × 1 examples" in launched.said
    assert launched.said.count("share of each weight: {0.5}") == 6, "of three trainings"
    ddp, fsdp = (launched.folder / name for name in ("ddp", "fsdp"))
    assert len(numbers(ddp)) == 6
    for one, other in zip(numbers(ddp), numbers(fsdp), strict=True):
        # Summed over shares: with AVX-512 some norms differ in their last bit.
        assert one.pop("grad_norm", 0) == pytest.approx(other.pop("grad_norm", 0), rel=1e-6)
        assert one == other
    weights = [load_file(run / "adapter/adapter_model.safetensors") for run in (ddp, fsdp)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_fsdp2_equals_ddp_where_all_weights_are_trained(launched: Launched) -> None:
    runs = [numbers(launched.folder / f"{way}-full") for way in ("ddp", "fsdp")]
    assert len(runs[0]) == len(runs[1]) == 6
    for one, other in zip(*runs, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_processes_end_with_a_launcher_that_is_killed_and_the_training_resumes(
    launched: Launched,
) -> None:
    assert launched.left == []
    assert f"resuming from {launched.folder}/resumed/checkpoints/checkpoint-2" in launched.said
    fsdp, resumed = (launched.folder / name for name in ("fsdp", "resumed"))
    assert numbers(resumed)[-3:] == numbers(fsdp)[-3:]
    weights = [load_file(run / "adapter/adapter_model.safetensors") for run in (fsdp, resumed)]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_fsdp_that_would_not_shard_or_not_save_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    full, lora = {**settings, "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}, a_config()
    check_sharding({}, lora)
    check_sharding({"ACCELERATE_USE_FSDP": "false"}, lora)
    with pytest.raises(UserError, match="FSDP: shards on accelerators, and there is none"):
        check_sharding(full, lora)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    check_sharding(full, lora)
    for sharded in ({}, {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}):
        with pytest.raises(UserError, match="SHARDED_STATE_DICT saves no adapter; set FULL_STATE"):
            check_sharding({**settings, **sharded}, lora)
    for unshardable in ({}, {"bnb_4bit_quant_storage": "uint8"}):
        with pytest.raises(UserError, match=r"set quantization\.bnb_4bit_quant_storage=bfloat16$"):
            check_sharding(full, a_config(method="qlora", quantization=unshardable))
    stored = {"bnb_4bit_quant_storage": "bfloat16"}
    check_sharding(full, a_config(method="qlora", quantization=stored))


def test_a_gpu_that_torch_cannot_use_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020).")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", fail)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    check_driver()
    program = tmp_path / "nvidia-smi"
    for listed in ("No devices found.", "GPU 0: NVIDIA A100 (UUID: GPU-1)"):
        check_driver()
        program.write_text(f"#!/bin/sh\necho '{listed}'\n", "utf-8")
        program.chmod(0o755)
    with pytest.raises(
        UserError, match=r"is too old \(found version 12020\).*driver for CUDA 13.0"
    ):
        check_driver()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check_driver()


def a_config(**settings: object) -> SftConfig:
    return SftConfig.model_validate({"run": "r", "model": "m", "train": "t.jsonl", **settings})


def test_another_number_of_processes_does_not_resume(tmp_path: Path) -> None:
    (tmp_path / "rng_state.pth").touch()
    check_number(tmp_path, 1)
    with pytest.raises(
        UserError, match=r"by 1 processes and this training has 2; set gpus=1, or delete"
    ):
        check_number(tmp_path, 2)


def test_the_rows_of_another_process_are_waited_for(tmp_path: Path) -> None:
    def make(report: RowReport) -> Iterator[dict[str, object]]:
        report.tokens.append(1)
        yield {"input_ids": [1], "labels": [1], "group": 0, "length": 1}

    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(cached, tmp_path, {}, lambda _: iter(()), waits=True)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.5)
        cached(tmp_path, {}, make)
        assert len(waiting.result(timeout=30)[0]) == 1
