import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from panjue.eval.check import check
from panjue.eval.metric_values import MetricValues, summarize
from panjue.eval.score import ScoreResult, score
from panjue.eval.show_scores import answered_in_chinese, remarks, show
from panjue.prompts.example import Example
from panjue.prompts.labels import collect
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.prompts.tasks.judgment.metric import final
from panjue.prompts.tasks.judgment.penalties import PENALTIES
from tests.records import Row, Write

TASK = load_task("judgment")
THEFT = (["盗窃罪"], ["264"], 13)
FRAUD = (["诈骗罪"], ["266"], 10)


@pytest.fixture
def gold(case: Row, write: Write) -> Path:
    """Return three cases: two defendants (weight 1), four (weight 2), one (weight 0)."""
    both = ("乙", ["盗窃罪", "诈骗罪"], ["264", "266"], 10)
    four = [("甲", *THEFT), ("乙", *THEFT), ("丙", *FRAUD), ("丁", *FRAUD)]
    lone = ("甲", ["抢劫罪"], ["263"], 5)
    rows = [case(1, ("甲", *THEFT), both), case(2, *four), case("three", lone)]
    return write("gold.jsonl", rows)


@pytest.fixture
def answers(row: Row) -> list[dict[str, Any]]:
    """Return a hand-in for `gold`, in another order than the cases."""
    return [
        row("three", ("甲", ["盗窃罪"], ["264"], 5)),
        row(2, ("丙", *FRAUD), ("乙", *THEFT), ("甲", *THEFT)),
        row(1, ("甲", ["盗窃罪", "诈骗罪"], ["264"], 13), ("乙", ["盗窃罪"], ["266"], 11)),
    ]


Scored = Callable[[list[dict[str, Any]]], ScoreResult]


@pytest.fixture
def scored(gold: Path, write: Write) -> Scored:
    """Return what scores a hand-in for `gold`."""
    return lambda rows: score(Reader(TASK), gold, write("submission.jsonl", rows))


# Case 1: 甲 P 1/2 R 1 F 2/3, articles 1; 乙 P 1 R 1/2 F 2/3, articles the same; one penalty of two.
ONE = {
    "charge_precision": 3 / 4,
    "charge_recall": 3 / 4,
    "charge_f1": 2 / 3,
    "article_precision": 1,
    "article_recall": 3 / 4,
    "article_f1": 5 / 6,
    "penalty_accuracy": 1 / 2,
    "final": 0.3 * 2 / 3 + 0.3 * 5 / 6 + 0.4 / 2,  # 0.65
}
# Case 2: three of four right, the fourth is not answered.
TWO = dict.fromkeys(ONE, 3 / 4)
TOTAL = {name: (ONE[name] + 2 * TWO[name]) / 3 for name in ONE}  # weights 1, 2 and 0


def test_a_file_by_hand(scored: Scored, answers: list[dict[str, Any]]) -> None:
    found = scored(answers).to_json()
    assert {name: found[name] for name in TOTAL} == pytest.approx(TOTAL)
    assert list(found) == [
        *TOTAL,
        "examples",
        "counted",
        "unweighted",
        "interval",
        "groups",
        "baselines",
        "calibration",
        "unreadable_rate",
        "missing",
        "faulty",
        "answered_by",
        "names_not_in_facts",
    ]
    assert (found["examples"], found["missing"], found["unweighted"]) == (3, 0, False)
    # Nothing lies beside the submission, so these are unknown, not zero.
    assert (found["baselines"], found["unreadable_rate"]) == ({}, None)
    json.dumps(found, allow_nan=False)


def test_groups_by_hand(scored: Scored, answers: list[dict[str, Any]]) -> None:
    groups = scored(answers).to_json()["groups"]
    assert list(groups) == ["defendants"]
    assert set(groups["defendants"]) == {"1", "2", "4"}
    counts = {"examples": 1, "counted": 1, "unweighted": False}
    assert groups["defendants"]["2"] == pytest.approx({**counts, **ONE})
    assert groups["defendants"]["4"] == pytest.approx({**counts, **TWO})
    # The one defendant has weight 0: the group's mean is the plain one.
    lone = {**dict.fromkeys(ONE, 0.0), "penalty_accuracy": 1.0, "final": 0.4}
    counts = {"examples": 1, "counted": 0, "unweighted": True}
    assert groups["defendants"]["1"] == pytest.approx({**counts, **lone})


def test_what_counts_for_nothing_is_marked_in_groups_and_numbers(
    scored: Scored, answers: list[dict[str, Any]]
) -> None:
    text = printed(scored(answers))
    assert "3 examples, 2 of which count (weight above 0); 0 without a row" in text
    [heading] = [line for line in text.splitlines() if "by defendants" in line]
    assert re.findall(r"┃ (\S+) +(?=┃)", heading)[-3:] == ["1*", "2", "4"]
    assert "* a group whose examples all have weight 0: its means are unweighted" in text


