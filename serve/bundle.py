"""Pack a run into one ZIP that answers a test file by itself, and verify such a ZIP.

The unpacked ZIP is a run folder (adapter, config.yaml) together with the code that answers.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterable
from importlib import metadata
from itertools import zip_longest
from pathlib import Path

from omegaconf import OmegaConf

from panjue.eval.decoding import decoding_of
from panjue.prompts.model import model_files, model_sha256, prompt_sha256
from panjue.prompts.plumbing.config import load_values, scrubbed
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_json, sha256, write_json
from panjue.prompts.plumbing.run import ANSWERS, MANIFEST, Answers, Run, RunRecord, find_answers
from panjue.prompts.task import load_task
from panjue.serve.merge import check_base
from panjue.serve.settings import GenerateConfig

FOLDERS = ("prompts", "finetune", "serve", "eval")
HERE = Path(__file__).parent / "bundled"
SUMS = "SHA256SUMS"  # the hash of every other file, as `sha256sum --check` reads it
EXPECTED = "expected.json"  # hashes of the test file and of each line of the submission

TORCH = "https://download.pytorch.org/whl"
"""Index with builds, such as `cpu`, that PyPI does not have."""


def bundle(run: Path, out: Path, base: str | None = None) -> None:
    """Pack a finished run: code, settings, prompts, labels, weights, versions, manual, hashes.

    `run` may also be one folder of answers; of these and the test file only hashes are packed.
    `base` is the base model, if it was moved.
    """
    if out.is_dir():
        raise UserError(f"{out}: is a folder; name the ZIP")
    answers = find_answers(run)
    if answers is None:
        raise UserError(f"{run}: has no answers; `panjue generate` makes them")
    record, trained = answers.record, _trained(answers)
    submission = load_task(record.task).data.submission.find(answers.folder)
    if decoding_of(submission) is None:
        raise UserError(f"{submission}: was changed since; `panjue decode {run}` makes it again")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        packed = _pack_model(folder, trained, base)
        _pack_code(folder / "code" / "panjue")
        settings = set(GenerateConfig.model_fields) - {"task", "endpoint"}
        sections = scrubbed(load_values(Run(trained.parent).config))
        # By whom it was answered, not `auto`: the ZIP has no held-out cases to choose by.
        answer = {"answer": record.answered_by}
        sections["generate"] = record.model_dump(include=settings) | answer
        (folder / "config.yaml").write_text(OmegaConf.to_yaml(sections), "utf-8")
        (folder / "requirements.txt").write_text("\n".join(requirements()) + "\n", "utf-8")
        shutil.copy(HERE / "answer.py", folder)
        _write_manual(folder, packed, submission.name)
        expected = {"test_sha256": record.test_sha256, "lines": line_hashes(submission)}
        write_json(folder / EXPECTED, {"submission": submission.name, **expected})
        sums = (f"{digest}  {name}\n" for name, digest in sums_of(folder).items())
        (folder / SUMS).write_text("".join(sums), "utf-8")
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = out.with_name(f".{out.name}.{os.getpid()}.zip")
        try:
            shutil.make_archive(str(temporary.with_suffix("")), "zip", folder)
            temporary.replace(out)
        finally:
            temporary.unlink(missing_ok=True)  # where the disk is full, say
    print(f"written: {out}, {out.stat().st_size / 2**20:.1f} MiB, SHA-256 {sha256(out)}")


def _trained(answers: Answers) -> Path:
    """Return the adapter or model that answered."""
    record, trained, again = answers.record, answers.trained, "run `panjue generate` again"
    if trained is None or not record.is_of_adapter:
        raise UserError(f"{answers.folder}: no fine-tuned model answered; there is none to pack")
    if not trained.is_dir() or model_sha256(trained) != record.trained_sha256:
        raise UserError(f"{trained}: is not what {answers.folder} was answered with; {again}")
    if prompt_sha256(record.task) != record.prompt_sha256:
        raise UserError(f"{answers.folder}: was asked with another prompt than now; {again}")
    return trained


def _pack_model(folder: Path, trained: Path, base: str | None) -> RunRecord:
    """Copy the model, or the adapter and its base; return the record without paths."""
    record, packed = RunRecord.read(trained), folder / trained.name
    _copy(model_files(trained), packed)
    values = {**scrubbed(record.model_dump(exclude_unset=True)), "base": "base"}
    if (config := packed / "adapter_config.json").exists():
        # Records of a base that panjue trained itself are not packed.
        files = model_files(check_base(trained, record, base))
        unnamed = (path for path in files if path.name not in {MANIFEST, "labels.json"})
        _copy(unnamed, folder / "base")
        values["base_sha256"] = model_sha256(folder / "base")
        write_json(config, {**scrubbed(read_json(config)), "base_model_name_or_path": "../base"})
    record = RunRecord.model_validate(values)
    record.write(packed)
    return record


def _copy(files: Iterable[Path], folder: Path) -> None:
    folder.mkdir()
    for path in files:
        shutil.copy(path, folder)


def _pack_code(folder: Path) -> None:
    """Copy the installed code, without samples, and without settings that may be the user's own."""
    ignore = shutil.ignore_patterns("__pycache__", "configs", "sample*")
    for name in FOLDERS:
        shutil.copytree(HERE.parents[1] / name, folder / name, ignore=ignore)


