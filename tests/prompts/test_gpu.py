"""A GPU that could not be used is refused before anything is fetched or fitted."""

import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from unittest.mock import Mock

import pytest
import torch

from panjue.prompts import gpu
from panjue.prompts.gpu import check_gpu, unused_device
from panjue.prompts.plumbing.errors import UserError
from tests.machine import GOOD, Machine, nvidia_smi

Panjue = Callable[..., CompletedProcess[str]]

NO_CUDA = pytest.mark.skipif(torch.version.cuda is not None, reason="the torch here is for GPUs")

TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU "
    "driver by downloading and installing a new version from the URL: "
    "http://www.nvidia.com/Download/index.aspx Alternatively, go to: https://pytorch.org to "
    "install a PyTorch version that has been compiled with your version of the CUDA driver."
)
"""What torch 2.13 for CUDA 13 says, in one line."""

NO_DRIVER = "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU"
NONE_VISIBLE = "No CUDA GPUs are available"
UNKNOWN = "Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized"


@NO_CUDA
def test_the_torch_of_a_cpu_is_not_used_where_there_is_a_gpu(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine({**GOOD, "nvidia-smi": nvidia_smi()})
    with pytest.raises(UserError) as error:
        check_gpu()
    assert str(error.value) == (
        "GPU: torch cannot use the NVIDIA T4 (Torch not compiled with CUDA enabled): this .venv is "
        "for the CPU; rm -r .venv, then KIND=gpu make install; or set CUDA_VISIBLE_DEVICES= "
        "(empty) to compute on the CPU"
    )
    for value in gpu.HIDING:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        check_gpu(answering=True)


@NO_CUDA
def test_without_a_gpu_nothing_is_refused(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine({})
    check_gpu(answering=True)
    monkeypatch.setattr(gpu, "NVIDIA_DEVICE", tmp_path)
    with pytest.raises(UserError, match="torch cannot use the NVIDIA GPU "):
        check_gpu()


@pytest.mark.parametrize(
    ("driver", "reason", "visible", "said"),
    [
        (
            "535.104.05",
            TOO_OLD,
            None,
            "NVIDIA T4 (The NVIDIA driver on your system is too old (found version 12020)); install"
            " driver 580 or newer (this is 535.104.05), and reboot; or to compute on the CPU: ",
        ),
        (
            "",
            TOO_OLD,
            None,
            "NVIDIA GPU (The NVIDIA driver on your system is too old (found version 12020)); "
            "install driver 580 or newer, and reboot; or to compute on the CPU: ",
        ),
        (
            "580.65.06",
            UNKNOWN,
            None,
            f"NVIDIA T4 ({UNKNOWN}); the driver is 580.65.06: reboot if it was updated, and ",
        ),
        (
            "580.65.06",
            NO_DRIVER,
            "0",
            "NVIDIA T4 (Found no NVIDIA driver on your system); the driver is 580.65.06: reboot",
        ),
        (
            "580.65.06",
            NONE_VISIBLE,
            "7",
            "NVIDIA T4 (No CUDA GPUs are available); CUDA_VISIBLE_DEVICES=7 names no GPU of this "
            "machine; unset it; or to compute on the CPU: ",
        ),
        ("", NO_DRIVER, None, ""),
        ("", NONE_VISIBLE, "7", ""),
        ("535.104.05", TOO_OLD, "", ""),
    ],
)
def test_the_reason_is_that_of_torch(
    driver: str,
    reason: str,
    visible: str | None,
    said: str,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine({**GOOD, **({"nvidia-smi": nvidia_smi(driver)} if driver else {})})
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", Mock(side_effect=RuntimeError(reason)))
    if not said:
        check_gpu()
        with pytest.raises(UserError, match="sees none, and the vLLM of this"):
            check_gpu(answering=True)
        return
    with pytest.raises(UserError) as error:
        check_gpu()
    assert str(error.value).startswith(f"GPU: torch cannot use the {said}")


def test_a_gpu_that_appears_meanwhile_is_not_refused(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine({**GOOD, "nvidia-smi": nvidia_smi("600.0")})
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", Mock())
    check_gpu()


def test_a_gpu_is_new_enough_and_triton_can_compile_for_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    capabilities = {0: (7, 5), 1: (7, 0)}
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: f"card {number}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    machine(GOOD)
    check_gpu(answering=True)
    with pytest.raises(UserError, match=r"^GPU: the card 1 has compute capability 7\.0, and torch"):
        check_gpu(3)  # accelerate gives the fourth process the second of two cards
    path = machine({})
    (path / "gcc").unlink()
    with pytest.raises(UserError, match=r"^GPU: answering .* there is no C compiler: install gcc"):
        check_gpu()


@NO_CUDA
def test_commands_refuse_it_before_anything_is_written(
    trained: Path,
    workshop: Path,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    panjue: Panjue,
) -> None:
    machine({**GOOD, "nvidia-smi": nvidia_smi()})
    monkeypatch.setitem(sys.modules, "panjue.serve.engine", None)  # nor is vLLM imported
    train, test = workshop / "demo/train.jsonl", workshop / "demo/test.jsonl"
    run = tmp_path / "run"
    for words in (
        ("sft", f"run={run}", "model=Qwen/Qwen3-8B", f"train={train}"),
        ("sft", workshop / "sft.yaml", f"run={run}"),
        ("sft", workshop / "sft.yaml", f"run={run}", "gpus=2"),
        ("generate", trained, test, f"answers={tmp_path.name}"),
    ):
        done = panjue(*words)
        assert done.returncode == 2
        [line] = done.stderr.splitlines()
        assert line.startswith("panjue: GPU: torch cannot use the NVIDIA T4 (Torch not compiled")
    assert not list(run.glob("*/"))
    assert not (trained / "answers" / tmp_path.name).exists()


def test_another_device_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    device = tmp_path / "device"
    monkeypatch.setattr(gpu, "OTHER_DEVICES", {str(device): "AMD GPU"})
    assert unused_device() == ""
    device.touch()
    said = "the CPU: panjue installs what NVIDIA GPUs and CPUs need, not the AMD GPU"
    assert unused_device() == said
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert unused_device() == ""
