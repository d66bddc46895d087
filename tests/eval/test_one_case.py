"""Of one case that counts there is no interval, wherever intervals are shown."""

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest

from panjue.eval.choice import best_of, choice_lines
from panjue.eval.metric_values import MetricValues, metric_values
from panjue.eval.report import page, page_data
from panjue.prompts.cli_choose import shown
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.files import read_json
from panjue.prompts.plumbing.intervals import interval_text, with_interval
from panjue.prompts.plumbing.records import Choice
from panjue.prompts.task import load_task
from panjue.serve.answers import open_answers
from tests.records import Row, Write, write_answers

TASK = load_task("judgment")
THEFT = (["盗窃罪"], ["264"], 11)

Panjue = Callable[..., CompletedProcess[str]]


@pytest.fixture
def gold(case: Row, write: Write) -> Path:
    """Return three cases, of which only the last counts: the others have one defendant."""
    alone = [case(key, ("甲", *THEFT)) for key in (1, 2)]
    return write("gold.jsonl", [*alone, case(3, ("甲", *THEFT), ("乙", *THEFT))])


@pytest.fixture
def answers(gold: Path, tmp_path: Path) -> Callable[[str, int], Path]:
    """Return what writes answers with this penalty to the cases."""

    def made(name: str, penalty: int) -> Path:
        folder = tmp_path / name
        Labels().save(folder)
        write_answers(folder, gold)
        lines = []
        for line in gold.read_text("utf-8").splitlines():
            row = TASK.gold(TASK.data.read(json.loads(line)))
            judgments = [{**one, "penalty": penalty} for one in row["judgments"]]
            lines.append(json.dumps({"id": row["id"], "judgments": judgments}) + "\n")
        (folder / "submission.jsonl").write_text("".join(lines), "utf-8")
        (folder / "completions.jsonl").touch()
        return folder

    return made


def row_of(table: str, metric: str) -> list[str]:
    """Return the cells of a row in the first table that has it."""
    line, *_ = [one for one in table.splitlines() if one.startswith(f"│ {metric} ")]
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_score_and_its_json(
    answers: Callable[[str, int], Path], gold: Path, panjue: Panjue, tmp_path: Path
) -> None:
    done = panjue("score", gold, answers("run", 5), "--json", tmp_path / "scores.json")
    assert row_of(done.stdout, "final") == ["final", "0.6000", "-"]
    numbers = read_json(tmp_path / "scores.json")
    assert (numbers["counted"], numbers["interval"]["final"]) == (1, [None, None])


def test_compare(answers: Callable[[str, int], Path], gold: Path, panjue: Panjue) -> None:
    done = panjue("compare", answers("run", 5), answers("other", 11), "--gold", gold)
    assert row_of(done.stdout, "final") == ["final", "0.6000", "1.0000", "+0.4000", "-"]


def test_report(answers: Callable[[str, int], Path]) -> None:
    text = page(page_data(open_answers(answers("run", 5))))
    [headline] = [line for line in text.splitlines() if line.startswith('<p id="headline">')]
    assert "0.6000" in headline
    assert "95%" not in headline
    assert text.count("<td>0.6000</td><td>-</td>") == 1


def test_fairness(answers: Callable[[str, int], Path], gold: Path, panjue: Panjue) -> None:
    done = panjue("fairness", gold, answers("run", 5), "--by", "defendants")
    assert row_of(done.stdout, "2*") == ["2*", "1", "0.6000", "-"]


def one_case(penalty: int) -> MetricValues:
    example = TASK.data.read(
        {
            "id": 1,
            "fact": "甲、乙盗窃。",
            "defendants": ["甲", "乙"],
        }
    )
    gold = {"id": 1, "judgments": [judgment(name, 11) for name in example.names]}
    row = {"id": 1, "judgments": [judgment(name, penalty) for name in example.names]}
    values = MetricValues(TASK)
    values.add(example, np.array(metric_values(TASK, gold, row, "")))
    return values


def judgment(name: str, penalty: int) -> dict[str, object]:
    return {"name": name, "charges": ["盗窃罪"], "articles": ["264"], "penalty": penalty}


def test_a_choice_by_one_held_out_case() -> None:
    values = {"model": one_case(5), "classifier": one_case(11)}
    made = best_of(values, {"penalty": "penalty_accuracy"})
    choice = Choice.model_validate_json(made.model_dump_json())
    assert choice == made
    assert [*choice_lines(choice)][1] == (
        "  penalty: penalty_accuracy model 0.0000, text classifier 1.0000 (difference -1.0000): "
        "classifier"
    )
    assert shown(choice.candidates["classifier"], "final") == "1.000"
    assert shown(choice.candidates["model"], "final") == ".600"


def test_intervals_have_one_form() -> None:
    assert interval_text((0.25, 0.5)) == "0.2500 - 0.5000"
    assert interval_text((-0.25, 0.5), "+.2f", " to ") == "-0.25 to +0.50"
    assert with_interval(0.25, (0.125, 0.5), ".3f", "-") == "0.250 (0.125-0.500)"
    for ends in ((None, None), (float("nan"), float("nan"))):
        assert (interval_text(ends), with_interval(0.25, ends)) == ("-", "0.2500")