def requirements() -> list[str]:
    """Return a requirements.txt of every installed package (for pip's --no-deps)."""
    found = {d.metadata["Name"].lower(): d.version for d in metadata.distributions()}
    pins = sorted(f"{name}=={version}" for name, version in found.items() if name != "panjue")
    builds = {line.partition("+")[2] for line in pins if line.startswith("torch==")} - {""}
    return [*(f"--extra-index-url {TORCH}/{build}" for build in builds), *pins]


def _write_manual(folder: Path, record: RunRecord, submission: str) -> None:
    python = ".".join(map(str, sys.version_info[:2]))
    words = {**record.model_dump(), "name": submission, "python": python}
    manual = (HERE / "MANUAL.md").read_text("utf-8").format(**words)
    (folder / "MANUAL.md").write_text(manual, "utf-8")


def line_hashes(path: Path) -> list[str]:
    """Return the hash of each line, so that an error can name the lines that differ."""
    lines = path.read_bytes().splitlines(keepends=True)
    return [hashlib.sha256(line).hexdigest()[:16] for line in lines]


def sums_of(folder: Path) -> dict[str, str]:
    """Return name -> hash of all files in a folder but `SUMS`, sorted by name."""
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: sha256(files[name]) for name in sorted(files.keys() - {SUMS})}


def verify(packed: Path, cases: Path) -> None:
    """Unpack into an empty folder, answer `cases` there, and compare the submission."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        _unpack(packed, folder)
        if fault := changed(folder):
            raise UserError(f"{packed}: {fault}")
        expected = read_json(folder / EXPECTED)
        if sha256(cases) != expected["test_sha256"]:
            raise UserError(f"{cases}: is not the test file of the run that was packed")
        _answer(packed, folder, cases)
        here = line_hashes(folder / ANSWERS / cases.stem / expected["submission"])
    if here != expected["lines"]:
        pairs = enumerate(zip_longest(here, expected["lines"]), start=1)
        other = [number for number, (new, old) in pairs if new != old]
        which = f"lines {other[:5]} ({len(other)} of {len(here)})"
        raise UserError(f"{packed}: gives another submission than the packed run: {which}")
    print(f"{packed}: runs by itself and gives the same answers")


def _unpack(packed: Path, folder: Path) -> None:
    try:
        with zipfile.ZipFile(packed) as archive:
            if SUMS not in archive.namelist():
                raise UserError(f"{packed}: is no bundle; `panjue bundle RUN OUT.zip` makes one")
            archive.extractall(folder)
    except (ValueError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{packed}: {error}; pack it again") from None


def changed(folder: Path) -> str:
    """Return the first difference between the folder and the packed files; empty if none."""
    lines = (folder / SUMS).read_text("utf-8", errors="replace").splitlines()
    files = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    different = dict(sums_of(folder).items() ^ files.items())
    return f"{min(different)} was added, left out or changed" if different else ""


def _answer(packed: Path, folder: Path, cases: Path) -> None:
    """Run the bundle's command, which may not ask the hub for anything."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "HF_"))}
    env |= {"HF_HUB_OFFLINE": "1", "PYTHONNOUSERSITE": "1"}
    command = [sys.executable, "-P", "answer.py", str(cases.resolve())]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise UserError(f"{packed}: does not run: {said[-1] if said else 'no output'}")