def test_a_group_says_how_many_of_its_examples_count(case: Row, row: Row, write: Write) -> None:
    names = ["甲", "甲", "甲乙"]
    rows = [case(n, *((name, *THEFT) for name in names[n])) for n in range(3)]
    gold = write("gold.jsonl", [{**one, "groups": {"court": "高"}} for one in rows])
    text = printed(score(Reader(TASK), gold, write("submission.jsonl", [row(2)])))
    court = text[text.index("by court") :]
    assert re.search(r"examples +│ 3 \(1 counted\) ", court)
    assert "\n* " not in text[: text.index("by court")]


def test_rows_that_are_missing_incomplete_doubled_or_foreign_are_counted(
    scored: Scored, answers: list[dict[str, Any]], row: Row
) -> None:
    scores = scored([answers[1], answers[1], row(99, ("甲", *THEFT))])
    text = printed(scores)
    assert "2 of which count (weight above 0); 2 without a row, scored as unanswered" in text
    assert "3 rows have faults; `panjue check` names them" in text
    assert "unreadable" not in text, "there is no decode.json"
    assert scores.total.mean == pytest.approx(dict.fromkeys(ONE, 0.5))  # 2 * 3/4 of 3


def test_single_defendants_are_averaged_plainly_and_it_is_said(
    case: Row, row: Row, write: Write
) -> None:
    gold = write("gold.jsonl", [case(number, ("甲", *THEFT)) for number in range(4)])
    rows = [row(number, ("甲", *THEFT)) for number in range(3)]
    scores = score(Reader(TASK), gold, write("submission.jsonl", rows))
    assert scores.total.unweighted
    assert scores.total.mean["charge_f1"] == pytest.approx(3 / 4)
    assert "weight 0" in printed(scores)


def test_the_commonest_labels_as_a_peer(
    scored: Scored, answers: list[dict[str, Any]], tmp_path: Path
) -> None:
    training = (THEFT, THEFT, FRAUD)
    collect({"charges": c, "articles": a, "penalty": [PENALTIES[p]]} for c, a, p in training).save(
        tmp_path
    )
    scores = scored(answers)
    # Always 盗窃罪, 264, class 13. Case 1: F1 (1 + 2/3) / 2, penalty 1/2; case 2: half of all.
    peer = scores.baselines["commonest labels"]
    assert peer["charge_f1"] == pytest.approx((5 / 6 + 2 * 1 / 2) / 3)
    assert peer["final"] == pytest.approx(0.6 * 11 / 18 + 0.4 / 2)
    assert "0.5667" in printed(scores)
    below = "final is below the baseline 'commonest labels': 0.5667"
    assert below not in printed(scores)
    assert below in printed(scored(answers[:1]))


def printed(scores: ScoreResult, width: int = 200) -> str:
    out = StringIO()
    show(scores, Console(file=out, width=width))
    return out.getvalue()


def test_a_malformed_row_and_a_pipe_are_named(scored: Scored, gold: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"submission\.jsonl: id 2 is not in the hand-in format"):
        scored([{"id": 2, "judgments": ["甲"]}])
    os.mkfifo(pipe := tmp_path / "pipe")
    for files in ((pipe, gold), (gold, pipe)):
        with pytest.raises(UserError, match=r"pipe: is a pipe, .*give a file"):
            score(Reader(TASK), *files)


@pytest.mark.parametrize(("first", "other"), [(0, 1), (1, 0)])
def test_ids_that_are_all_one_off_are_refused(write: Write, first: int, other: int) -> None:
    """Files numbered from 0, and line numbers, which begin at 1."""
    reader = Reader(load_task("fscs"))
    numbers = [range(start, start + 5) for start in (first, other)]
    cases = write("gold.jsonl", [{"id": n, "text": "…", "label": n % 2} for n in numbers[0]])
    rows = write("submission.jsonl", [{"id": n, "label": 1} for n in numbers[1]])
    told = f"{rows}: has the ids {other} to {other + 4}, and {cases} has {first} to {first + 4}"
    with pytest.raises(UserError, match=re.escape(f"{told}: number both alike")):
        score(reader, cases, rows)
    assert list(check(reader, rows, cases)) == [f"{told}: number both alike"]
    without = write("without.jsonl", [{"text": "…", "label": n % 2} for n in range(5)])
    assert score(reader, without, write("s.jsonl", [{"id": 1, "label": 1}])).missing == 4
    fewer = write("fewer.jsonl", [{"id": n, "label": 1} for n in numbers[1]][1:])
    assert score(reader, cases, fewer).missing == 2 - first


def test_gold_must_be_labelled(case: Row, write: Write) -> None:
    rows = write("submission.jsonl", [])
    cases = write("gold.jsonl", [case(4, ("甲", ["a"], ["1"], 8), gold=False)])
    with pytest.raises(UserError, match="id 4 has no gold answer"):
        score(Reader(TASK), cases, rows)


def columns(
    weights: list[float], values: list[float], groups: list[str] | None = None
) -> MetricValues:
    """Return examples with these weights, metric values and groups."""
    rules = replace(TASK.score, metrics=(final,), weight=lambda example: weights[int(example.id)])
    found = MetricValues(replace(TASK, score=rules))
    for number, value in enumerate(values):
        of = {"kind": groups[number]} if groups and groups[number] else {}
        found.add(Example(number, "事", groups=of), np.array([value]))
    return found


