"""What a sealed stage wants of a run, in one ZIP that answers a test file by itself."""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf
from packaging.requirements import Requirement

from panjue.prompts.card import write_card
from panjue.prompts.errors import UserError
from panjue.prompts.files import read_json, sha256, sync_names, write_json
from panjue.prompts.model import DECISION, model_files, model_folder, model_sha256
from panjue.prompts.task import load_task
from panjue.serve.merge import merge

ROOMS = ("prompts", "finetune", "serve", "eval")
HERE = Path(__file__).parent / "bundled"
"""What goes into every bundle as it is: the command and the manual."""

SUMS = "sums.json"
EPOCH = (1980, 1, 1, 0, 0, 0)
"""The time of every file, so that equal bundles are equal byte for byte."""

SETTINGS = ("task", "adapter", "constrained", "max_tokens", "seed", "engine", "sampling", "samples")
"""Of a generation, taken over as they were."""

Weights = Literal["none", "base", "merged"]


def bundle(run: Path, out: Path, weights: Weights = "none") -> None:
    """Pack a finished run: code, settings, prompts, labels, adapter, pins, manual and hashes.

    Args:
        run: Has a submission; it and its test file are not packed, their hashes are.
        out: The ZIP, which appears when it is whole.
        weights: Also pack the base, or the base with the adapter folded in.

    Raises:
        UserError: The run has no submission, or was answered by an endpoint.
    """
    made = read_json(run / "manifest.json").get("generate")
    if not made or not made.get("trained"):
        raise UserError(f"{run}: was not answered by an engine here; there is no model to pack")
    submission = load_task(made["task"]).handin.find(run)
    trained = Path(made["trained"])
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        base = _pack_model(folder, trained, weights)
        _pack_code(folder / "code" / "panjue")
        settings = {name: made[name] for name in SETTINGS if name in made} | {
            "solve": made.get("solve", {})
        }
        model = "merged" if weights == "merged" else trained.name
        settings |= {"run": "answers", "test": "test", "trained": model}
        (folder / "generate.yaml").write_text(OmegaConf.to_yaml(settings), "utf-8")
        if (trained.parent / "config.yaml").exists():
            config = OmegaConf.to_container(OmegaConf.load(trained.parent / "config.yaml"))
            (folder / "sft.yaml").write_text(OmegaConf.to_yaml(scrubbed(config)), "utf-8")
        (folder / "requirements.txt").write_text("\n".join(pins()) + "\n", "utf-8")
        shutil.copy(HERE / "answer.py", folder)
        manual = (HERE / "MANUAL.md").read_text("utf-8")
        python = ".".join(map(str, sys.version_info[:2]))
        told = manual.format(task=made["task"], base=base, python=python, name=submission.name)
        (folder / "MANUAL.md").write_text(told, "utf-8")
        expected = {
            "test_sha256": made["test_sha256"],
            "submission": submission.name,
            "submission_sha256": sha256(submission),
        }
        files = {name: sha256(folder / name) for name in _names(folder)}
        write_json(folder / SUMS, {"expected": expected, "files": files})
        _zip(folder, out)


def _pack_model(folder: Path, trained: Path, weights: Weights) -> str:
    """Copy what was trained, and the weights asked for; return what the manual says of the base."""
    made = read_json(trained / "manifest.json")
    name = str(made["base"])
    base = "base" if weights == "base" or Path(name).is_dir() else name
    copied = folder / trained.name
    shutil.copytree(trained, copied, ignore=shutil.ignore_patterns("training_args.bin"))
    digest = made["base_sha256"]
    if weights == "base":
        _copy_parts(model_folder(name), folder / "base")
        digest = model_sha256(folder / "base")
    if weights == "merged":
        whole = merge(trained, trained.with_name("merged"))
        shutil.copytree(whole, folder / "merged")
        decision = trained / DECISION
        if decision.exists():
            shutil.copy(decision, folder / "merged")
    for place in (copied, folder / "merged"):
        for path in place.glob("*.json"):
            if path.name in {"manifest.json", "adapter_config.json"}:
                content = {**read_json(path)}
                for key in ("base", "base_model_name_or_path"):
                    content |= {key: base} if content.get(key) else {}
                if "base_sha256" in content:
                    content["base_sha256"] = digest
                write_json(path, scrubbed(content))
        if (place / "manifest.json").exists():
            write_card(place, name=trained.parent.name)
    return f"{base} (SHA-256 {digest})"


def _copy_parts(model: Path, folder: Path) -> None:
    """Copy a model's files, but not what panjue noted of a base that it made itself."""
    folder.mkdir()
    for path in model_files(model):
        if path.name not in {"manifest.json", "labels.json"}:
            shutil.copy(path, folder)


def _pack_code(folder: Path) -> None:
    """Copy the code as it is installed."""
    for room in ROOMS:
        spec = find_spec(f"panjue.{room}")
        assert spec
        source = Path(str(spec.origin)).parent
        ignore = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")
        shutil.copytree(source, folder / room, ignore=ignore)


