"""Verify a bundle as a sealed stage would: in an empty folder, without a network."""

import os
import subprocess
import sysconfig
import tempfile
import venv
import zipfile
import zlib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from panjue.prompts.model import model_sha256
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import ANSWERS, generation, read_json, sha256
from panjue.serve.bundle import EXPECTED, SUMS, names_in, row_hashes

NO_NETWORK = (["unshare", "--net"], ["unshare", "--user", "--map-root-user", "--net"])
"""Commands that cut off the network: as root, and as a user if the system allows it."""


def main(packed: Path, cases: Path, base: Path | None) -> None:
    """Verify and print the result."""
    is_offline = verify(packed, cases, base)
    how = "without a network" if is_offline else "with a network: it cannot be cut off here"
    print(f"{packed}: runs by itself and gives the same answers ({how})")


def verify(packed: Path, cases: Path, base: Path | None = None) -> bool:
    """Unpack into an empty folder, answer `cases` there without a network, compare the submission.

    Only the pinned packages are visible to it.

    Args:
        packed: The ZIP.
        cases: The test file of the run that was packed.
        base: Folder of the base model, if the ZIP has no weights.

    Returns:
        Whether the network was cut off.

    Raises:
        UserError: A file has changed, a package has another version, or the answers differ.
    """
    if not cases.exists():
        raise UserError(f"{cases}: there is no such file")
    with tempfile.TemporaryDirectory() as place:
        folder, answers = Path(place) / "bundle", Path(place) / "answers"
        _unpack(packed, folder)
        pinned = folder / "requirements.txt"
        if faults := [*changed(folder)] or [*other_packages(pinned)]:
            more = f" ({len(faults)} such faults)" if faults[1:] else ""
            raise UserError(f"{packed}: {faults[0]}{more}")
        expected = read_json(folder / EXPECTED)
        if sha256(cases) != expected["test_sha256"]:
            raise UserError(f"{cases}: is not the test file of the run that was packed")
        _bring_base(packed, folder, base)
        cut_off = offline_prefix()
        python = only_pinned(Path(place) / "venv", pinned)
        words = map(str, (python, "-P", folder / "answer.py", cases.resolve(), answers))
        done = subprocess.run(
            [*cut_off, *words],
            cwd=place,
            env=minimal_environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise UserError(f"{packed}: does not run: {_last(done.stderr or done.stdout)}")
        submission = answers / ANSWERS / "test" / expected["submission"]
        if sha256(submission) != expected["submission_sha256"]:
            task = generation(folder)["task"]
            here = row_hashes(task, submission)
            other = [key for key, digest in expected["rows"].items() if here.get(key) != digest]
            which = f"id {other[0]} first ({len(other)} of {len(here)})" if other else "in its form"
            raise UserError(f"{packed}: gives other answers than the packed run, {which}")
        return bool(cut_off)


def _unpack(packed: Path, folder: Path) -> None:
    try:
        with zipfile.ZipFile(packed) as archive:
            if SUMS not in archive.namelist():
                raise UserError(f"{packed}: is no bundle; `panjue bundle RUN OUT.zip` makes one")
            archive.extractall(folder)
    except OSError as error:
        raise UserError(f"{packed}: {error.strerror}") from None
    except (ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{packed}: {error}; pack it again") from None


def _bring_base(packed: Path, folder: Path, base: Path | None) -> None:
    """Link the base to where the manual tells to put it, if the bundle has none.

    Raises:
        UserError: It is needed but not given, given but not needed, or is another base.
    """
    needed = (folder / "adapter").exists() and not (folder / "base").exists()
    if not needed or (folder / "merged").exists():
        if base:
            raise UserError(f"{packed}: has its weights; leave --base out")
        return
    if base is None or not base.is_dir():
        raise UserError(f"{base or packed}: no base is there; say --base FOLDER")
    made = read_json(folder / "adapter" / "manifest.json")
    if model_sha256(base) != made["base_sha256"]:
        raise UserError(f"{base}: is not the base that {packed} was trained on")
    (folder / "base").symlink_to(base.resolve())


def changed(folder: Path) -> Iterator[str]:
    """Yield every difference between the folder and the packed files."""
    lines = (folder / SUMS).read_bytes().decode("utf-8", "replace").splitlines()
    if not all("  " in line for line in lines):
        yield f"{SUMS} is broken; pack it again"
        return
    files = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    there = set(names_in(folder)) - {SUMS}
    for name in sorted(there | set(files)):
        if name not in there:
            yield f"{name} is missing"
        elif name not in files:
            yield f"{name} was not packed"
        elif sha256(folder / name) != files[name]:
            yield f"{name} is not what was packed"


def pinned_in(listed: Path) -> dict[str, str]:
    """Return name -> version of the packages in a bundle's requirements.txt."""
    lines = listed.read_text("utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith(("#", "--")))


def other_packages(listed: Path) -> Iterator[str]:
    """Yield the pinned packages that are not installed here, or in another version."""
    for name, version in pinned_in(listed).items():
        try:
            here = metadata.version(name)
        except metadata.PackageNotFoundError:
            here = "none"
        if here != version:
            yield f"needs {name}=={version}, here is {here}; see its MANUAL.md"


def only_pinned(folder: Path, listed: Path) -> Path:
    """Make an environment with only the pinned packages, by links to the installed ones.

    Returns:
        Its Python.
    """
    venv.create(folder, symlinks=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    for name in pinned_in(listed):
        package = metadata.distribution(name)
        for file in package.files or ():
            # Whole packages; outside them (bin/, lib/) single files.
            part = file if file.parts[0] == ".." else Path(file.parts[0])
            link, here = Path(os.path.normpath(site / part)), Path(str(package.locate_file(part)))
            if here.exists() and not link.exists():
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(here.resolve())
    return folder / "bin" / "python"


def offline_prefix() -> list[str]:
    """Return a command prefix that cuts off the network; empty if that is not allowed here."""
    for way in NO_NETWORK:
        words = [*way, "sh", "-c", 'ip link set lo up 2>/dev/null; exec "$@"', "sh"]
        try:
            if subprocess.run([*words, "true"], capture_output=True, check=False).returncode == 0:
                return words
        except OSError:
            return []
    return []


def minimal_environment() -> dict[str, str]:
    """Return an environment without paths of this checkout, and with the hub switched off."""
    kept = (
        "PATH",
        "HOME",
        "LANG",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "TMPDIR",
        "CUDA_VISIBLE_DEVICES",
    )
    ours = {
        key: value
        for key, value in os.environ.items()
        if key in kept or (key.startswith("VLLM_") and not key.endswith("KEY"))
    }
    return {**ours, "HF_HUB_OFFLINE": "1", "PYTHONNOUSERSITE": "1"}


def _last(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no output")