WEIGHTS = st.sampled_from([0.0, 1.0, 1.585, 2.0, 6.0])
NUMBERS = st.lists(st.tuples(WEIGHTS, st.floats(0, 1)), min_size=1, max_size=30)


@given(NUMBERS)
def test_mean_and_interval_lie_within_the_values(pairs: list[tuple[float, float]]) -> None:
    weights, values = map(list, zip(*pairs, strict=True))
    summary = summarize(columns(weights, values), resamples=40)
    low, high = summary.interval["final"]
    assert summary.unweighted == (not any(weights))
    assert repr(summarize(columns(weights, values), resamples=40)) == repr(summary)
    ends = [] if summary.counted == 1 else [low, high]
    for number in (*ends, summary.mean["final"]):
        assert min(values) - 1e-9 <= number <= max(values) + 1e-9
    assert low <= high if ends else np.isnan([low, high]).all()


@given(NUMBERS)
def test_what_has_weight_0_changes_no_interval(pairs: list[tuple[float, float]]) -> None:
    """Unless all have it."""
    weights, values = map(list, zip(*pairs, strict=True))
    counted = [pair for pair in pairs if pair[0] > 0] or pairs
    alone = columns(*map(list, zip(*counted, strict=True)))
    among = columns(weights, values)
    of_alone = summarize(alone, resamples=40).interval["final"]
    assert repr(summarize(among, resamples=40).interval["final"]) == repr(of_alone)
    assert summarize(among, resamples=0).counted == len(counted)


def test_the_interval_narrows_with_more_examples() -> None:
    few = summarize(columns([1.0] * 20, [0.0, 1.0] * 10)).interval["final"]
    many = summarize(columns([1.0] * 2000, [0.0, 1.0] * 1000)).interval["final"]
    # 1.96 standard errors: 0.22 for 20 fair coins, 0.022 for 2000.
    assert few[1] - few[0] == pytest.approx(0.44, abs=0.07)
    assert many[1] - many[0] == pytest.approx(0.044, abs=0.007)


def test_examples_without_an_attribute_are_a_group_of_their_own() -> None:
    found = columns([1, 1, 1], [0, 1, 0.5], ["", "x", ""])
    members = {name: rows.tolist() for name, rows in found.members("kind").items()}
    assert members == {"-": [0, 2], "x": [1]}


@pytest.mark.parametrize(("courts", "is_column"), [(6, True), (7, False)])
def test_a_group_is_a_column_or_one_of_many_rows_and_its_name_no_markup(
    courts: int, is_column: bool, gold: Path, row: Row, write: Write
) -> None:
    first = json.loads(gold.read_text("utf-8").splitlines()[0])
    rows = [{**first, "id": n, "groups": {"[red]court": f"[/b]{n}"}} for n in range(courts)]
    answers = write("answers.jsonl", [row(0, ("甲", ["盗窃罪"], ["264"], 13))])
    scores = score(Reader(TASK), write("courts.jsonl", rows), answers)
    text = printed(scores)
    [heading] = [line for line in text.splitlines() if "by [red]court" in line]
    assert [f"[/b]{n}" in heading for n in range(courts)] == [is_column] * courts
    assert all(f"[/b]{n}" in text for n in range(courts))
    narrow = printed(scores, width=80)
    assert "…" not in narrow, "everything can be read"
    assert narrow.count("charge_recall") == 2 + is_column, "all, by defendants, by court"


def test_names_that_their_facts_do_not_have_are_one_line(case: Row, row: Row, write: Write) -> None:
    persons = (("甲", ["盗窃罪"], ["264"], 8), ("乙", ["诈骗罪"], ["266"], 10))
    cases = [{**case(key, *persons), "fact": "甲\n与被告人乙行窃。"} for key in range(3)]
    gold = write("gold.jsonl", cases)
    path = write("submission.jsonl", [row(key, *persons) for key in range(3)])

    def lines() -> list[str]:
        return [one.english for one in remarks(score(Reader(TASK), gold, path))]

    assert not any("not stand" in line for line in lines())
    write("gold.jsonl", [*cases[:2], {**cases[2], "fact": "甲行窃。"}])
    assert "1 of 6 names does not occur in their facts, first: id 2, 乙" in lines()


@pytest.mark.parametrize(
    ("line", "chinese"),
    [
        (
            "charges: classifier (1.00, model .97); penalty: model (.31, classifier -.24)",
            "罪名：分类器（1.00，模型 0.97）；刑罚：模型（0.31，分类器 -0.24）",
        ),
        (
            "charges: classifier; penalty: model, as decoded before",
            "罪名：分类器；刑罚：模型（与以前解析时相同）",
        ),
        ("answered by the model, as answer=model says", "模型（answer=model）"),
        ("answered by the text classifier", "分类器"),
        ("a line of another version", "a line of another version"),
    ],
)
def test_who_answered_is_said_in_chinese(line: str, chinese: str) -> None:
    titles = load_task("judgment").score.titles
    assert answered_in_chinese(line, lambda name: titles.get(name, (name, name))[1]) == chinese
