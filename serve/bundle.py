"""Pack a run into one ZIP that answers a test file by itself, for a contest's sealed stage."""

import hashlib
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

from omegaconf import OmegaConf
from packaging.requirements import Requirement

from panjue.eval.decide import decision_sha256, uses_classifier
from panjue.eval.score import decoding_of
from panjue.prompts.model import DECISION, model_files, model_sha256, prompt_sha256
from panjue.prompts.plumbing.config import DATA, scrubbed
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import (
    answers_in,
    dump,
    generation,
    read_json,
    sha256,
    sync_names,
    write_json,
)
from panjue.prompts.plumbing.rows import Rows
from panjue.prompts.task import load_task
from panjue.prompts.tasks.dialogue.similarity import BUILT_IN
from panjue.serve.merge import merge
from panjue.serve.trained import check_base

FOLDERS = ("prompts", "finetune", "serve", "eval")
CODE = {".py", ".md", ".html", ".css", ".js", ".svg"}
"""Suffixes of the files that are packed. `configs/` may hold the user's own settings; of these only
the two of the run are packed."""

HERE = Path(__file__).parent / "bundled"
"""Files of every bundle: the command and the manual."""

SUMS = "SHA256SUMS"
"""The hash of every other file, as `sha256sum --check` reads it."""

EXPECTED = "expected.json"
EPOCH = (1980, 1, 1, 0, 0, 0)
"""Time stamp of every file, so that equal bundles are equal byte for byte."""

TORCH = "https://download.pytorch.org/whl"
"""Index with builds, such as `cpu`, that PyPI does not have."""

SETTINGS = (
    "task",
    "adapter",
    "constrained",
    "max_tokens",
    "seed",
    "engine",
    "sampling",
    "samples",
    "held_out",
    "on_bad_row",
)
"""Settings of the generation that are packed unchanged."""

Weights = Literal["none", "base", "merged"]


def bundle(run: Path, out: Path, weights: Weights = "none", base: str | None = None) -> None:
    """Pack a finished run: code, settings, prompts, labels, adapter, versions, manual, hashes.

    Args:
        run: Folder of answers with a submission, or its run folder; of it and the test file only
            hashes are packed.
        out: The ZIP; it appears when it is complete.
        weights: Also pack the base, or the base merged with the adapter.
        base: Folder of the base, if it has moved.

    Raises:
        UserError: The run has no submission, was answered by an endpoint, or its model or prompt
            has changed since.
    """
    if out.is_dir():
        raise UserError(f"{out}: is a folder; name the ZIP")
    run = answers_in(run)
    provenance = _provenance(run)
    submission = load_task(provenance["task"]).data.submission.find(run)
    _check_decoded(run, submission, provenance)
    if weights == "merged" and provenance["adapter"] == "none":
        raise UserError(f"{run}: the base alone answered; merged is another model")
    trained = Path(provenance["trained"])
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = _pack_models(folder, trained, weights, base)
        _pack_code(folder / "code" / "panjue")
        _pack_settings(folder, provenance, model)
        training = _pack_training(folder, trained)
        write_json(folder / "manifest.json", scrubbed(read_json(run / "manifest.json")))
        (folder / "requirements.txt").write_text("\n".join(requirements()) + "\n", "utf-8")
        shutil.copy(HERE / "answer.py", folder)
        words = {"task": provenance["task"], "name": submission.name, "training": training}
        _write_manual(folder, {**words, **_base(trained, weights)})
        expected = {
            "test_sha256": provenance["test_sha256"],
            "submission": submission.name,
            "submission_sha256": sha256(submission),
            "rows": row_hashes(provenance["task"], submission),
        }
        write_json(folder / EXPECTED, expected)
        lines = [f"{sha256(folder / name)}  {name}\n" for name in names_in(folder)]
        (folder / SUMS).write_text("".join(lines), "utf-8")
        _zip(folder, out)


