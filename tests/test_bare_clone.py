"""What CI runs: everything in a clone that has nothing beside it, then the tests of real data."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

MAKEFILE = """
install check test:
\techo $@ in $(CURDIR) with $$(ls -A ..), data "$$PANJUE_DATA"
\tmkdir -p .venv/bin; cp pytest .venv/bin/pytest
\t! grep -qx $@ fails
.SILENT:
"""

CI = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def ci(tmp_path: Path) -> CI:
    """Return what runs .ci/run on a checkout of stand-ins, in which some of them fail."""
    if not shutil.which("git"):
        pytest.skip("no git")
    checkout = tmp_path / "a b/checkout"
    (checkout / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci/run", checkout / ".ci/run")
    (checkout / "Makefile").write_text(MAKEFILE, "utf-8")
    (checkout / "fails").touch()
    for program in (checkout / "pytest", tmp_path / "bin/chromium"):
        program.parent.mkdir(exist_ok=True)
        lines = '#!/bin/sh\necho "pytest $@, data $PANJUE_DATA"\n! grep -qx pytest fails\n'
        program.write_text(lines, "utf-8")
        program.chmod(0o755)
    (tmp_path / "tmp").mkdir()
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    environment = {"PATH": path, "HOME": str(tmp_path / "bin"), "TMPDIR": f"{tmp_path}/tmp"}

    def run(fails: str = "", **more: str) -> subprocess.CompletedProcess[str]:
        (checkout / "fails").write_text(f"{fails}\n", "utf-8")
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        for words in (("init", "-q"), ("add", "."), (*who, "commit", "-qm", "a", "--allow-empty")):
            subprocess.run(["git", *words], cwd=checkout, env=environment, check=True)
        (checkout / "not committed").touch()
        done = subprocess.run(
            [checkout / ".ci/run"],
            env={**environment, **more},
            capture_output=True,
            text=True,
            check=False,
        )
        assert list((tmp_path / "tmp").iterdir()) == [], "nothing is left"
        return done

    return run


def test_ci_runs_all_in_a_clone_with_nothing_beside_it(ci: CI, tmp_path: Path) -> None:
    done = ci(PANJUE_DATA="/")
    assert (done.returncode, done.stderr) == (0, "")
    *lines, last = done.stdout.splitlines()
    for line, target in zip(lines, ("install", "check", "test"), strict=True):
        place = rf"{tmp_path}/tmp/[^/]+/alone/panjue"
        assert re.fullmatch(rf"{target} in {place} with panjue, data ", line)
    assert last == "pytest -m real_data, data /"


def test_real_data_lies_beside_the_checkout_or_is_not_tested(ci: CI, tmp_path: Path) -> None:
    data = tmp_path / "a b/shared/data"
    assert ci().stdout.endswith(f"{data}: no such folder; the tests of real data were skipped\n")
    data.mkdir(parents=True)
    assert ci().stdout.endswith(f"pytest -m real_data, data {data}\n")


@pytest.mark.parametrize("step", ["install", "check", "test", "pytest"])
def test_ci_fails_with_its_first_step_that_fails(ci: CI, step: str) -> None:
    done = ci(step, PANJUE_DATA="/")
    assert done.returncode != 0
    assert step in done.stdout.splitlines()[-1]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_the_checkout_may_be_another_user_s(ci: CI, tmp_path: Path) -> None:
    ci()
    for path in (tmp_path / "a b").rglob("*"):
        os.chown(path, 12345, 12345)
    words = [tmp_path / "a b/checkout/.ci/run"]
    subprocess.run(words, env={"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}, check=True)
