"""Labels that look equal are named where cases are checked, and where they are trained on."""

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from panjue.eval.check import check_cases
from panjue.finetune.settings import sft_settings
from panjue.finetune.sft import train as sft
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from tests.eval.records import Row, Write

TWO = "charges '盗窃', '盗窃罪' look equal; keep one spelling"


def test_check_names_them(
    case: Row, write: Write, panjue: Callable[..., CompletedProcess[str]]
) -> None:
    rows = [case(n, ("甲", [charge], ["264"], 8)) for n, charge in enumerate(["盗窃", "盗窃罪"])]
    path = write("cases.jsonl", rows)
    done = panjue("check", path)
    assert done.returncode == 1
    assert done.stdout.splitlines()[0] == f"{path}: {TWO}"
    assert done.stdout.splitlines()[-1] == f"{path}: 1 fault"


def test_answers_in_free_words_are_no_labels(write: Write) -> None:
    rows = [
        {"qid": f"{n}", "query": "[MASK] is a city", "answer": [answer]}
        for n, answer in enumerate(["new york", "newyork"])
    ]
    assert check_cases(Reader(load_task("cloze")), write("cases.jsonl", rows))[0] == []


def test_the_plan_of_a_training_names_them(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = tmp_path / "train.jsonl"
    text = (workshop / "demo/train.jsonl").read_text("utf-8")
    train.write_text(text.replace('"盗窃罪"', '"盗窃"', 9), "utf-8")
    words = [f"run={tmp_path}/run", f"train={train}", "dry_run=true"]
    sft(sft_settings(workshop / "sft.yaml", words))
    assert f"labels       {TWO}\n" in capsys.readouterr().out