def _provenance(run: Path) -> dict[str, Any]:
    """Return the provenance of a run's answers.

    Raises:
        UserError: No model of ours answered, or the model has changed since.
    """
    provenance = generation(run)
    if not provenance:
        raise UserError(f"{run}: has no answers yet; run `panjue generate` first")
    if provenance.get("endpoint") or not provenance.get("trained"):
        raise UserError(f"{run}: was answered by an endpoint; there is no model to pack")
    trained = Path(provenance["trained"])
    digest = provenance["trained_sha256"]
    if not trained.is_dir() or model_sha256(trained) != digest:
        raise UserError(f"{trained}: is not what {run} was answered with; generate again")
    if prompt_sha256(provenance["task"]) != provenance["prompt_sha256"]:
        raise UserError(f"{run}: was asked with another prompt than the code has; generate again")
    if scrubbed(provenance["engine"]) != provenance["engine"]:
        raise UserError(f"{run}: its engine settings name a folder here, which is not packed")
    if provenance.get("solve", {}).get("similarity", BUILT_IN) != BUILT_IN:
        raise UserError(f"{run}: solve.similarity is not packed; generate with {BUILT_IN}")
    return provenance


def _check_decoded(run: Path, submission: Path, provenance: Mapping[str, Any]) -> None:
    """Refuse a submission that the packed settings would not reproduce.

    Raises:
        UserError: It was changed after decoding, or decoded with --greedy, or with other settings
            of `panjue tune` or before it.
    """
    decoding = decoding_of(submission)
    if decoding is None:
        raise UserError(f"{submission}: was changed since; `panjue decode {run}` makes it again")
    fitted = None if provenance["adapter"] == "none" else Path(provenance["trained"])
    if (provenance.get("samples") or uses_classifier(fitted)) and not decoding["decided"]:
        raise UserError(
            f"{run}: was decoded with --greedy, or before `panjue tune`; "
            f"`panjue decode {run}` decides again"
        )
    if decoding["decided"] and decoding.get("decision_sha256") != decision_sha256(fitted):
        raise UserError(
            f"{run}: was decoded with another fit of `panjue tune` than there is now; "
            f"`panjue decode {run}` decides again"
        )


def _pack_models(folder: Path, trained: Path, weights: Weights, base: str | None) -> str:
    """Copy the adapter or model and the weights asked for; return the folder that answers."""
    manifest = read_json(trained / "manifest.json")
    is_adapter = (trained / "adapter_config.json").exists()
    copied = folder / ("adapter" if is_adapter else "model")
    if weights == "merged" and not is_adapter:
        raise UserError(f"{trained}: is a whole model already; leave --weights out")
    _copy([*model_files(trained), *trained.glob("*.md")], copied)
    digest = manifest["base_sha256"]
    if weights == "base":
        parts = model_files(check_base(trained, manifest, base))
        # Records of a base that panjue trained itself are not packed.
        _copy([p for p in parts if p.name not in {"manifest.json", "labels.json"}], folder / "base")
        digest = model_sha256(folder / "base")
    _point_to_packed_base(copied, digest)
    if weights != "merged":
        return copied.name
    merged = folder / "merged"
    fitted = trained / DECISION  # the merged model gives the same replies as the adapter
    whole = merge(trained, trained.with_name("merged"), base)
    _copy([*model_files(whole), fitted], merged)
    _point_to_packed_base(merged, digest)
    return merged.name


def _copy(files: Iterable[Path], folder: Path) -> None:
    """Copy a model's files without the name of the folder that they come from."""
    folder.mkdir()
    for path in files:
        if path.exists():
            shutil.copy(path, folder)
    for path in (folder / "config.json", folder / "tokenizer_config.json"):
        content = read_json(path) if path.exists() else {}
        kept = {key: of for key, of in content.items() if key.strip("_") != "name_or_path"}
        if kept != content:
            write_json(path, kept)


def _point_to_packed_base(folder: Path, digest: str) -> None:
    """Make the adapter or model look for its base in `base/`, where the manual tells to put it."""
    manifest = read_json(folder / "manifest.json")
    write_json(
        folder / "manifest.json", {**scrubbed(manifest), "base": "base", "base_sha256": digest}
    )
    place = folder / "adapter_config.json"
    if place.exists():
        settings = {**scrubbed(read_json(place)), "base_model_name_or_path": "../base"}
        write_json(place, settings)  # the card's snippets find it by this path


def _write_manual(folder: Path, words: Mapping[str, str]) -> None:
    python = ".".join(map(str, sys.version_info[:2]))
    manual = (HERE / "MANUAL.md").read_text("utf-8").format(python=python, **words)
    (folder / "MANUAL.md").write_text(manual, "utf-8")


