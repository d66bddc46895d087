"""Pack a run into one ZIP that can answer a test file, and verify such a ZIP.

The unpacked ZIP is a run folder (adapter, config.yaml) with the code that answers.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from pydantic import BaseModel, ValidationError

from panjue.finetune.trained import Trained
from panjue.prompts.fingerprint import base_files, base_sha256, model_sha256
from panjue.prompts.model import model_files, prompt_sha256
from panjue.prompts.plumbing.config import first_complaint, load_values, scrubbed
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import read_json, replace, sha256, write_json
from panjue.prompts.plumbing.ours import followed, refuse_foreign
from panjue.prompts.plumbing.records import (
    CHOICE,
    CHOSEN,
    MANIFEST,
    AnswersRecord,
    Choice,
    Choices,
    RunRecord,
    if_any,
)
from panjue.prompts.plumbing.run import ADAPTER_CONFIG, ANSWERS, CONFIG, RESULTS
from panjue.prompts.plumbing.version import IN_BUNDLE, panjue_version
from panjue.prompts.task import load_task, task_folders
from panjue.serve.answers import Answers, choice_for, folder_meant, read_answers
from panjue.serve.decoding import decoding_of
from panjue.serve.merge import check_base
from panjue.serve.settings import GenerateConfig

VERIFIED = "verified"  # name of the answers that `--verify` makes in an unpacked bundle

FOLDERS = ("prompts", "finetune", "serve", "eval")
HERE = Path(__file__).parent / "bundled"
EXPECTED = "expected.json"
HASHES = "files.json"
"""File with the hash of each file of a bundle. `answer.py` compares them before it answers."""

OTHER_TASK = re.compile(r"panjue\.prompts\.tasks\.(\w+)")
"""How code imports from the folder of a task."""

TORCH = "https://download.pytorch.org/whl"
"""Index with builds, such as `cpu`, that are not on PyPI."""


class Expected(BaseModel):
    """The submission that a bundle should make again: its file `expected.json`."""

    submission: str  # the name of its test file
    test_sha256: str
    sha256: str  # of the submission
    panjue: str = ""
    """Version and commit of panjue that packed it; `code/panjue/version.txt` has them, too."""


def bundle(run: Path, out: Path, base: str | None = None) -> None:
    """Pack a finished run: code, settings, prompts, labels, weights, versions, manual.

    `run` may also be a folder of answers. Of answers and test file, only the hashes are packed
    (`Expected`), for a comparison after the ZIP has answered the test file again. `base` is the
    base model, if it was moved.
    """
    if out.is_dir():
        raise UserError(f"{out}: is a folder; name the ZIP")
    refuse_foreign(out, is_bundle, "OUT.zip")
    answers = read_answers(folder_meant(run))
    if answers.changed:
        raise UserError(f"{answers.folder}: {answers.changed}; run `panjue generate` again")
    if limit := answers.record.limit:
        way_out = "answer all without `limit`"
        raise UserError(f"{answers.folder}: has the first {limit} cases alone; {way_out}")
    trained = _model_of(answers)
    if chosen := if_any(Choice, trained.run / CHOSEN):
        # In words, `chosen` is "adapter of step 80, chosen by ... on 500 held-out cases".
        has_answered = trained.run / chosen.adapter == trained.folder
        print(chosen if has_answered else f"{trained.folder}: answered, and not the {chosen}")
    submission = load_task(answers.record.task).data.submission.find(answers.folder)
    decoding = decoding_of(submission)
    if decoding is None:
        raise UserError(f"{submission}: was changed since; `panjue decode {run}` makes it again")
    choice = choice_for(trained, answers.record)
    if trained.has_classifier:
        _refuse_other_choice(answers, decoding, choice)
    expected = Expected(
        submission=submission.name,
        test_sha256=answers.record.test_sha256,
        sha256=sha256(submission),
        panjue=panjue_version(),
    )
    parent = followed(out).parent
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".bundle-", dir=parent) as place:
        folder = Path(place, "bundle")
        adapter_name, model_name = RESULTS
        packed = folder / (adapter_name if trained.is_adapter else model_name)
        _pack_model(packed, trained, base)
        _pack_code(folder, submission.name, answers.record)
        _pack_settings(folder, answers.record, decoding, trained.run / CONFIG)
        if choice:
            asked = {**choice.asked, "engine": scrubbed(choice.asked["engine"])}  # without paths
            # A choice has the hash of its model. The packed model has another one, since the record
            # in its folder is packed without paths.
            own = choice.of_model(model_sha256(packed)).model_copy(update={"asked": asked})
            write_json(packed / CHOICE, Choices(choices=(own,)).model_dump(mode="json"))
        write_json(folder / EXPECTED, expected.model_dump())
        files = sorted(filter(Path.is_file, folder.rglob("*")))
        hashes = {path.relative_to(folder).as_posix(): sha256(path) for path in files}
        write_json(folder / HASHES, hashes)
        archive = folder.with_suffix(".zip")
        _write_zip(folder, archive)
        replace(archive, out, is_bundle)
    print(f"written: {out}, {out.stat().st_size / 2**20:.1f} MiB, SHA-256 {sha256(out)}")


def _write_zip(folder: Path, out: Path) -> None:
    """Pack names and contents of the files of a folder; equal files give a ZIP of equal hash."""
    with zipfile.ZipFile(out, "w") as archive:
        for path in sorted(filter(Path.is_file, folder.rglob("*"))):
            entry = zipfile.ZipInfo(path.relative_to(folder).as_posix())  # dates of 1980
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16  # the permissions of the file
            entry.file_size = path.stat().st_size  # above 4 GB, ZIP has another format
            with path.open("rb") as content, archive.open(entry, "w") as packed:
                shutil.copyfileobj(content, packed)


def is_bundle(path: Path) -> bool:
    """Say whether `bundle` has packed a file."""
    if not (path.is_file() and zipfile.is_zipfile(path)):
        return False
    with suppress(zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
        return {EXPECTED, "answer.py", "MANUAL.md"} <= set(archive.namelist())
    return False


def _model_of(answers: Answers) -> Trained:
    """Return the adapter or model that answered; refuse answers that it would not make again."""
    record = answers.record
    trained = answers.trained
    again = "run `panjue generate` again"
    if trained is None or not record.is_of_adapter:
        raise UserError(f"{answers.folder}: no fine-tuned model answered; there is none to pack")
    if prompt_sha256(record.task) != record.prompt_sha256:
        raise UserError(f"{answers.folder}: was asked with another prompt than now; {again}")
    return trained


def _refuse_other_choice(
    answers: Answers, decoding: Mapping[str, Any], choice: Choice | None
) -> None:
    """Refuse answers if others would answer in the bundle, where `choice` decides for `auto`.

    `decoding` is the `decode.json` of the answers; its `by_field` says who answered each field.
    """
    by_field = decoding.get("by_field")
    if decoding.get("answer") != "auto" or not by_field:  # nothing is left to a choice
        return
    if choice is None or choice.answered_by != by_field:
        other = "who answers is no longer as it was decoded"
        again = f"`panjue decode {answers.folder}` first, with answer= if nobody has decided"
        raise UserError(f"{answers.folder}: {other}; {again}")


def _pack_model(packed: Path, trained: Trained, base: str | None) -> None:
    """Copy the model, or the adapter with its base, and the record without paths."""
    record = trained.record
    folder = packed.parent
    _copy(model_files(trained.folder), packed)
    values = {**scrubbed(record.model_dump(exclude_unset=True)), "base": "base"}
    config = packed / ADAPTER_CONFIG
    if config.exists():
        # Records of a base that panjue trained itself are not packed.
        files = model_files(check_base(trained, base))
        weights = (path for path in files if path.name not in {MANIFEST, "labels.json"})
        _copy(weights, folder / "base")
        values["base_files"] = base_files(folder / "base")
        values["base_sha256"] = base_sha256(values["base_files"])
        write_json(config, {**scrubbed(read_json(config)), "base_model_name_or_path": "../base"})
    RunRecord.model_validate(values).write(packed)


def _copy(files: Iterable[Path], folder: Path) -> None:
    folder.mkdir(parents=True)
    for path in files:
        shutil.copy(path, folder)


def _pack_code(folder: Path, submission: str, record: AnswersRecord) -> None:
    """Copy the installed code and the command, and write the manual.

    Leave out samples, and configs, which may be the user's own.
    """
    ignore = shutil.ignore_patterns("__pycache__", "configs", "sample*")
    for name in FOLDERS:
        shutil.copytree(HERE.parents[1] / name, folder / "code/panjue" / name, ignore=ignore)
    tasks = folder / "code/panjue/prompts/tasks"
    needed = tasks_needed(record.task, tasks)
    for other in task_folders():
        if other not in needed:
            shutil.rmtree(tasks / other)
    (folder / "code/panjue" / IN_BUNDLE).write_text(panjue_version() + "\n", "utf-8")
    shutil.copy(HERE / "answer.py", folder)
    manual = (HERE / "MANUAL.md").read_text("utf-8")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    text = manual.format(task=record.task, name=submission, python=python)
    (folder / "MANUAL.md").write_text(text, "utf-8")


def tasks_needed(task: str, folder: Path) -> set[str]:
    """Return the tasks whose folders a task imports from, and the task itself."""
    needed: set[str] = set()
    found = {task}
    while found:
        name = found.pop()
        needed.add(name)
        for file in (folder / name).rglob("*.py"):
            found |= set(OTHER_TASK.findall(file.read_text("utf-8"))) & task_folders().keys()
        found -= needed
    return needed


def _pack_settings(
    folder: Path, record: AnswersRecord, decoding: Mapping[str, Any], config: Path
) -> None:
    """Write config.yaml, with the settings of training and answers, and requirements.txt.

    `decoding` is the `decode.json` of the answers. `scrubbed` keeps only the last part of a path.
    """
    sections = scrubbed(load_values(config))
    names = set(GenerateConfig.model_fields) - {"task", "endpoint"}  # the training says which task
    # Only the engine's settings: a stop word of `sampling` may look like a path.
    sections["generate"] = {**record.model_dump(include=names), "engine": scrubbed(record.engine)}
    # Version 0.4 did not record who answers; the model did if there were calls.
    by_calls = "model" if decoding.get("calls") else "classifier"
    sections["generate"]["answer"] = decoding.get("answer", by_calls)
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(sections), "utf-8")
    (folder / "requirements.txt").write_text("\n".join(requirements()) + "\n", "utf-8")


def requirements() -> list[str]:
    """Return a requirements.txt with every installed package, for pip's --no-deps."""
    versions: dict[str, str] = {}
    for package in metadata.distributions():  # in the order of sys.path: the first is imported
        if "Name" in package.metadata:  # a broken installation may have left an empty folder
            versions.setdefault(package.metadata["Name"].lower(), package.version)
    versions.pop("panjue", None)
    pins = sorted(f"{name}=={version}" for name, version in versions.items())
    _, _, build = versions.get("torch", "").partition("+")
    if build:
        return [f"--extra-index-url {TORCH}/{build}", *pins]
    return pins


