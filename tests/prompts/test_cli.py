"""The light commands, as they are typed."""

import gc
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace

import pytest

from panjue.finetune.settings import SftConfig
from panjue.prompts import cli
from panjue.prompts.plumbing.config import Config, settings_of
from panjue.prompts.plumbing.files import read_json, sha256
from panjue.prompts.plumbing.records import AnswersRecord
from panjue.prompts.plumbing.version import panjue_version
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.prompts.tasks.judgment.demo import write_demo
from panjue.serve.settings import GenerateConfig, ServeConfig
from tests.prompts.plumbing.test_run import ANSWERED

ROOT = Path(cli.__file__).parents[1]
TASK = load_task("judgment")
Panjue = Callable[..., CompletedProcess[str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with invented cases and the gold answers as a hand-in."""
    write_demo(tmp_path, {"test": 4})
    with TASK.data.submission.writing(tmp_path / "submission.jsonl") as write:
        for example in Reader(TASK).read(tmp_path / "test.jsonl"):
            write(TASK.gold(example))
    return tmp_path


def test_generate_names_a_file_of_another_format_before_it_imports_vllm(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, panjue: Panjue
) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text('{"fact": "张某盗窃。"}', "utf-8")
    monkeypatch.setitem(sys.modules, "panjue.serve.engine", None)
    done = panjue("generate", trained, path, "on_bad_row=stop")
    told = f"panjue: {path}:1: 'id' must be a whole number or a string; the row has fact; say "
    assert (done.returncode, done.stderr.startswith(told)) == (2, True)


def test_generate_names_a_file_that_is_missing(trained: Path, panjue: Panjue) -> None:
    done = panjue("generate", trained, "nowhere.jsonl")
    assert (done.returncode, done.stderr) == (2, "panjue: no file nowhere.jsonl\n")


def test_the_module_is_the_command() -> None:
    """A bundle's manual trains with it: no command is installed there."""
    words = [sys.executable, "-m", "panjue.prompts.cli", "--version"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == f"panjue {panjue_version()}\n"


def test_numbers_are_written_over_those_of_an_earlier_score_alone(
    folder: Path, panjue: Panjue
) -> None:
    gold = folder / "test.jsonl"
    submission = folder / "submission.jsonl"
    other = folder / "other.json"
    other.write_text('{"examples": 3}', "utf-8")
    commands = (["score", gold, submission], ["fairness", gold, submission, "--by", "defendants"])
    for words in commands:
        for path in (submission, other, folder / "confidence.jsonl"):
            done = panjue(*words, "--json", path)
            assert done.returncode == 2
            problem = "was not made by panjue" if path == other else "does not end in .json"
            assert done.stderr.startswith(f"panjue: {path}: {problem}")
            assert done.stderr.endswith("choose another NAME.json\n")
    assert read_json(other) == {"examples": 3}
    out = folder / "scores.json"
    for _ in range(2):
        assert panjue(*commands[0], "--json", out).returncode == 0
    scores = read_json(out)
    assert scores["final"] == pytest.approx(1)
    assert scores["skipped_rows"] == 0
    assert scores["submission_sha256"] == sha256(submission)


def test_a_run_folder_says_of_which_task_it_is(folder: Path, panjue: Panjue) -> None:
    answers = folder / "answers/test"
    answers.mkdir(parents=True)
    (folder / "submission.jsonl").rename(answers / "submission.jsonl")
    AnswersRecord.model_validate({**ANSWERED, "task": "scotus"}).write(answers)
    words = ("check", answers / "submission.jsonl", "--cases", folder / "test.jsonl")
    done = panjue(*words, "--task", "judgment")
    told = f"panjue: {answers}: is a run of the task 'scotus', not 'judgment'\n"
    assert (done.returncode, done.stderr) == (2, told)
    done = panjue(*words)  # read as scotus
    assert done.returncode == 2
    assert "'text' must be a text" in done.stderr
    AnswersRecord.model_validate(ANSWERED).write(answers)
    assert panjue(*words).returncode == 0


def test_a_guessed_task_is_in_doubt_if_a_row_is_not_of_it(folder: Path, panjue: Panjue) -> None:
    path = folder / "other.jsonl"
    words = ("score", path, folder / "submission.jsonl")
    assert panjue(*words).stderr == f"panjue: {path}: No such file or directory\n"
    path.write_text('{"id": 1}', "utf-8")
    assert "name its --task" in panjue(*words).stderr
    assert "--task" not in panjue(*words, "--task", "judgment").stderr


def test_garbage_is_collected_after_an_import_that_failed_too() -> None:
    with pytest.raises(ModuleNotFoundError), cli.importing():
        import_module("panjue.no_such_stage")
    assert gc.isenabled()


def test_a_package_that_is_missing_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, panjue: Panjue
) -> None:
    def missing() -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(cli, "importing", missing)
    done = panjue("merge", folder)
    told = "panjue: torch is not installed; make install, or "
    told += "pip install 'panjue[cpu]' (with a GPU 'panjue[gpu]')\n"
    assert (done.returncode, done.stderr) == (2, told)


@pytest.mark.parametrize(
    ("command", "config"),
    [("sft", SftConfig), ("generate", GenerateConfig), ("serve", ServeConfig)],
)
def test_every_setting_is_listed_with_its_default_and_a_line(
    command: str, config: type[Config], panjue: Panjue
) -> None:
    done = panjue(command, "--settings")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert [line.partition("=")[0] for line in lines[::2]] == list(settings_of(config))
    assert all(line.startswith("    ") and line.endswith(".") for line in lines[1::2])


def test_settings_are_listed_as_the_config_has_them(
    tmp_path: Path, workshop: Path, panjue: Panjue
) -> None:
    listed = panjue("sft", workshop / "sft.yaml", "--settings").stdout
    assert "\nbatch=8\n" in listed
    assert '\nlora={"r":8,"target_modules":"all-linear"}\n' in listed
    config = tmp_path / "config.yaml"
    config.write_text("generate: {in_flight: 3}\nserve: {port: 81}", "utf-8")
    assert "\nin_flight=3\n" in panjue("generate", tmp_path, "--settings").stdout
    assert "\nport=81\n" in panjue("serve", tmp_path, "--settings").stdout


def test_swapped_arguments_say_which_comes_first(
    folder: Path, trained: Path, panjue: Panjue
) -> None:
    test = folder / "test.jsonl"
    done = panjue("generate", test, trained)
    told = f"panjue: {test}: RUN comes first: panjue generate {trained} {test}\n"
    assert (done.returncode, done.stderr) == (2, told)
    (folder / "run/answers").mkdir(parents=True)
    for words in (["score"], ["fairness", "--by", "x"]):
        done = panjue(*words, folder / "run", test)
        said = f"panjue: {folder}/run: has answers; the file of cases comes first: "
        assert (done.returncode, done.stderr) == (2, f"{said}{test} {folder}/run\n")
        done = panjue(*words, folder / "submission.jsonl", test)
        assert done.stderr.endswith("it looks like a submission, which comes after the cases\n")
    for incomplete in (("generate",), ("generate", trained), ("serve",)):
        done = panjue(*incomplete)
        assert (done.returncode, "give RUN" in done.stderr) == (2, True)


def test_ctrl_c_before_the_first_step_says_what_is_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, panjue: Panjue
) -> None:
    def train(_: object) -> None:
        raise KeyboardInterrupt

    training = SimpleNamespace(run=folder)
    monkeypatch.setattr("panjue.finetune.words.training_words", lambda _: (Path("a.yaml"), []))
    monkeypatch.setattr("panjue.finetune.settings.sft_settings", lambda *_: training)
    monkeypatch.setattr("panjue.finetune.settings.launch", lambda *_: None)
    monkeypatch.setattr("panjue.finetune.sft.train", train)
    kept = f"stopped; {folder} has what was finished, run the same command to resume"
    nothing = "stopped before anything was finished; run the same command again"
    for run, told in {folder: kept, folder / "later": nothing}.items():
        training.run = run
        done = panjue("sft", "config.yaml")
        assert (done.returncode, done.stderr) == (130, f"panjue: {told}\n")


def test_in_another_checkout_the_first_line_names_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, panjue: Panjue
) -> None:
    """A folder that was copied with its .venv has the commands of the old one."""
    monkeypatch.chdir(tmp_path)
    for name in ("prompts", "finetune", "serve", "eval"):
        assert panjue("--version").stderr == "", "not yet a checkout"
        Path(name).mkdir()
    Path("pyproject.toml").write_text('[project]\nname = "other"\n', "utf-8")
    assert panjue("--version").stderr == "", "of another project"
    shutil.copy(ROOT / "pyproject.toml", "pyproject.toml")
    [line] = panjue("--version").stderr.splitlines()
    assert str(ROOT) in line
    assert str(tmp_path) in line


@pytest.mark.parametrize("place", [ROOT, ROOT / "tests", Path("/")])
def test_nothing_is_said_in_its_own_checkout_or_in_none(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, panjue: Panjue
) -> None:
    (tmp_path / "link").symlink_to(place)
    monkeypatch.chdir(tmp_path / "link")
    assert panjue("--version").stderr == ""


def test_an_installed_package_is_no_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, panjue: Panjue
) -> None:
    site = tmp_path / "site-packages/panjue/prompts/cli.py"
    site.parent.mkdir(parents=True)
    monkeypatch.setattr(cli, "__file__", str(site))
    monkeypatch.chdir(ROOT)
    assert panjue("--version").stderr == ""
