"""Test cases that training has too, or almost: they are counted, and the score is given without."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from panjue.eval.metric_values import MetricValues
from panjue.eval.score import ScoreResult, in_sample, score
from panjue.eval.show_scores import show
from panjue.eval.twins import NEAR, TwinCounter, TwinFinder, distinct_grams_of, share_of_both
from panjue.prompts.example import Example
from panjue.prompts.fingerprint import model_sha256
from panjue.prompts.labels import collect
from panjue.prompts.plumbing.files import sha256, write_json
from panjue.prompts.reader import is_held_out
from panjue.prompts.task import load_task
from panjue.prompts.tasks.judgment.penalties import PENALTIES
from panjue.serve.answers import open_answers
from tests.records import TRAINED, Row, Write, believing, write_answers, write_training

TASK = load_task("judgment")
THEFT = (["盗窃罪"], ["264"], 13)
DEEDS = {
    "theft": "被告人甲某、乙某于凌晨翻墙进入某小区，撬开三号楼住户的防盗门，窃得金项链一条。",
    "fraud": "被告人甲某、乙某冒充银行客服人员拨打电话，谎称银行卡被冻结，骗取老人存款二十万元。",
    "drugs": "甲某、乙某驾驶货车从边境运输毒品至省城，途经收费站时被民警当场查获，缴获冰毒三包。",
}


def facts(deed: str) -> Example:
    return Example(deed, DEEDS[deed], names=("甲某", "乙某"))


def twins(training: Sequence[Example], cases: Sequence[Example]) -> list[bool]:
    return TwinFinder(training).have_twins(cases)


def test_copies_are_near_twins_and_other_cases_are_not() -> None:
    theft, fraud, drugs = map(facts, DEEDS)
    other_names = theft.text.replace("甲某", "赵某丁").replace("乙某", "钱某戊")
    copies = [
        theft,
        replace(theft, text=other_names, names=("赵某丁", "钱某戊")),
        replace(theft, text=f" {theft.text[:20]}\n\u3000{theft.text[20:]} "),
        replace(theft, text=theft.text.replace("，", ",").replace("三", "三\u200b")),
        replace(theft, text=theft.text.replace("凌晨", "深夜")),
    ]
    assert twins([fraud, theft], copies) == [True] * len(copies)
    assert twins([fraud, theft], [drugs, fraud]) == [False, True]
    assert twins([fraud], copies) == [False] * len(copies)


def test_there_may_be_nothing_to_compare() -> None:
    no_words = Example(1, "。。。")
    assert twins([], [facts("theft"), no_words]) == [False, False]
    assert twins([no_words], [no_words, facts("theft")]) == [True, False], "the same text"


TEXTS = st.text(alphabet="被告人甲乙盗窃手机财物价值元现金 ,。A1", min_size=1, max_size=60)


@given(st.lists(TEXTS, max_size=8), st.lists(TEXTS, min_size=1, max_size=8))
def test_what_is_found_is_near_or_the_same(training: list[str], texts: list[str]) -> None:
    known = [Example(number, text) for number, text in enumerate(training)]
    cases = [Example(number, text) for number, text in enumerate(texts)]
    same = ["".join(text.split()) for text in training]
    shares: dict[int, float] = {}
    grams_of_known = distinct_grams_of(known) if known else []
    for case, grams in zip(cases, distinct_grams_of(cases), strict=True):
        of_all = [share_of_both(grams, other) for other in grams_of_known]
        shares[int(case.id)] = max(of_all, default=0.0)
    for case, is_twin in zip(cases, twins(known, cases), strict=True):
        is_same = "".join(case.text.split()) in same
        assert is_twin == (is_same or shares[int(case.id)] >= NEAR)


Make = Callable[..., ScoreResult]


@pytest.fixture
def made(case: Row, row: Row, write: Write, tmp_path: Path) -> Make:
    """Return what scores answers of a run that was trained on some deeds, or on a file of them."""

    def of(trained_on: Sequence[str], tested_on: Sequence[str], **record: Any) -> ScoreResult:
        def cases(deeds: Sequence[str]) -> list[Any]:
            found = []
            for number, deed in enumerate(deeds):
                found.append({**case(number, *PEOPLE), "fact": DEEDS.get(deed, deed)})
            return found

        train = write("train.jsonl", cases(trained_on))
        test = write("test.jsonl", cases(tested_on))
        run = tmp_path / "run"
        logits = {"charges": {"盗窃罪": 9.0}, "articles": {"264": 9.0}}
        logits["penalty"] = {PENALTIES[13]: 9.0}
        record = {"train": str(train), "train_sha256": sha256(train), **record}
        write_training(run / "adapter", believing(TASK, logits), **record)
        of_training = [{"charges": ["盗窃罪"], "articles": ["264"], "penalty": [PENALTIES[13]]}]
        for folder in (run / "adapter", run / "answers/test"):
            folder.mkdir(parents=True, exist_ok=True)
            collect(of_training).save(folder)
        answers = run / "answers/test"
        digest = model_sha256(run / "adapter")
        write_answers(answers, test, trained=str(run / "adapter"), trained_sha256=digest)
        rows = [row(number, *PEOPLE[: 1 + number % 2]) for number in range(len(tested_on))]
        submission = write("run/answers/test/submission.jsonl", rows)
        write_json(answers / "decode.json", {"calls": 2, "unreadable": 0} | signed(submission))
        opened = open_answers(answers)
        return score(opened.reader, test, submission, opened)

    return of


PEOPLE = [("甲某", *THEFT), ("乙某", *THEFT)]


def signed(submission: Path) -> dict[str, str]:
    return {"submission_sha256": sha256(submission)}


def printed(scores: ScoreResult) -> str:
    out = StringIO()
    show(scores, Console(file=out, width=200))
    return out.getvalue()


def test_they_are_counted_and_the_score_is_given_without_them(made: Make) -> None:
    assert not any(is_held_out(facts(deed)) for deed in DEEDS), "they are trained on"
    scores = made(["theft"], ["drugs", "theft", "fraud"])
    assert scores.twins
    assert scores.twins.examples == 1
    assert scores.twins.without
    # Of the first and the third case one person is answered, of two.
    assert scores.twins.without.mean["final"] == pytest.approx(0.5)
    said = "1 of 3 examples have a near twin in training (80% of the n-grams); without them final"
    assert f"{said} 0.5000 (0.5000 - 0.5000)" in printed(scores)
    assert scores.to_json()["twins"]["without"]["mean"]["final"] == pytest.approx(0.5)
    json.dumps(scores.to_json(), allow_nan=False)


def test_over_cases_that_do_not_count_there_is_no_score_without_them() -> None:
    """The others have one defendant each, and so weight 0."""
    values = MetricValues(TASK)
    for example in (facts("theft"), replace(facts("drugs"), names=("甲某",))):
        values.add(example, np.ones(len(TASK.score.names)))
    counter = TwinCounter([], TASK)
    counter._has_twin = [True, False]
    found = counter.found(values)
    assert (found.examples, found.without) == (1, None)


def test_where_all_or_none_have_one(made: Make) -> None:
    assert "no example has a near twin in training" in printed(made(["theft"], ["drugs"]))
    said = printed(made(["theft"], ["theft", "theft"]))
    assert "2 of 2 examples have a near twin in training (80% of the n-grams)\n" in said


def test_where_it_cannot_be_known_that_is_said(made: Make, tmp_path: Path) -> None:
    file = tmp_path / "gone.jsonl"
    for record in ({"train": str(file)}, {"train_sha256": "0"}, {"mix": str(file)}):
        said = printed(made(["theft"], ["theft"], **record))
        assert "near twins in training: unknown, " in said
        assert "is missing, or was changed since the training" in said
    assert made(["theft"], ["theft"], classifier_sha256=None).twins is None


def test_what_was_held_out_has_no_twin_in_itself(made: Make, case: Row, write: Write) -> None:
    number = next(n for n in range(99) if is_held_out(Example(n, f"甲某、乙某作案{n}次。")))
    held_out = f"甲某、乙某作案{number}次。"
    scores = made(["theft", held_out], [held_out])
    assert scores.twins
    assert scores.twins.examples == 0
    dev = write("dev.jsonl", [{**case(0, *PEOPLE), "fact": DEEDS["theft"]}])
    record = {"dev": str(dev), "dev_sha256": sha256(dev)}
    scores = made(["theft", held_out], ["theft", held_out], **record)
    assert scores.twins
    assert scores.twins.examples == 1, "with a dev file, nothing else is held out"


def test_trained_on_is_looked_for_in_gold_and_in_the_answered_file(
    made: Make, tmp_path: Path
) -> None:
    """The cases of the training were answered without their outcomes, or in another layout."""
    scores = made(["theft"], ["drugs"])
    assert scores.in_sample is None
    folder = tmp_path / "run/answers/test"
    other = tmp_path / "other.jsonl"
    other.write_text((tmp_path / "test.jsonl").read_text("utf-8") + "\n", "utf-8")
    for name in ("train_sha256", "mix_sha256", "from_record"):
        for file in ("test.jsonl", "other.jsonl"):
            digest: Any = sha256(tmp_path / file)
            if name == "from_record":  # the training from which this one started
                digest = {**TRAINED, "train_sha256": digest}
            made(["theft"], ["drugs"], **{name: digest})
            opened = open_answers(folder, other)
            assert in_sample(opened) == "these cases were trained on"
            found = score(opened.reader, other, opened.folder / "submission.jsonl", opened)
            assert "text classifier" not in found.baselines
    made(["theft"], ["drugs"], dev_sha256=sha256(other))
    assert "looked at these cases" in str(in_sample(open_answers(folder, other)))
