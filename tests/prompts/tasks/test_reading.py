"""Reading comprehension: files, references, scores, and replies that are nearly right."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from panjue.eval.check import check
from panjue.eval.score import score
from panjue.eval.show_scores import remarks
from panjue.prompts.example import Example
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task

TASK = load_task("reading")
TEXT = "经审理查明:原、被告因夫妻感情破裂,在重庆市荣昌县人民法院调解离婚。被告每月支付生活费800元。"
EXAMPLE = Example("1", TEXT, inputs={"question": "因何离婚？", "casename": ""})


def question(*references: str, **fields: Any) -> Example:
    """Read a question about `TEXT` with these references."""
    answers = [{"answer_start": -1, "text": text} for text in references]
    row = {"id": "1", "context": TEXT, "question": "因何离婚？", "answers": answers}
    return TASK.data.read({**row, **fields})


@pytest.mark.parametrize(
    ("texts", "kind", "span"),
    [
        (["甲", "乙", "乙"], "span", "乙"),  # the commonest words
        (["", "甲", "乙"], "span", "甲"),  # the commonest type, though no words are
        (["YES", "NO", "YES"], "yes", ""),
        (["NO"], "no", ""),
        ([" NO ", "YES\n", " NO"], "no", ""),  # as the organisers' own baseline reads them
        ([" ", "\u3000", "甲"], "unknown", ""),
        (["", "", "甲"], "unknown", ""),
    ],
)
def test_what_is_taught_of_several_references(texts: list[str], kind: str, span: str) -> None:
    assert question(*texts).answer == {"type": kind, "answer": span}


@pytest.mark.parametrize("texts", [[], [""], ["", ""]])
def test_a_blank_is_an_answer_only_of_an_impossible_question(texts: list[str]) -> None:
    for impossible in ("true", True):
        example = question(*texts, is_impossible=impossible)
        assert example.answer == {"type": "unknown", "answer": ""}
        assert example.references
    for hidden in ("", None, "false", False):
        example = question(*texts, is_impossible=hidden)
        assert (example.answer, example.references, example.groups) == (None, (), {})
    assert (question(*texts).answer is None) == (not texts)
    assert question(answers=None).answer is None


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"casename": 3}, "'casename' must be a text"),
        ({"answers": [{"answer_start": 3}]}, "'answers' must be a list of"),
    ],
)
def test_a_bad_question(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        question("800元", **fields)


def test_a_reference_that_is_not_in_the_text_is_noted() -> None:
    found = question("800元", "900元", "YES", "")
    assert found.notes == ("the reference '900元' is not in the text",)


def document(*questions: tuple[str, ...], domain: str = "civil", text: str = "原告甲。") -> Any:
    """Return a document with one question for each tuple of references."""
    qas = []
    for number, texts in enumerate(questions):
        answers = [{"text": text} for text in texts]
        qas.append({"id": f"{domain}_{number}", "question": "谁？", "answers": answers})
    return {"domain": domain, "paragraphs": [{"context": text, "casename": "纠纷", "qas": qas}]}


def gold_file(folder: Path, *documents: Any) -> Path:
    path = folder / "gold.json"
    path.write_text(json.dumps({"data": documents, "version": "1"}), "utf-8")
    return path


def test_bad_questions_may_be_skipped(tmp_path: Path) -> None:
    broken = document(("甲",), ("乙",), ("丙",))
    [_, empty, twice] = broken["paragraphs"][0]["qas"]
    empty["question"] = ""
    twice["id"] = "civil_0"
    path = gold_file(tmp_path, broken, document(("丁",), text="\ud800"))
    reader = Reader(TASK, on_bad_row="skip")
    assert [example.id for example in reader.read(path)] == ["civil_0"]
    assert [(place, reason[:12]) for (_, place), reason in reader.skipped.rows.items()] == [
        ("data[0].paragraphs[0].qas[1]", "'question' m"),
        ("data[0].paragraphs[0].qas[2]", "id civil_0 i"),
        ("data[1].paragraphs[0].qas[0]", "a lone \\ud80"),
    ]


@pytest.mark.parametrize("remarks", [b"", b"// a remark\n"])
def test_a_question_with_a_key_twice_may_be_skipped(tmp_path: Path, remarks: bytes) -> None:
    path = gold_file(tmp_path, document(("甲",), ("乙",)), document(("丙",), domain="criminal"))
    text = path.read_bytes()
    for twice, kept in (
        (b'"question"', ["civil_1", "criminal_0"]),
        (b'"context"', ["criminal_0"]),
        (b'"paragraphs"', ["criminal_0"]),
        (b'"text"', ["civil_1", "criminal_0"]),
    ):
        path.write_bytes(remarks + text.replace(twice, twice + b':"",' + twice, 1))
        reader = Reader(TASK, on_bad_row="skip")
        assert [example.id for example in reader.read(path)] == kept
        assert set(reader.skipped.rows.values()) == {
            f"not JSON: the key {twice.decode().strip(chr(34))!r} is given twice"
        }


@pytest.mark.parametrize(
    ("part", "place"),
    [
        (3, "data[0]"),
        ({}, "data[0]"),
        ({"paragraphs": 3}, "data[0]"),
        ({"paragraphs": []}, "data[0]"),
        ({"paragraphs": [3]}, "data[0].paragraphs[0]"),
        ({"paragraphs": [{"qas": []}]}, "data[0].paragraphs[0]"),
        ({"paragraphs": [{"qas": [3]}]}, "data[0].paragraphs[0].qas[0]"),
    ],
)
def test_a_document_of_another_form_is_one_bad_row(part: Any, place: str, tmp_path: Path) -> None:
    path = gold_file(tmp_path, part, document(("甲",)))
    reader = Reader(TASK, on_bad_row="skip")
    assert [example.id for example in reader.read(path)] == ["civil_0"]
    assert list(reader.skipped.rows) == [(path, place)]
    assert "no document of the form" in reader.skipped.rows[path, place]


@pytest.mark.parametrize("sign", ["\u200b", "\ufeff", "\u00ad"])
def test_invisible_characters_are_left_out(sign: str) -> None:
    marked = {"context": f"原{sign}告甲。", "question": f"谁{sign}？"}
    example = question(f"原{sign}告甲", f"YES{sign}", **marked)
    assert (example.text, example.anchor) == ("原告甲。", "谁？")
    assert (example.references, example.notes) == ((("YES",), ("原告甲",)), ())
    row = {"id": "1", "answer": f"原{sign}告"}
    assert list(TASK.data.check(example, row, None)) == []


PART = "a span that is not in the text, shortened"
DROPPED = "a span that is not in the text, dropped"
OTHER = "not the JSON that was asked for"


@pytest.mark.parametrize(
    ("reply", "kind", "span", "repairs"),
    [
        ('{"type":"span","answer":"夫妻感情破裂"}', "span", "夫妻感情破裂", []),
        ('{"type":"yes","answer":""}', "yes", "", []),
        ('{"type":"span","answer":"因为夫妻感情破裂"}', "span", "夫妻感情破裂", [PART]),
        ('{"type":"span","answer":"夫妻感情己破裂"}', "span", "夫妻感情", [PART]),
        ('{"type":"span","answer":"张三丰在武当山"}', "unknown", "", [DROPPED]),
        ('{"type":"span","answer":"%s"}' % ("张" * 400), "unknown", "", [DROPPED]),
        ('{"type":"span","answer":"%s"}' % ("张" * 401), "unknown", "", [OTHER, DROPPED]),
        ('{"answer":"是的","type":"yes"}', "yes", "", [OTHER]),
        ('```json\n{"type": "span", "answer": "800元"}\n```', "span", "800元", [OTHER]),
    ],
)
def test_replies_by_hand(reply: str, kind: str, span: str, repairs: list[str]) -> None:
    decoded = TASK.ask.decode(reply, EXAMPLE, Labels())
    assert decoded.answer == {"type": kind, "answer": span}
    assert decoded.repairs == tuple(repairs)
    assert decoded.readable


@pytest.mark.parametrize(
    "reply", ["", '{"type":"span","answer":" "}', '{"answer":"800元"}', '{"type":"no"}']
)
def test_a_reply_without_type_and_answer_is_not_read(reply: str) -> None:
    decoded = TASK.ask.decode(reply, EXAMPLE, Labels())
    assert decoded.answer == {"type": "unknown", "answer": ""}
    assert not decoded.readable


def test_markup_in_a_span_is_that_of_the_text() -> None:
    text = "借条写明<b>三月前还清</b>。"
    for span in ("<b>三月前", "三月前还清</b>", "b>三月"):
        example = Example("1", text, answer={"type": "span", "answer": span})
        assert "<b>" not in TASK.ask.target(example)
        decoded = TASK.ask.decode(TASK.ask.target(example), example, Labels())
        assert (decoded.answer["answer"], decoded.repairs) == (span, ())


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"id": "1", "answer": "800元"}, None),
        ({"id": "1", "answer": "NO"}, None),
        ({"id": "1", "answer": "900元"}, "is not in the text"),
        ({"id": "1", "answer": None}, "must be a text"),
        ({"id": "1"}, "fields must be"),
        ({"id": 1, "answer": ""}, "the id is 1"),
    ],
)
def test_faults(row: dict[str, Any], complaint: str | None) -> None:
    found = list(TASK.data.check(EXAMPLE, row, None))
    assert bool(found) == (complaint is not None)
    assert complaint is None or complaint in found[0]


CJRC = (("1", "甲"), ("2", "NO"), ("3", "丙"))
"""Answers to `cjrc_gold`: id, text."""


def cjrc_gold(folder: Path, *others: Any) -> Path:
    documents = [document(("甲",), ("NO",)), document(("乙", "丙丁"), domain="criminal"), *others]
    numbers = itertools.count(1)
    for one in documents:
        for asked in one["paragraphs"][0]["qas"]:
            asked["id"] = str(next(numbers))
    return gold_file(folder, *documents)


@pytest.mark.parametrize(
    ("answers", "civil", "criminal", "overall", "mean"),
    [
        (CJRC, 1, 1 / 3, 0.778, 0.667),
        ((("1", "丙"), *CJRC), 1, 1 / 3, 0.778, 0.667),
        ((*CJRC, ("1", "丙"), ("1", " 甲 。")), 1, 1 / 3, 0.778, 0.667),
        ((*CJRC, ("3", "乙")), 1, 0.5, 0.833, 0.75),
        (((1, "甲"), *CJRC[1:]), 0.5, 1 / 3, 0.444, 0.417),
        ((*CJRC, (1, "丙")), 1, 1 / 3, 0.778, 0.667),
        (CJRC[:1], 0.5, 0, 0.333, 0.25),
        ((("9", "甲"), CJRC[0]), 0.5, 0, 0.333, 0.25),
    ],
)
def test_the_scores_of_the_contest(
    tmp_path: Path, answers: Any, civil: float, criminal: float, overall: float, mean: float
) -> None:
    """F1 as 阅读理解/evaluate/evaluate.py gives it (CAIL2019, caf3437 of 2019-05-13): a doubled id
    counts with its last answer, and 1 is not "1". The page asks for the mean of the domains."""
    rows = [{"id": key, "answer": text} for key, text in answers]
    (tmp_path / "submission.json").write_text(dump(rows), "utf-8")
    scores = score(Reader(TASK), cjrc_gold(tmp_path), tmp_path)
    of_domains = {name: found.mean["f1"] for name, found in scores.groups["domain"].items()}
    assert of_domains == pytest.approx({"civil": civil, "criminal": criminal}, abs=5e-4)
    assert scores.total.mean["f1"] == pytest.approx(overall, abs=5e-4)
    assert scores.ranked_by["f1"] == pytest.approx(mean, abs=5e-4)
    [line] = [one.english for one in remarks(scores) if "mean of" in one.english]
    means = ", ".join(f"{name} {value:.4f}" for name, value in scores.ranked_by.items())
    assert line == f"mean of civil and criminal, by which the contest ranks: {means}"


def test_a_domain_that_the_contest_does_not_have_is_noted(tmp_path: Path) -> None:
    """Its script stops with a KeyError (CAIL2019, caf3437 of 2019-05-13)."""
    gold = cjrc_gold(tmp_path, document(("甲",), domain="行政"))
    *_, other = Reader(TASK).read(gold)
    assert other.notes == ("domain '行政' is neither civil nor criminal: the contest stops there",)
    (tmp_path / "submission.json").write_text(dump([{"id": "1", "answer": "甲"}]), "utf-8")
    assert score(Reader(TASK), gold, tmp_path).ranked_by["f1"] == pytest.approx(0.25)
    only = gold_file(tmp_path, document(("甲",)))
    (tmp_path / "submission.json").write_text(dump([{"id": "civil_0", "answer": "甲"}]), "utf-8")
    assert score(Reader(TASK), only, tmp_path).ranked_by == {}, "there is no other to compare"


def test_an_id_of_another_type_is_named(tmp_path: Path) -> None:
    gold = cjrc_gold(tmp_path)
    path = tmp_path / "submission.json"
    path.write_text(
        dump([{"id": 1, "answer": "甲"}, *({"id": k, "answer": ""} for k in "123")]), "utf-8"
    )
    [found] = check(Reader(TASK), path, gold)
    assert found == f"{path}:row 1: id 1 is no case of {gold}; there it is a text"


def test_a_file_by_hand(tmp_path: Path) -> None:
    documents = [
        document(("甲",), ("YES",), ("",), text="原告甲欠款。"),
        document(("甲乙", "甲", "丙"), domain="criminal"),
    ]
    answers = {"civil_0": "甲", "civil_1": "NO", "criminal_0": "甲", "other": "甲"}
    rows = [{"id": key, "answer": answer} for key, answer in answers.items()]
    (tmp_path / "submission.json").write_text(dump(rows), "utf-8")
    scores = score(Reader(TASK), gold_file(tmp_path, *documents), tmp_path)
    # The last civil question has no row and scores 0, though nothing was the right answer.
    assert scores.total.mean == pytest.approx({"em": (1 + 2 / 3) / 4, "f1": (1 + 8 / 9) / 4})
    found = scores.to_json()
    assert (found["missing"], found["faulty"], found["examples"]) == (1, 1, 4)
    assert found["groups"]["domain"]["civil"]["f1"] == pytest.approx(1 / 3)
    # 甲乙 against 甲 and 丙: 2/3; 甲 against 甲乙 and 丙: 2/3; 丙 against the others: 0.
    assert found["baselines"]["human"]["f1"] == pytest.approx(4 / 9)
    assert found["groups"]["type"]["unknown"] == {
        "examples": 1,
        "counted": 1,
        "unweighted": False,
        "em": 0.0,
        "f1": 0.0,
    }
    assert found["baselines"]["always unknown"]["f1"] == pytest.approx(1 / 4)
    # 原告甲欠款 against 甲: 2/6; against the sets of 甲乙, 甲, 丙 原告甲 gives 2/4, 2/5, 2/4.
    expected = (2 / 6 + 0 + 0 + (2 / 4 + 2 / 5 + 2 / 4) / 3) / 4
    assert found["baselines"]["first sentence"]["f1"] == pytest.approx(expected)


def test_real_questions_as_measured_before(real_data: Path, tmp_path: Path) -> None:
    real = real_data / "cjrc/dev.json"
    with TASK.data.submission.writing(tmp_path / "submission.json") as write:
        for example in Reader(TASK).read(real):
            assert example.answer is not None
            write(TASK.data.write(example, example.answer))
    found = score(Reader(TASK), real, tmp_path).to_json()
    assert found["examples"] == 6000
    assert found["baselines"]["human"]["f1"] == pytest.approx(0.922, abs=5e-4)
    assert found["baselines"]["first sentence"]["f1"] == pytest.approx(0.076, abs=5e-4)
    assert found["baselines"]["always unknown"]["f1"] == pytest.approx(0.221, abs=5e-4)
    # One of three references is not always as the others are.
    assert found["f1"] == pytest.approx(0.988, abs=5e-4)
    assert list(check(Reader(TASK), tmp_path, real)) == []
