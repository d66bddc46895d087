"""The official reading score: its rules one by one, then the numbers of the real data."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from panjue.eval.check import check
from panjue.eval.reading import character_f1, characters, em, f1
from panjue.eval.score import Scores, domain_means, score
from panjue.prompts.files import dump
from panjue.prompts.task import load_task

TASK = load_task("reading")


def document(*answers: tuple[str, ...], domain: str = "civil", text: str = "原告甲。") -> Any:
    """Return a document with one question for each tuple of references."""
    qas = [
        {"id": f"{domain}_{i}", "question": "谁？", "answers": [{"text": t} for t in texts]}
        for i, texts in enumerate(answers)
    ]
    paragraph = {"context": text, "casename": "纠纷", "qas": qas}
    return {"caseid": "1", "domain": domain, "paragraphs": [paragraph]}


def gold_file(path: Path, *documents: Any) -> Path:
    path.write_text(dump({"data": documents, "version": "1"}), "utf-8")
    return path


def scored(folder: Path, documents: list[Any], answers: dict[str, str]) -> Scores:
    gold = gold_file(folder / "gold.json", *documents)
    rows = [{"id": key, "answer": answer} for key, answer in answers.items()]
    (folder / "submission.json").write_text(dump(rows), "utf-8")
    return score(TASK, gold, folder)


@given(st.text(), st.text())
def test_character_f1_is_symmetric_and_bounded(one: str, other: str) -> None:
    assert 0 <= character_f1(one, other) <= 1
    assert character_f1(one, other) == character_f1(other, one)
    assert character_f1(one, one) == 1
    assert character_f1(one[::-1], one) == 1, "order does not count"


@pytest.mark.parametrize(
    ("reference", "answer", "expected"),
    [
        ("夫妻感情破裂", "因夫妻感情破裂", 2 * 6 / (6 + 7)),
        ("800元", "８００元", 2 * 1 / 8),  # full-width digits are digits, and others
        ("三三两", "三两两", 2 * 2 / 6),  # a multiset
        ("YES", "yes", 1.0),
        ("a-b, c", "ABC", 1.0),
        ("", "", 1.0),
        ("", "。！", 1.0),  # nothing is left of it
        ("", "甲", 0.0),
        ("甲", "", 0.0),
        ("甲", "乙", 0.0),
    ],
)
def test_character_f1_by_hand(reference: str, answer: str, expected: float) -> None:
    assert character_f1(reference, answer) == pytest.approx(expected)


def test_normal_characters_are_letters_and_digits() -> None:
    assert characters("约 40公斤（A²½）") == ("约", "4", "0", "公", "斤", "a", "²")


def test_leave_one_out_by_hand() -> None:
    """甲 is left out once, 甲乙 once, 丙 once: the best of the other two counts."""
    sets = (("甲乙", "丙"), ("甲", "丙"), ("甲", "甲乙"))
    assert f1({"references": sets}, {"answer": "甲"}) == pytest.approx((2 / 3 + 1 + 1) / 3)
    assert em({"references": sets}, {"answer": "甲"}) == pytest.approx((0 + 1 + 1) / 3)
    assert f1({"references": (("甲",),)}, {"answer": "甲"}) == 1
    assert f1({"references": (("",),)}, None) == 0, "a missing answer is not an empty one"


def test_a_file_by_hand(tmp_path: Path) -> None:
    documents = [
        document(("甲",), ("YES",), (), text="原告甲欠款。"),
        document(("甲乙", "甲", "丙"), domain="criminal"),
    ]
    told = {"civil_0": "甲", "civil_1": "NO", "criminal_0": "甲", "other": "甲"}
    scores = scored(tmp_path, documents, told)
    # The last civil question has no row and scores 0, though nothing was the right answer.
    assert scores.total.mean == pytest.approx({"em": (1 + 2 / 3) / 4, "f1": (1 + 8 / 9) / 4})
    found = scores.to_json()
    assert (found["missing"], found["foreign"], found["examples"]) == (1, 1, 4)
    assert found["civil_f1"] == pytest.approx(1 / 3)
    assert found["criminal_f1"] == pytest.approx(8 / 9)
    # 甲乙 against 甲 and 丙: 2/3; 甲 against 甲乙 and 丙: 2/3; 丙 against the others: 0.
    assert found["human_f1"] == pytest.approx(4 / 9)
    assert found["groups"]["type"]["unknown"] == {"examples": 1, "em": 0.0, "f1": 0.0}
    unknown = found["peers"]["always unknown"]["f1"]
    assert unknown == pytest.approx(1 / 4)
    # 原告甲欠款 against 甲: 2/6; against the sets of 甲乙, 甲, 丙 原告甲 gives 2/4, 2/5, 2/4.
    expected = (2 / 6 + 0 + 0 + (2 / 4 + 2 / 5 + 2 / 4) / 3) / 4
    assert found["peers"]["first sentence"]["f1"] == pytest.approx(expected)


def test_without_references_in_plural_or_a_domain_there_is_no_such_number(tmp_path: Path) -> None:
    found = scored(tmp_path, [document(("甲",), domain="")], {"_0": "甲"}).to_json()
    assert (found["f1"], found["human_f1"], found["civil_f1"]) == (1, None, None)


def test_two_domains_count_alike_whatever_their_size(tmp_path: Path) -> None:
    first, second = tmp_path / "in", tmp_path / "out"
    first.mkdir()
    second.mkdir()
    one = scored(first, [document(("甲",), ("甲",))], {"civil_0": "甲", "civil_1": "甲"})
    other = scored(second, [document(("甲",))], {"civil_0": "乙"})
    assert domain_means(one, other) == {"em": 0.5, "f1": 0.5}


@pytest.fixture
def real(shared: Path) -> Path:
    return shared / "cjrc/dev.json"


def test_real_questions_as_measured_before(real: Path, tmp_path: Path) -> None:
    with TASK.handin.writing(tmp_path / "submission.json") as write:
        for example in TASK.read(real):
            assert example.answer is not None
            write(TASK.submission(example, example.answer))
    found = score(TASK, real, tmp_path).to_json()
    assert found["examples"] == 6000
    assert found["human_f1"] == pytest.approx(0.922, abs=5e-4)
    assert found["peers"]["first sentence"]["f1"] == pytest.approx(0.076, abs=5e-4)
    assert found["peers"]["always unknown"]["f1"] == pytest.approx(0.221, abs=5e-4)
    # One of three references is not always as the others are.
    assert found["f1"] == pytest.approx(0.988, abs=5e-4)
    assert list(check(TASK, tmp_path, real)) == []


def test_real_gold_with_one_reference_scores_one(real: Path, tmp_path: Path) -> None:
    documents = json.loads(real.read_text("utf-8"))["data"][:100]
    rows = []
    for one in documents:
        for question in one["paragraphs"][0]["qas"]:
            question["answers"] = question["answers"][:1]
            rows.append({"id": question["id"], "answer": question["answers"][0]["text"]})
    gold = gold_file(tmp_path / "gold.json", *documents)
    (tmp_path / "submission.json").write_text(dump(rows), "utf-8")
    assert score(TASK, gold, tmp_path).total.mean == {"em": 1.0, "f1": 1.0}
