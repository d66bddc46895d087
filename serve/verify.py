"""Verify a bundle as a sealed stage would: in an empty folder, without a network."""

import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

from panjue.prompts.model import model_sha256
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_json, sha256
from panjue.prompts.plumbing.run import ANSWERS, Run
from panjue.serve.bundle import EXPECTED, SUMS, line_hashes, requirements, sums_of

NO_NETWORK = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c"]
NO_NETWORK += ['ip link set lo up 2>/dev/null; exec "$@"', "sh"]
"""Prefix of a command that cuts off the network, where the system allows it."""


def verify(packed: Path, cases: Path, base: Path | None = None) -> None:
    """Unpack into an empty folder, answer `cases` there without a network, compare the submission.

    Args:
        packed: The ZIP.
        cases: The test file of the run that was packed.
        base: Folder of the base model, if the ZIP has none.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        _unpack(packed, folder)
        if fault := changed(folder) or missing_package(folder / "requirements.txt"):
            raise UserError(f"{packed}: {fault}")
        expected = read_json(folder / EXPECTED)
        if sha256(cases) != expected["test_sha256"]:
            raise UserError(f"{cases}: is not the test file of the run that was packed")
        _bring_base(packed, folder, base)
        is_offline = _answer(packed, folder, cases)
        here = line_hashes(folder / ANSWERS / cases.stem / expected["submission"])
    if here != expected["lines"]:
        pairs = list(zip(here, expected["lines"], strict=False))
        other = [number for number, (new, old) in enumerate(pairs, start=1) if new != old]
        which = f"lines {other[:5]} ({len(other)} of {len(here)})"
        raise UserError(f"{packed}: gives another submission than the packed run: {which}")
    how = "without a network" if is_offline else "with a network: it cannot be cut off here"
    print(f"{packed}: runs by itself and gives the same answers ({how})")


def _unpack(packed: Path, folder: Path) -> None:
    try:
        with zipfile.ZipFile(packed) as archive:
            if SUMS not in archive.namelist():
                raise UserError(f"{packed}: is no bundle; `panjue bundle RUN OUT.zip` makes one")
            archive.extractall(folder)
    except (ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{packed}: {error}; pack it again") from None


def changed(folder: Path) -> str:
    """Return the first difference between the folder and the packed files; empty if none."""
    lines = (folder / SUMS).read_text("utf-8", errors="replace").splitlines()
    files = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    different = dict(sums_of(folder).items() ^ files.items())
    return f"{min(different)} was added, left out or changed" if different else ""


def missing_package(listed: Path) -> str:
    """Return a pinned package that is not installed here in its version; empty if none."""
    missing = set(listed.read_text("utf-8").splitlines()) - set(requirements())
    return f"needs {min(missing)}, which is not installed; see its MANUAL.md" if missing else ""


def _bring_base(packed: Path, folder: Path, base: Path | None) -> None:
    """Link the base to where the manual tells to put it, if the bundle has none."""
    if (folder / "base").exists() or not (folder / "adapter").exists():
        if base:
            raise UserError(f"{packed}: has its weights; leave --base out")
        return
    if base is None or not base.is_dir():
        raise UserError(f"{base or packed}: no base is there; say --base FOLDER")
    if model_sha256(base) != Run(folder).record.base_sha256:
        raise UserError(f"{base}: is not the base that {packed} was trained on")
    (folder / "base").symlink_to(base.resolve())


def _answer(packed: Path, folder: Path, cases: Path) -> bool:
    """Run the bundle's command, without the network if possible; return whether it was."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "HF_"))}
    env |= {"HF_HUB_OFFLINE": "1", "PYTHONNOUSERSITE": "1"}
    is_offline = (
        subprocess.run([*NO_NETWORK, "true"], capture_output=True, check=False).returncode == 0
    )
    command = [
        *(NO_NETWORK if is_offline else ()),
        sys.executable,
        "-P",
        "answer.py",
        cases.resolve(),
    ]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise UserError(f"{packed}: does not run: {said[-1] if said else 'no output'}")
    return is_offline