def verify(packed: Path, cases: Path) -> None:
    """Unpack into an empty folder, answer `cases` there, and compare the submission."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        try:
            with zipfile.ZipFile(packed) as archive:
                archive.extractall(folder)  # checks the checksum of each file
        except (zipfile.BadZipFile, zlib.error, ValueError, RuntimeError, EOFError) as error:
            raise UserError(f"{packed}: {error}; pack it again") from None
        if not (folder / EXPECTED).exists():
            raise UserError(f"{packed}: is no bundle; `panjue bundle RUN OUT.zip` makes one")
        try:
            expected = Expected.model_validate_json((folder / EXPECTED).read_bytes())
        except ValidationError as error:
            problem = first_complaint(error)
            raise UserError(f"{packed}: {EXPECTED}: {problem}; pack it again") from None
        if sha256(cases) != expected.test_sha256:
            way_out = "give the TEST whose answers it has"
            raise UserError(f"{cases}: is not the test file of the run that was packed; {way_out}")
        _answer(packed, folder, cases)
        submission = folder / ANSWERS / VERIFIED / expected.submission
        digest = sha256(submission) if submission.exists() else ""
    if digest != expected.sha256:
        raise UserError(f"{packed}: gives another submission than the packed run")
    print(f"{packed}: runs by itself and gives the same answers")


def _answer(packed: Path, folder: Path, cases: Path) -> None:
    """Run the bundle's command without access to Hugging Face."""
    env = {"HF_HUB_OFFLINE": "1", "PYTHONNOUSERSITE": "1"}
    for name in os.environ:
        if not name.startswith(("PYTHON", "HF_")):
            env[name] = os.environ[name]
    words = [str(cases.resolve()), f"answers={VERIFIED}"]  # the name of the test file may be taken
    command = [sys.executable, "-P", "answer.py", *words]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).rstrip() or "no output"
        raise UserError(f"{packed}: does not run: {said.splitlines()[-1]}")
