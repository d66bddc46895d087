"""Check what panjue needs of a machine: disk, glibc, NVIDIA driver and card, C compiler.

`.ci/install` runs this file before anything is installed, so it imports only the standard library.
`python machine.py cpu|gpu [new]` warns of what is missing.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

DISK_GB = {"cpu": 5, "gpu": 15}
"""Disk space for a new install: .venv, whose files are hard links to uv's cache."""

GLIBC = {"aarch64": (2, 34), "x86_64": (2, 31)}
"""Processor -> the oldest glibc with which the wheels of llguidance run."""

DRIVER = 580
"""The oldest NVIDIA driver for CUDA 13, with which torch and vLLM of .ci/gpu.lock are built."""

CAPABILITY = (7, 5)
"""The lowest compute capability that CUDA 13 compiles for."""

FOR_CPU = "rm -r .venv, then KIND=cpu make install, and set CUDA_VISIBLE_DEVICES= (empty)"
"""How to compute on the CPU of a machine with a GPU, for messages."""

TIMEOUT_S = 30
"""Time limit for nvidia-smi, which can hang if the driver is broken."""


class Card(NamedTuple):
    """An NVIDIA GPU, and the version of its driver."""

    name: str
    driver: str


def install_warnings(kind: str, *, is_new: bool) -> Iterator[str]:
    """Yield what this machine lacks for an install of a kind, cpu or gpu, each with the way out.

    `is_new` says that there is no .venv yet.
    """
    if is_new:
        yield from short_disks(DISK_GB[kind])
    if problem := glibc_problem():
        yield problem
    if kind == "cpu":
        return
    if shutil.which("nvidia-smi"):
        yield from card_problems()
    if problem := compiler_problem():
        yield problem


def short_disks(needed_gb: int) -> Iterator[str]:
    """Yield a line for the disk of this folder, and of uv's cache, if space is short."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    cache = Path(os.environ.get("UV_CACHE_DIR") or caches / "uv")
    while not os.path.exists(cache):  # also False if it may not be read
        cache = cache.parent
    disks = {place.stat().st_dev: place for place in (cache, Path.cwd())}
    for place in disks.values():
        free_gb = shutil.disk_usage(place).free / 1e9
        if free_gb < needed_gb:
            yield (
                f"{place}: {free_gb:.0f} GB are free, and the install takes {needed_gb} GB; free "
                "some, or use another disk (UV_CACHE_DIR moves the downloads)"
            )


def glibc_problem() -> str:
    """Return a line if the C library is musl, or a glibc that is too old; else an empty text.

    An unknown version or processor counts as good.
    """
    _, said = said_by("ldd", "--version")
    first, _, _ = said.partition("\n")
    if "musl" in first:
        return "the C library is musl: torch and vLLM have no wheels for it; take a glibc Linux"
    version = re.search(r"(\d+)\.(\d+)$", first)
    needed = GLIBC.get(platform.machine())
    if version is None or needed is None or (int(version[1]), int(version[2])) >= needed:
        return ""
    return (
        f"glibc is {version[0]}: llguidance has wheels from {needed[0]}.{needed[1]} on, and is now "
        "built with Rust; install Rust (rustup.rs), or take a newer Linux"
    )


def card_problems() -> Iterator[str]:
    """Yield what is wrong with the NVIDIA driver and the cards of a machine with nvidia-smi."""
    cards = nvidia_cards()
    if not cards:
        _, said = said_by("nvidia-smi")
        first = said.strip().partition("\n")[0]
        yield f"nvidia-smi lists no GPU ({first}); install driver {DRIVER} or newer, and reboot"
        return
    driver = cards[0].driver
    if is_old(driver):
        yield (
            f"the NVIDIA driver is {driver}, and torch cannot use the GPU with one below {DRIVER}; "
            f"install a newer one and reboot, or compute on the CPU: {FOR_CPU}"
        )
    for name, capability in nvidia_smi("name", "compute_cap"):
        version = re.fullmatch(r"(\d+)\.(\d+)", capability)
        if version and (problem := card_problem(name, (int(version[1]), int(version[2])))):
            yield problem


def nvidia_cards() -> list[Card]:
    """Return the GPUs that nvidia-smi lists. CUDA_VISIBLE_DEVICES hides none from it."""
    return [Card(name, driver) for name, driver in nvidia_smi("name", "driver_version")]


def nvidia_smi(*fields: str) -> list[list[str]]:
    """Return these fields of each GPU; empty if nvidia-smi fails or does not know a field."""
    code, said = said_by("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
    rows = [line.split(", ") for line in said.splitlines()]
    return [] if code else [row for row in rows if len(row) == len(fields)]


def is_old(driver: str) -> bool:
    """Say whether a driver is too old for CUDA 13; False if its version is unknown."""
    number = re.match(r"\d+", driver)
    return number is not None and int(number[0]) < DRIVER


def card_problem(name: str, capability: tuple[int, int]) -> str:
    """Return a line if a card is too old for CUDA 13; else an empty text."""
    if capability >= CAPABILITY:
        return ""
    has, needed = (".".join(map(str, version)) for version in (capability, CAPABILITY))
    return (
        f"the {name} has compute capability {has}, and torch and vLLM need {needed}; choose "
        f"another with CUDA_VISIBLE_DEVICES=NUMBER, or compute on the CPU: {FOR_CPU}"
    )


def compiler_problem() -> str:
    """Return what Triton lacks to compile its module for Python, which it does at each start.

    Look for the same compiler as Triton (triton/runtime/build.py:25).
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    python = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
    needed = "answering on a GPU compiles with Triton"
    if compiler is None:
        return f"{needed}, and there is no C compiler: install gcc and {python}, or set CC=COMPILER"
    scheme = sysconfig.get_default_scheme()
    if scheme == "posix_local":  # Debian's own Python, which has no headers
        scheme = "posix_prefix"
    headers = sysconfig.get_path("include", scheme)
    program = "#include <Python.h>\n#include <stdlib.h>\n"
    code, said = said_by(compiler, "-fsyntax-only", f"-I{headers}", "-xc", "-", given=program)
    if code == 0:
        return ""
    if "Python.h" in said:
        return f"{needed}, and Python.h is not in {headers}: install {python}"
    errors = [line for line in said.splitlines() if "error" in line] or ["it cannot be run"]
    return f"{needed}, and {compiler} fails ({errors[0].strip()}): install gcc and libc6-dev"


def said_by(*command: str, given: str = "") -> tuple[int, str]:
    """Return exit code and output, with errors, of a command; 127 if it does not run or end."""
    try:
        done = subprocess.run(
            command,
            input=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return 127, ""
    return done.returncode, done.stdout


if __name__ == "__main__":
    for line in install_warnings(sys.argv[1], is_new="new" in sys.argv):
        print(f"warning: {line}")
