"""Stand-ins for the programs that say what a machine has."""

from collections.abc import Callable
from pathlib import Path

import pytest

GOOD = {"ldd": "echo 'ldd (Ubuntu GLIBC 2.35-0ubuntu3) 2.35'", "gcc": "exit 0"}
"""Of a machine that lacks nothing."""

Machine = Callable[..., Path]


def nvidia_smi(driver: str = "580.65.06", card: str = "NVIDIA T4", capability: str = "7.5") -> str:
    """Return the lines of an nvidia-smi that lists one GPU; it refuses any other question."""
    return f"""case "$1 $2" in
"--query-gpu=name,driver_version --format=csv,noheader") echo "{card}, {driver}";;
"--query-gpu=name,compute_cap --format=csv,noheader") echo "{card}, {capability}";;
*) exit 1;; esac"""


def write_programs(folder: Path, programs: dict[str, str]) -> None:
    """Write shell scripts to a folder: name -> lines."""
    folder.mkdir(exist_ok=True)
    for name, lines in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{lines}\n", "utf-8")
        (folder / name).chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return what makes the machine one that has these programs alone, and hides no GPU."""

    def has(programs: dict[str, str]) -> Path:
        folder = tmp_path / "programs"
        write_programs(folder, programs)
        monkeypatch.setenv("PATH", str(folder))
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr("platform.machine", lambda: "x86_64")
        return folder

    return has
