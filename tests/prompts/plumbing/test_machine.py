"""What a machine lacks is said at the install, each in one line with the way out."""

import shutil
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest

from panjue.prompts.plumbing.machine import install_warnings, nvidia_cards
from tests.machine import GOOD, Machine, nvidia_smi

NO_HEADERS = "echo 't.c:1:10: fatal error: Python.h: No such file or directory'; exit 1"
NO_LIBC = "echo 't.c:2:10: fatal error: stdlib.h: No such file or directory'; exit 1"
BROKEN = 'echo "NVIDIA-SMI has failed because it couldn\'t communicate with the driver."; exit 9'
HEADERS = sysconfig.get_path("include")


@pytest.mark.parametrize(
    ("kind", "changed", "said"),
    [
        ("cpu", {}, []),
        ("gpu", {}, []),
        ("gpu", {"nvidia-smi": nvidia_smi("581.15")}, []),
        (
            "gpu",
            {"nvidia-smi": nvidia_smi("535.104.05")},
            ["the NVIDIA driver is 535.104.05, and torch cannot use the GPU with one below 580; "],
        ),
        ("cpu", {"nvidia-smi": nvidia_smi("535.104.05"), "gcc": "exit 1"}, []),
        (
            "gpu",
            {"nvidia-smi": nvidia_smi(card="Tesla V100-SXM2-16GB", capability="7.0")},
            ["the Tesla V100-SXM2-16GB has compute capability 7.0, and torch and vLLM need 7.5; "],
        ),
        ("gpu", {"nvidia-smi": nvidia_smi(card="A100D-8C", capability="[N/A]")}, []),
        (
            "gpu",
            {"nvidia-smi": BROKEN},
            ["nvidia-smi lists no GPU (NVIDIA-SMI has failed because it couldn't communicate with"],
        ),
        (
            "cpu",
            {"ldd": "echo 'ldd (GNU libc) 2.28'"},
            ["glibc is 2.28: llguidance has wheels from 2.31 on, and is now built with Rust; "],
        ),
        ("cpu", {"ldd": "echo 'ldd (GNU libc) 2.31'"}, []),
        (
            "cpu",
            {"ldd": "echo 'musl libc (x86_64)' >&2; echo 'Version 1.2.4' >&2; exit 1"},
            ["the C library is musl: torch and vLLM have no wheels for it; "],
        ),
        (
            "gpu",
            {"gcc": NO_HEADERS},
            [f"answering on a GPU compiles with Triton, and Python.h is not in {HEADERS}: install"],
        ),
        (
            "gpu",
            {"gcc": NO_LIBC},
            ["answering on a GPU compiles with Triton, and PATH/gcc fails (t.c:2:10: fatal error"],
        ),
    ],
)
def test_what_is_missing_is_said_at_the_install(
    kind: str, changed: dict[str, str], said: list[str], machine: Machine
) -> None:
    path = machine({**GOOD, **changed})
    lines = [line.replace(str(path), "PATH") for line in install_warnings(kind, is_new=False)]
    assert len(lines) == len(said), lines
    for line, beginning in zip(lines, said, strict=True):
        assert line.startswith(beginning)


def test_another_processor_needs_another_glibc(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine({"ldd": "echo 'ldd (GNU libc) 2.31'"})
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    [line] = install_warnings("cpu", is_new=False)
    assert line.startswith("glibc is 2.31: llguidance has wheels from 2.34 on")


def test_a_compiler_is_looked_for_as_triton_does(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine({"ldd": GOOD["ldd"], "cc": "exit 0"})  # a `cc` that is not named in CC is not taken
    [line] = install_warnings("gpu", is_new=False)
    assert "there is no C compiler: install gcc and python3." in line
    monkeypatch.setenv("CC", "cc")
    assert not list(install_warnings("gpu", is_new=False))
    monkeypatch.setenv("CC", "/missing/cc")
    [line] = install_warnings("gpu", is_new=False)
    assert "/missing/cc fails (it cannot be run)" in line


@pytest.mark.skipif(not shutil.which("gcc"), reason="needs a C compiler")
def test_a_real_compiler_finds_the_headers_of_this_python(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gcc = shutil.which("gcc")
    path = machine({"ldd": GOOD["ldd"]})
    (path / "gcc").symlink_to(str(gcc))
    if Path(HEADERS, "Python.h").exists():
        assert not list(install_warnings("gpu", is_new=False))
    monkeypatch.setattr("sysconfig.get_path", lambda *_: str(tmp_path))
    [line] = install_warnings("gpu", is_new=False)
    assert f"Python.h is not in {tmp_path}: install python3." in line


def test_a_short_disk_is_named_for_a_new_install_alone(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine(GOOD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "not/yet"))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=6e9))
    assert not list(install_warnings("gpu", is_new=False))
    assert not list(install_warnings("cpu", is_new=True))
    [line] = install_warnings("gpu", is_new=True)
    assert line.startswith(f"{tmp_path}: 6 GB are free, and the install takes 15 GB; free some")


def test_a_broken_nvidia_smi_lists_nothing(machine: Machine) -> None:
    for lines in (BROKEN, "echo 'No devices were found'"):
        machine({"nvidia-smi": lines})
        assert nvidia_cards() == []
    machine({"nvidia-smi": nvidia_smi("580.1", "NVIDIA L4")})
    assert nvidia_cards() == [("NVIDIA L4", "580.1")]