def _base(trained: Path, weights: Weights) -> dict[str, str]:
    """Return the manual's sentence about the base, in Chinese and English."""
    if weights != "none":
        return {"base_zh": "已在包内", "base_en": "it is in this archive"}
    if not (trained / "adapter_config.json").exists():
        return {"base_zh": "不需要", "base_en": "none is needed"}
    manifest = scrubbed(read_json(trained / "manifest.json"))
    named = f"`{manifest['base']}`, SHA-256 {manifest['base_sha256']}"
    return {
        "base_zh": f"请放在本文件夹的 `base/`：{named}",
        "base_en": f"put it into this folder as `base/`: {named}",
    }


def _pack_settings(folder: Path, provenance: Mapping[str, Any], model: str) -> None:
    settings = {name: provenance[name] for name in SETTINGS if name in provenance}
    settings |= {"run": "out", "answers": "test", "test": "test", "trained": model}
    if provenance.get("solve"):
        settings["solve"] = provenance["solve"]
    if model == "merged":
        settings["adapter"] = "merge"
    (folder / "generate.yaml").write_text(OmegaConf.to_yaml(settings), "utf-8")


def _pack_training(folder: Path, trained: Path) -> str:
    """Copy the training's settings; return the manual's `name=FILE` words for the data files."""
    place = trained.parent / "config.yaml"
    if not place.exists():
        raise UserError(f"{place}: is missing; a bundle needs the settings of its training")
    config: Any = OmegaConf.to_container(OmegaConf.load(place))
    (folder / "sft.yaml").write_text(OmegaConf.to_yaml(scrubbed(config)), "utf-8")
    return " ".join(f"{name}={name.upper()}" for name in DATA if config["sft"].get(name))


def _pack_code(folder: Path) -> None:
    """Copy the installed code."""
    folder.mkdir(parents=True)
    for name in FOLDERS:
        spec = find_spec(f"panjue.{name}")
        assert spec
        source = Path(str(spec.origin)).parent
        for path in sorted(path for path in source.rglob("*.*") if path.suffix in CODE):
            copied = folder / name / path.relative_to(source)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copied)


def requirements() -> list[str]:
    """Return the lines of a requirements.txt that lists every package (for pip's --no-deps)."""
    found = pins()
    builds = {line.partition("+")[2] for line in found if line.startswith("torch==")} - {""}
    return [*(f"--extra-index-url {TORCH}/{build}" for build in builds), *found]


def pins() -> list[str]:
    """Return `name==version` of every installed package that training and answering need."""
    found: dict[str, str] = {}
    waiting = [("panjue", frozenset({"train", "serve", "cpu", "gpu"}))]
    seen = set(waiting)
    while waiting:
        name, extras = waiting.pop()
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # needed only on the other kind of machine
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


def row_hashes(task: str, submission: Path) -> dict[str, str]:
    """Return id -> hash of its row, so that an error can name the rows that differ."""
    rows: Rows = load_task(task).data.submission.index(submission)
    texts = {key: dump(rows.get(key)).encode() for key in sorted(rows.ids())}
    return {key: hashlib.sha256(text).hexdigest()[:16] for key, text in texts.items()}


def names_in(folder: Path) -> list[str]:
    """Return the paths of all files in a folder, relative to it."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def _zip(folder: Path, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as packed:
            for name in names_in(folder):
                entry = zipfile.ZipInfo(name, EPOCH)
                entry.compress_type = zipfile.ZIP_DEFLATED
                entry.file_size = (folder / name).stat().st_size  # over 2 GiB is ZIP64
                with (folder / name).open("rb") as source, packed.open(entry, "w") as target:
                    shutil.copyfileobj(source, target)
        sync_names(temporary)
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)


def main(run: Path, out: Path, weights: str, base: Path | None = None) -> None:
    """Pack and print a summary."""
    if weights not in get_args(Weights):
        raise UserError(f"--weights: {weights!r} is none of {', '.join(get_args(Weights))}")
    bundle(run, out, weights, base and str(base))  # type: ignore[arg-type]
    with zipfile.ZipFile(out) as packed:
        count = len(packed.namelist())
    size = out.stat().st_size / 2**20
    print(f"written: {out}, {count} files, {size:.1f} MiB, SHA-256 {sha256(out)}")
