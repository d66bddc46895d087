"""Version and commit of panjue, for records, messages and the machines of a cluster."""

import os
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The checkout, or the folder `panjue` of an installed package or of a bundle."""

IN_BUNDLE = "version.txt"
"""File with the version in `ROOT` of a bundle, which has neither git nor an installed package."""

GIT_TIMEOUT_S = 5.0


@cache
def panjue_version() -> str:
    """Return the version; with the commit if the code lies in a checkout of panjue.

    For example `0.5.0+a2586c4c`. `.dirty` follows if a tracked file was changed since.
    """
    bundled = ROOT / IN_BUNDLE
    if bundled.is_file():
        return bundled.read_text("utf-8").strip()
    try:
        release = version("panjue")
    except PackageNotFoundError:
        release = "unknown"
    commit = _commit()
    return f"{release}+{commit}" if commit else release


def _commit() -> str:
    """Return the commit of the checkout; empty if this is no checkout, or if git cannot say."""
    if not (ROOT / ".git").exists():  # a .venv may lie in somebody else's repository
        return ""
    # Without the variables of a git hook, which name another repository. A checkout may belong to
    # another user.
    environment = {name: os.environ[name] for name in os.environ if not name.startswith("GIT_")}
    git = ["git", "--no-optional-locks", "-c", f"safe.directory={ROOT}", "-C", str(ROOT)]
    describe = ["describe", "--always", "--exclude=*", "--abbrev=8", "--dirty=.dirty"]
    try:
        done = subprocess.run(
            [*git, *describe],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=GIT_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
