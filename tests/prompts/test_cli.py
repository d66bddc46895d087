"""The light commands, as they are typed."""

import json
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from panjue.finetune.settings import SftConfig
from panjue.prompts import cli
from panjue.prompts.cli import main
from panjue.prompts.plumbing.config import Config
from panjue.prompts.plumbing.errors import did_you_mean
from panjue.prompts.plumbing.files import dump
from panjue.prompts.plumbing.run import AnswersRecord
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.prompts.tasks.judgment.demo import write_demo
from panjue.serve.settings import GenerateConfig, ServeConfig

TASK = load_task("judgment")


def typed(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    """Run `panjue WORDS` and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["panjue", *map(str, words)])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with invented cases and the gold answers as a hand-in."""
    write_demo(tmp_path, {"train": 8, "test": 4})
    rows = [
        TASK.data.write(e, e.answer) for e in Reader(TASK).read(tmp_path / "test.jsonl") if e.answer
    ]
    (tmp_path / "submission.jsonl").write_text("".join(dump(row) + "\n" for row in rows), "utf-8")
    return tmp_path


def test_demo_writes_the_cases_of_make_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert typed(monkeypatch, "demo", tmp_path) == 0
    sizes = {p.stem: len(p.read_text("utf-8").splitlines()) for p in tmp_path.glob("*.jsonl")}
    assert sizes == {"train": 1600, "test": 200, "base": 4000}


CAIL2018 = (
    '{"fact": "张某盗窃。", "meta": {"criminals": ["张某"], "accusation": ["盗窃"], '
    '"relevant_articles": [264], "punish_of_money": 0, "term_of_imprisonment": '
    '{"death_penalty": false, "life_imprisonment": false, "imprisonment": MONTHS}}}\n'
)


def test_convert_writes_cases_and_says_what_it_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "cail.jsonl", tmp_path / "out.jsonl"
    path.write_text("".join(CAIL2018.replace("MONTHS", n) for n in ("10", "3", "0")), "utf-8")
    assert typed(monkeypatch, "convert", path, out) == 0
    assert capsys.readouterr().out == (
        "1 rows: 1 to 5 months: too short for imprisonment, so detention (拘役) or, rarely, "
        "surveillance (管制), the file does not tell; written as detention\n"
        "1 rows: 0 months: a fine alone, exemption or a term that was not found, the file does not "
        f"tell; written without a term, penalty class 14\nwritten: {out}, 3 of 3 rows\n"
    )
    path.write_text(CAIL2018.replace("MONTHS", "10") + "{}\n" + path.read_text("utf-8"), "utf-8")
    out.unlink()
    assert typed(monkeypatch, "convert", path, out) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"{path}:2: not converted: its fields are none; only CAIL2018")
    assert said[-1] == f"written: {out}, 4 of 5 rows"
    path.write_text(CAIL2018.replace("MONTHS", "-1"), "utf-8")
    out.unlink()
    assert typed(monkeypatch, "convert", path, out) == 2
    assert capsys.readouterr().err == f"panjue: {path}: has no rows that can be converted\n"
    assert not out.exists()


def test_generate_names_a_file_of_another_format_before_it_imports_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cail.jsonl"
    path.write_text(CAIL2018.replace("MONTHS", "10"), "utf-8")
    monkeypatch.setattr("panjue.serve.settings.task_name", lambda *_: "judgment")
    monkeypatch.setitem(sys.modules, "panjue.serve.generate", None)
    assert typed(monkeypatch, "generate", tmp_path, path) == 2
    assert capsys.readouterr().err == (
        f"panjue: {path}:1: 'id' must be a number or a string; the file looks like CAIL2018; "
        f"`panjue convert {path} OUT.jsonl` converts it\n"
    )


