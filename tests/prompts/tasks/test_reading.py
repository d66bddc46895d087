"""Reading comprehension: files, prompt, schema, and replies that are nearly right."""

import json
from pathlib import Path
from typing import Any

import pytest

from panjue.eval.check import check
from panjue.eval.score import ScoreResult, score
from panjue.prompts.example import Example
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.prompts.tasks.reading.metric import em, f1

TASK = load_task("reading")

SAMPLE = Path(__file__).parents[3] / "prompts/tasks/reading/sample.json"

TEXT = "经审理查明:原、被告因夫妻感情破裂,在重庆市荣昌县人民法院调解离婚。被告每月支付生活费800元。"

EXAMPLE = Example("1", TEXT, inputs={"question": "因何离婚？", "casename": ""})


def asked(**fields: Any) -> Example:
    row = {"id": "1", "context": TEXT, "question": "因何离婚？", **fields}
    return TASK.data.read(row)


def answers(*texts: str) -> list[dict[str, Any]]:
    return [{"answer_start": -1, "text": text} for text in texts]


@pytest.mark.parametrize(
    ("texts", "kind", "span"),
    [
        (["甲", "乙", "乙"], "span", "乙"),  # the commonest words
        (["", "甲", "乙"], "span", "甲"),  # the commonest type, though no words are
        (["YES", "NO", "YES"], "yes", ""),
        (["NO"], "no", ""),
        (["", "", "甲"], "unknown", ""),
    ],
)
def test_what_is_taught_of_several_references(texts: list[str], kind: str, span: str) -> None:
    assert asked(answers=answers(*texts)).answer == {"type": kind, "answer": span}


@pytest.mark.parametrize("texts", [[], [""], ["", ""]])
def test_a_blank_is_no_answer_unless_the_question_is_said_to_have_none(texts: list[str]) -> None:
    for said in ("true", True):
        found = asked(answers=answers(*texts), is_impossible=said)
        assert found.answer == {"type": "unknown", "answer": ""}
        assert found.references
    for blank in ("", None, "false", False, "null"):
        hidden = asked(answers=answers(*texts), is_impossible=blank)
        assert (hidden.answer, hidden.references, "type" in hidden.groups) == (None, (), False)
    assert (asked(answers=answers(*texts)).answer is None) == (not texts)


def test_a_reference_that_is_not_in_the_text_is_noted() -> None:
    found = asked(answers=answers("800元", "900元", "YES", ""))
    assert found.notes == ("the reference '900元' is not in the text",)


def test_a_hidden_file_cannot_be_scored(tmp_path: Path) -> None:
    question = {"id": "1", "question": "谁？", "answers": [], "is_impossible": ""}
    paragraph = {"context": TEXT, "casename": "", "qas": [question]}
    with pytest.raises(UserError, match="gold"):
        scored(tmp_path, [{"paragraphs": [paragraph]}], {"1": "甲"})


def changed(folder: Path, *changes: tuple[str, Any]) -> Path:
    """Write the invented file with other values at these places of its first two documents."""
    data = json.loads(SAMPLE.read_text("utf-8"))
    for place, value in changes:
        *outer, last = [int(part) if part.isdigit() else part for part in place.split("/")]
        inner = data["data"]
        for part in outer:
            inner = inner[part]
        inner[last] = value
    path = folder / "train.json"
    path.write_text(json.dumps(data), "utf-8")
    return path


