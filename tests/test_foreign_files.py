"""No command changes a file that panjue did not make, whatever its name; each can be repeated."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from safetensors.torch import load_file, save_file

from panjue.finetune.trained import read_trained
from panjue.prompts.fingerprint import model_sha256
from panjue.prompts.plumbing.run import ADAPTER_WEIGHTS, REPLACED, REPLACED_ANSWERS
from panjue.serve.merge import served_model

Panjue = Callable[..., CompletedProcess[str]]
Words = tuple[object, ...]


def files(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        if path.is_file():
            yield str(path.relative_to(folder))


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in files(folder)}


@pytest.fixture(scope="module")
def names(answered: Path, merged: Path, workshop: Path) -> list[str]:
    """Return every path that a command writes, relative to its folder."""
    written = {*files(answered), *files(workshop / "base"), *files(workshop / "demo")}
    written |= {f"merged/{name}" for name in files(merged)}
    for name in (*REPLACED_ANSWERS, "submission/chat/x.json"):
        written.add(f"answers/test/{name}")
    written |= {name for name in REPLACED if "." in name}
    written |= {"debug.log", "unmerged/adapter_config.json", "bundle.zip", "out.json"}
    return sorted(written)


def plant(folder: Path, *names: str) -> Path:
    """Write somebody's files of these names into a folder."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"somebody's {name}", "utf-8")
    return folder


PLACES = (".", "adapter", "merged", "answers/test")


@pytest.fixture
def foreign(names: list[str], tmp_path: Path) -> Path:
    """Return a folder with all these files, and with each name in several places."""
    folder = plant(tmp_path / "foreign", *names)
    for place in PLACES:
        plant(folder / place, *(Path(name).name for name in names))
    return folder


@pytest.fixture
def run(answered: Path, tmp_path: Path) -> Path:
    """Return a copy of a finished run, which is not merged."""
    return shutil.copytree(answered, tmp_path / "run", ignore=shutil.ignore_patterns("merged"))


def on_a_folder(folder: Path, run: Path, workshop: Path) -> Iterator[Words]:
    """Yield every command that takes a folder, with this folder in each place."""
    new = run.parent / "new"
    test = workshop / "demo/test.jsonl"
    sft = ("sft", workshop / "sft.yaml", "trainer.max_steps=1", f"model={workshop}/base/model")
    base = ("base", workshop / "base.yaml", "trainer.max_steps=1")
    for dry_run in ("dry_run=false", "dry_run=true"):
        yield (*base, f"run={new}", f"model={folder}", dry_run)
        yield (*sft, f"run={new}", f"model={folder}", dry_run)
    yield (*base, f"run={folder}", f"model={new}")
    yield (*sft, f"run={folder}")
    yield (*sft, f"run={folder}", "method=full", f"model={folder}/model")
    yield "demo", folder
    yield "merge", folder
    yield "generate", folder, test
    yield "generate", run, test, "answer=classifier", f"answers={folder}"
    yield "generate", run, folder
    yield "decode", folder
    yield "serve", folder, "port=0"
    yield "bundle", folder, new
    yield "bundle", run, folder
    yield "bundle", run, new, "--base", folder
    yield "convert", test, folder
    yield "convert", folder, new
    yield "report", folder
    yield "report", run, "--gold", folder
    yield "compare", folder, run
    yield "compare", run, folder
    yield "check", folder, "--cases", test
    yield "check", run, "--cases", folder
    for words in (("score",), ("fairness", "--by", "defendants")):
        yield (*words, test, folder)
        yield (*words, folder, run)
        yield (*words, test, run, "--json", folder)
    yield "fairness", test, run, "--by", "defendants", "--groups", folder


def test_a_folder_of_somebody_elses_is_refused_by_every_command(
    foreign: Path, run: Path, workshop: Path, panjue: Panjue
) -> None:
    before = contents(foreign)
    for place in PLACES:
        for words in on_a_folder(foreign / place, run, workshop):
            done = panjue(*words)
            assert done.returncode == 2, (words, done.stdout)
            assert done.stderr.count("\n") == 1, (words, done.stderr)
            assert contents(foreign).items() >= before.items(), words


def test_a_file_of_somebody_elses_is_refused_as_a_place_to_write(
    foreign: Path, names: list[str], run: Path, workshop: Path, panjue: Panjue
) -> None:
    test = workshop / "demo/test.jsonl"
    before = contents(foreign)
    for name in names:
        for words in (
            ("bundle", run, foreign / name),
            ("score", test, run, "--json", foreign / name),
            ("fairness", test, run, "--by", "defendants", "--json", foreign / name),
            ("base", workshop / "base.yaml", f"run={run}", f"model={foreign / name}"),
        ):
            done = panjue(*words)
            assert (done.returncode, done.stderr.count("\n")) == (2, 1), (words, done.stderr)
    own = contents(run)
    for name in own:  # in our own folder, too, what the user names is asked for its content
        assert panjue("bundle", run, run / name).returncode == 2
        if name != "answers/test/scores.json":
            assert panjue("score", test, run, "--json", run / name).returncode == 2
    assert contents(run) == own
    assert contents(foreign) == before