def scrubbed(value: Any) -> Any:
    """Return settings without absolute paths: of each its last part stays."""
    if isinstance(value, dict):
        return {key: scrubbed(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [scrubbed(inner) for inner in value]
    if isinstance(value, str) and value.startswith(("/", "~")):
        return Path(value).name
    return value


def pins() -> list[str]:
    """Return `name==version` of every installed package that panjue needs to train and answer."""
    found: dict[str, str] = {}
    waiting = [("panjue", frozenset({"train", "serve", "cpu", "gpu"}))]
    seen = set(waiting)
    while waiting:
        name, extras = waiting.pop()
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # of the other kind of machine
        found[package.metadata["Name"].lower().replace("_", "-")] = package.version
        for text in package.requires or ():
            wanted = Requirement(text)
            marker = wanted.marker
            if marker and not any(marker.evaluate({"extra": e}) for e in (*extras, "")):
                continue
            more = (wanted.name.lower().replace("_", "-"), frozenset(wanted.extras))
            if more not in seen:
                seen.add(more)
                waiting.append(more)
    del found["panjue"]
    return sorted(f"{name}=={version}" for name, version in found.items())


def _names(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def _zip(folder: Path, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = out.with_name(f".{out.name}.tmp")
    try:
        with zipfile.ZipFile(aside, "w", zipfile.ZIP_DEFLATED) as packed:
            for name in _names(folder):
                entry = zipfile.ZipInfo(name, EPOCH)
                entry.compress_type = zipfile.ZIP_DEFLATED
                with (folder / name).open("rb") as source, packed.open(entry, "w") as target:
                    shutil.copyfileobj(source, target)
        sync_names(aside)
        aside.replace(out)
    finally:
        aside.unlink(missing_ok=True)


def verify(packed: Path, cases: Path, base: Path | None = None) -> None:
    """Unpack into an empty folder, answer `cases` there without a network, compare the submission.

    Args:
        packed: The ZIP.
        cases: The test file of the run that was packed.
        base: The base model's folder, where the ZIP has no weights.

    Raises:
        UserError: A file is not what was packed, a package is another, or the answers differ.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "bundle"
        try:
            with zipfile.ZipFile(packed) as archive:
                archive.extractall(folder)
        except (OSError, zipfile.BadZipFile, zipfile.LargeZipFile) as error:
            raise UserError(f"{packed}: {error}") from None
        sums = read_json(folder / SUMS)
        for fault in [*changed(folder, sums["files"]), *other_packages(folder)]:
            raise UserError(f"{packed}: {fault}")
        expected = sums["expected"]
        if sha256(cases) != expected["test_sha256"]:
            raise UserError(f"{cases}: is not the test file of the run that was packed")
        if base and not (folder / "base").exists():
            (folder / "base").symlink_to(base.resolve())
        answers = Path(place) / "answers"
        words = [
            sys.executable,
            "-P",
            str(folder / "answer.py"),
            str(cases.resolve()),
            str(answers),
        ]
        done = subprocess.run(
            [*alone(), *words], cwd=place, env=bare(), capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise UserError(f"{packed}: does not run: {_last(done.stderr or done.stdout)}")
        if sha256(answers / expected["submission"]) != expected["submission_sha256"]:
            raise UserError(f"{packed}: answers otherwise than the run that was packed")


def changed(folder: Path, files: dict[str, str]) -> Iterator[str]:
    """Yield what is not as it was packed."""
    there = set(_names(folder)) - {SUMS}
    for name in sorted(there | set(files)):
        if name not in there:
            yield f"{name} is missing"
        elif name not in files:
            yield f"{name} was not packed"
        elif sha256(folder / name) != files[name]:
            yield f"{name} is not what was packed"


def other_packages(folder: Path) -> Iterator[str]:
    """Yield what is installed here in another version than was pinned, or not at all."""
    for line in (folder / "requirements.txt").read_text("utf-8").split():
        name, _, version = line.partition("==")
        try:
            here = metadata.version(name)
        except metadata.PackageNotFoundError:
            here = "none"
        if here != version:
            yield f"needs {line}, here is {here}; pip install -r requirements.txt"


def alone() -> list[str]:
    """Return the words that run a command without a network, where this user may."""
    words = ["unshare", "--net", "sh", "-c", 'ip link set lo up 2>/dev/null; exec "$@"', "sh"]
    try:
        done = subprocess.run([*words, "true"], capture_output=True, check=False)
    except OSError:
        return []
    return words if done.returncode == 0 else []


def bare() -> dict[str, str]:
    """Return an environment that knows nothing of this checkout and asks no hub."""
    kept = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "LD_PRELOAD", "TMPDIR")
    ours = {key: os.environ[key] for key in kept if key in os.environ}
    return {**ours, "HF_HUB_OFFLINE": "1", "PYTHONNOUSERSITE": "1"}


def _last(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no word")


def main(run: Path, out: Path, weights: Weights) -> None:
    """Pack and say what is in it."""
    bundle(run, out, weights)
    with zipfile.ZipFile(out) as packed:
        count = len(packed.namelist())
    size = out.stat().st_size / 2**20
    print(f"written: {out}, {count} files, {size:.1f} MiB, SHA-256 {sha256(out)}")