def test_bad_questions_are_named_and_may_be_skipped(tmp_path: Path) -> None:
    path = changed(
        tmp_path,
        ("0/paragraphs/0/qas/1/question", ""),
        ("0/paragraphs/0/qas/2/id", "a1_1"),
        ("0/paragraphs/0/qas/3/question", "\ud800"),
    )
    with pytest.raises(UserError, match=r"train.json:data\[0\].paragraphs\[0\].qas\[1\]: 'quest"):
        list(Reader(TASK).read(path))
    reader = Reader(TASK, on_bad_row="skip")
    assert [example.id for example in reader.read(path)][:3] == ["a1_1", "a1_5", "b2_1"]
    assert [(place, reason[:12]) for (_, place), reason in reader.skipped.rows.items()] == [
        ("data[0].paragraphs[0].qas[1]", "'question' m"),
        ("data[0].paragraphs[0].qas[2]", "id a1_1 is a"),
        ("data[0].paragraphs[0].qas[3]", "a lone \\ud80"),
    ]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('{"data": 3}', ": has no list 'data'"),
        ('{"data": [{"paragraphs": 3}]}', r":data\[0\]: no document of the form"),
        ('{"data": [{"paragraphs": [{}]}]}', r":data.*paragraphs\[0\]: no document of the form"),
        ('{"data": [{"paragraphs": []}]}', r":data\[0\]: no document of the form"),
        ('{"data": [{"paragraphs": [{"qas": []}]}]}', r":data.*paragraphs\[0\]: no document"),
        ('{"data": [{"paragraphs": [{"qas": [3]}]}]}', r":data.*qas\[0\]: no document of the form"),
    ],
)
def test_another_form_is_named(content: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    path.write_text(content, "utf-8")
    with pytest.raises(UserError, match=f"train.json{complaint}"):
        list(Reader(TASK).read(path))


@pytest.mark.parametrize("part", [{}, {"paragraphs": []}, {"paragraphs": [{"qas": []}]}, 3])
def test_a_document_without_questions_may_be_skipped(part: Any, tmp_path: Path) -> None:
    path = changed(tmp_path, ("0", part))
    reader = Reader(TASK, on_bad_row="skip")
    assert [example.id for example in reader.read(path)][:1] == ["b2_1"]
    assert len(reader.skipped.rows) == 1


PART = "a span that is not in the text, shortened"
DROPPED = "a span that is not in the text, dropped"
THOUGHT = "think block dropped"
OTHER = "not the JSON that was asked for"


@pytest.mark.parametrize(
    ("reply", "kind", "span", "repairs"),
    [
        ('{"type":"span","answer":"夫妻感情破裂"}', "span", "夫妻感情破裂", []),
        ('{"type":"yes","answer":""}', "yes", "", []),
        ('{"type":"span","answer":"因为夫妻感情破裂"}', "span", "夫妻感情破裂", [PART]),
        ('{"type":"span","answer":"夫妻感情己破裂"}', "span", "夫妻感情", [PART]),
        ('{"type":"span","answer":"张三丰在武当山"}', "unknown", "", [DROPPED]),
        ('{"answer":"是的","type":"yes"}', "yes", "", [OTHER]),
        ('```json\n{"type": "span", "answer": "800元"}\n```', "span", "800元", [OTHER]),
        ('<think>是800元？</think>{"type":"span","answer":"800元"}', "span", "800元", [THOUGHT]),
    ],
)
def test_replies_by_hand(reply: str, kind: str, span: str, repairs: list[str]) -> None:
    decoded = TASK.ask.decode(reply, EXAMPLE, Labels())
    assert decoded.answer == {"type": kind, "answer": span}
    assert decoded.repairs == tuple(repairs)
    assert decoded.readable


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "夫妻感情破裂",
        '{"type":"span","answer":""}',
        '{"answer":"800元"}',
        '{"type":"span","answer":"夫妻感情破',
        '{"type":"span","answer":"800元","answer":"夫妻"}',
    ],
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
        ({"id": "1", "answer": ""}, None),
        ({"id": "1", "answer": "NO"}, None),
        ({"id": "1", "answer": "900元"}, "is not in the text"),
        ({"id": "1", "answer": None}, "must be a text"),
        ({"id": "1"}, "fields must be"),
        ({"id": "1", "answer": "", "type": "no"}, "fields must be"),
        ({"id": 1, "answer": ""}, "the id is 1"),
    ],
)
def test_faults(row: dict[str, Any], complaint: str | None) -> None:
    found = list(TASK.data.check(EXAMPLE, row, None))
    assert bool(found) == (complaint is not None)
    assert complaint is None or complaint in found[0]


def document(*answers: tuple[str, ...], domain: str = "civil", text: str = "原告甲。") -> Any:
    """Return a document with one question for each tuple of references."""
    qas = [
        {
            "id": f"{domain}_{i}",
            "question": "谁？",
            "answers": [{"text": t} for t in texts],
            "is_impossible": str(not any(texts)).lower(),
        }
        for i, texts in enumerate(answers)
    ]
    paragraph = {"context": text, "casename": "纠纷", "qas": qas}
    return {"caseid": "1", "domain": domain, "paragraphs": [paragraph]}


def gold_file(path: Path, *documents: Any) -> Path:
    path.write_text(dump({"data": documents, "version": "1"}), "utf-8")
    return path


def scored(folder: Path, documents: list[Any], answers: dict[str, str]) -> ScoreResult:
    gold = gold_file(folder / "gold.json", *documents)
    rows = [{"id": key, "answer": answer} for key, answer in answers.items()]
    (folder / "submission.json").write_text(dump(rows), "utf-8")
    return score(Reader(TASK), gold, folder)


def test_leave_one_out_by_hand() -> None:
    """甲 is left out once, 甲乙 once, 丙 once: the best of the other two counts."""
    sets = (("甲乙", "丙"), ("甲", "丙"), ("甲", "甲乙"))
    assert f1({"references": sets}, {"answer": "甲"}) == pytest.approx((2 / 3 + 1 + 1) / 3)
    assert em({"references": sets}, {"answer": "甲"}) == pytest.approx((0 + 1 + 1) / 3)
    assert f1({"references": (("甲",),)}, {"answer": "甲"}) == 1
    assert f1({"references": (("",),)}, None) == 0, "a missing answer is not an empty one"
    assert f1({"references": (("800元",),)}, {"answer": "８００元"}) == 2 * 1 / 8, "other digits"


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
    assert (found["missing"], found["faulty"], found["examples"]) == (1, 1, 4)
    assert found["groups"]["domain"]["civil"]["f1"] == pytest.approx(1 / 3)
    assert found["groups"]["domain"]["criminal"]["f1"] == pytest.approx(8 / 9)
    # 甲乙 against 甲 and 丙: 2/3; 甲 against 甲乙 and 丙: 2/3; 丙 against the others: 0.
    assert found["baselines"]["human"]["f1"] == pytest.approx(4 / 9)
    assert found["groups"]["type"]["unknown"] == {"examples": 1, "em": 0.0, "f1": 0.0}
    unknown = found["baselines"]["always unknown"]["f1"]
    assert unknown == pytest.approx(1 / 4)
    # 原告甲欠款 against 甲: 2/6; against the sets of 甲乙, 甲, 丙 原告甲 gives 2/4, 2/5, 2/4.
    expected = (2 / 6 + 0 + 0 + (2 / 4 + 2 / 5 + 2 / 4) / 3) / 4
    assert found["baselines"]["first sentence"]["f1"] == pytest.approx(expected)


@pytest.fixture
def real(shared: Path) -> Path:
    return shared / "cjrc/dev.json"


def test_real_questions_as_measured_before(real: Path, tmp_path: Path) -> None:
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