def test_convert_overwrites_no_input(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "test.jsonl"
    assert typed(monkeypatch, "convert", path, path) == 2
    assert capsys.readouterr().err == f"panjue: {path}: exists already; choose another OUT\n"


def test_the_module_is_the_command() -> None:
    """A bundle's manual trains with it: no command is installed there."""
    words = [sys.executable, "-m", "panjue.prompts.cli", "sft", "--help"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "Fine-tune: cases in, adapter out." in done.stdout


def test_score_prints_and_writes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder / "scores.json"
    words = ("score", folder / "test.jsonl", folder / "submission.jsonl", "--json", out)
    assert typed(monkeypatch, *words) == 0
    assert "final" in capsys.readouterr().out
    assert json.loads(out.read_text("utf-8"))["final"] == pytest.approx(1)


def test_check_says_by_its_exit_code_whether_the_file_is_clean(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "submission.jsonl"
    words = ("check", path, "--cases", folder / "test.jsonl")
    assert typed(monkeypatch, *words) == 0
    assert capsys.readouterr().out == f"{path}: clean\n"
    path.write_text("".join(path.read_text("utf-8").splitlines(keepends=True)[1:]), "utf-8")
    assert typed(monkeypatch, *words) == 1
    assert capsys.readouterr().out == f"{path}: id 0 is not answered\n{path}: 1 fault\n"


def test_a_label_that_is_wrong_everywhere_is_looked_for_once() -> None:
    known = [f"第{n}号罪" for n in range(320)]
    began = time.process_time()
    hints = {did_you_mean("第七号罪名", known) for _ in range(3000)}
    assert len(hints) == 1
    assert time.process_time() - began < 1  # 3 s and more where it was looked for each time


def test_what_a_user_can_mend_is_one_line_and_exit_code_two(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(monkeypatch, "score", folder / "no.jsonl", folder / "submission.jsonl") == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"panjue: {folder}/no.jsonl: No such file or directory\n"


def test_a_run_folder_says_of_which_task_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = folder / "answers/test"
    answers.mkdir(parents=True)
    (folder / "submission.jsonl").rename(answers / "submission.jsonl")
    record = AnswersRecord(
        task="scotus", test="test.jsonl", test_sha256="", prompt_sha256="", adapter="none",
        constrained=True, max_tokens=1, seed=0, engine={}, sampling={}, samples=0,
    )  # fmt: skip
    record.write(answers)
    words = ("check", answers / "submission.jsonl", "--cases", folder / "test.jsonl")
    assert typed(monkeypatch, *words, "--task", "judgment") == 2
    told = f"panjue: {answers}: is a run of the task 'scotus', not 'judgment'\n"
    assert capsys.readouterr().err == told
    assert typed(monkeypatch, *words) == 2  # read as scotus
    assert "'text' must be a text" in capsys.readouterr().err
    record.model_copy(update={"task": "judgment"}).write(answers)
    assert typed(monkeypatch, *words) == 0


def test_a_package_that_is_missing_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(cli, "_load", missing)
    assert typed(monkeypatch, "merge", folder) == 2
    told = "panjue: torch is not installed; make install, or "
    told += "pip install 'panjue[cpu]' (with a GPU 'panjue[gpu]')\n"
    assert capsys.readouterr().err == told


def test_nothing_that_is_read_is_written_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gold, path = folder / "test.jsonl", folder / "submission.jsonl"
    before = path.read_bytes()
    assert typed(monkeypatch, "score", gold, path, "--json", path) == 2
    told = f"{path}: is an input; choose another output"
    assert told in capsys.readouterr().err
    assert typed(monkeypatch, "fairness", gold, path, "--by", "defendants", "--json", gold) == 2
    assert path.read_bytes() == before
    assert typed(monkeypatch, "score", gold, path, "--json", folder) == 2
    assert "is a folder; name a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "config"),
    [("sft", SftConfig), ("generate", GenerateConfig), ("serve", ServeConfig)],
)
def test_every_setting_is_listed_with_its_default_and_a_line(
    command: str,
    config: type[Config],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert typed(monkeypatch, command, "--settings") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("=")[0] for line in lines[::2]] == list(config.model_fields)
    assert all(line.startswith("    ") and line.endswith(".") for line in lines[1::2])


def test_the_version_is_that_of_the_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"panjue {version('panjue')}\n"