@pytest.mark.parametrize("name", [*REPLACED, "debug.log"])
def test_a_training_is_refused_for_each_name_that_it_would_replace(
    name: str, workshop: Path, tmp_path: Path, panjue: Panjue
) -> None:
    inner = name if "." in name else f"{name}/config.json"
    folder = plant(tmp_path / "foreign", inner)
    done = panjue("sft", workshop / "sft.yaml", f"run={folder}")
    assert done.returncode == 2
    assert done.stderr.startswith(f"panjue: {folder}/{name}: was not made by panjue, so it is kept")
    assert contents(folder) == {inner: f"somebody's {inner}".encode()}


def test_a_dry_run_replaces_no_rows(workshop: Path, tmp_path: Path, panjue: Panjue) -> None:
    own = tmp_path / "own"
    assert panjue("sft", workshop / "sft.yaml", f"run={own}", "dry_run=true").returncode == 0
    rows = [name for name in contents(own) if name.startswith("rows/")]
    halves = [name for name in rows if name.endswith("rows.arrow")]
    assert halves
    for number, planted in enumerate((rows, halves)):
        folder = plant(tmp_path / str(number), *planted)
        before = contents(folder)
        done = panjue("sft", workshop / "sft.yaml", f"run={folder}", "dry_run=true")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert contents(folder).items() >= before.items()


def test_a_training_is_not_written_over_its_own_base_nor_into_an_adapter(
    trained: Path, workshop: Path, tmp_path: Path, panjue: Panjue
) -> None:
    base = shutil.copytree(workshop / "base/model", tmp_path / "run/model")
    before = contents(tmp_path)
    words = ("sft", workshop / "sft.yaml", f"model={base}")
    for run in (tmp_path / "run", base):
        done = panjue(*words, f"run={run}", "method=full")
        assert done.returncode == 2
        assert "is where this run writes; choose another run=FOLDER" in done.stderr
    assert contents(tmp_path) == before
    for folder in (trained / "adapter", workshop / "base/untrained"):
        own = contents(folder)
        done = panjue("sft", workshop / "sft.yaml", f"run={folder}")
        assert f"{folder}: has a model or answers; choose another run=FOLDER" in done.stderr
        assert contents(folder) == own


def test_an_adapter_among_somebodys_files_is_merged_and_answers_without_touching_them(
    trained: Path,
    names: list[str],
    workshop: Path,
    tmp_path: Path,
    panjue: Panjue,
    running_engine: list[Path],
) -> None:
    foreign = [name for name in names if name.startswith(("answers/", "merged/", "unmerged/"))]
    folder = plant(tmp_path / "foreign", *foreign)
    before = contents(folder)
    shutil.copytree(trained / "adapter", folder / "adapter")
    cases = shutil.copy(workshop / "demo/test.jsonl", tmp_path / "other.jsonl")
    assert panjue("merge", folder).returncode == 0
    assert panjue("generate", folder, cases, "answer=model").returncode == 0
    assert running_engine == [folder / "adapter/merged"]
    assert panjue("generate", folder, cases, "answer=model", "answers=test").returncode == 2
    assert contents(folder).items() >= before.items()


def merged_of(adapter: Path) -> Path:
    return served_model(read_trained(adapter), "merge").model


def test_adapters_side_by_side_have_each_its_own_merge(trained: Path, tmp_path: Path) -> None:
    first = shutil.copytree(trained / "adapter", tmp_path / "first")
    second = shutil.copytree(trained / "adapter", tmp_path / "second")
    weights = load_file(second / ADAPTER_WEIGHTS)
    changed = {key: value + 0.01 for key, value in weights.items()}
    save_file(changed, second / ADAPTER_WEIGHTS, {"format": "pt"})
    hashes = [model_sha256(first), model_sha256(second)]
    models = [merged_of(adapter) for adapter in (first, second)]
    made = [(model / "model.safetensors").read_bytes() for model in models]
    assert made[0] != made[1]
    assert [merged_of(adapter) for adapter in (first, second)] == models
    assert [(model / "model.safetensors").read_bytes() for model in models] == made
    assert [model_sha256(first), model_sha256(second)] == hashes
    shutil.move(models[0], tmp_path / "merged")
    assert merged_of(first) == tmp_path / "merged", "as version 0.4 has made it"


def test_every_command_can_be_repeated_also_into_a_link(
    run: Path, workshop: Path, tmp_path: Path, panjue: Panjue
) -> None:
    test = workshop / "demo/test.jsonl"
    away = tmp_path / "away"
    away.mkdir()
    answers = run / "answers/test"
    links = (answers / "report.html", run / "merged", tmp_path / "s.json", tmp_path / "b.zip")
    for link in links:
        link.symlink_to(away / link.name)
    commands: list[Words] = [
        ("demo", tmp_path / "demo"),
        ("base", workshop / "base.yaml"),
        ("sft", workshop / "sft.yaml"),
        ("merge", run),
        ("generate", run, test, "answer=model"),
        ("generate", run, test, "answer=classifier", "answers=other"),
        ("decode", answers),
        ("score", test, answers, "--json", tmp_path / "s.json"),
        ("fairness", test, answers, "--by", "defendants", "--json", tmp_path / "s.json"),
        ("report", answers),
        ("bundle", answers, tmp_path / "b.zip"),
        ("check", answers, "--cases", test),
        ("compare", answers, run / "answers/other"),
    ]
    for _ in range(2):
        for words in commands:
            done = panjue(*words)
            assert done.returncode == 0, (words, done.stderr)
    for link in links:
        assert link.is_symlink()
        assert (away / link.name).exists()
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith(".tmp")]
