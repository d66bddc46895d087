"""The report page: its numbers by hand."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from panjue.eval.agreement import AGREEMENTS, NO_REPLY, agreement
from panjue.eval.answers import AnsweredFile, check_complete, open_answers
from panjue.eval.report import page, page_data
from panjue.eval.shown import items_of, split_at_names
from panjue.prompts.example import Example
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump, read_json, read_lines, sha256, write_json
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task, task_folders
from panjue.prompts.tasks.judgment.penalties import PENALTIES
from panjue.prompts.tasks.metrics import same
from tests.eval.records import TRAINED, Row, Write, write_answers

TASK = load_task("judgment")
DIALOGUES = Path(__file__).parents[2] / "prompts/tasks/dialogue/sample.folder"
THEFT = (["盗窃罪"], ["264"], 11)
HOSTILE = ["<script>alert(1)</script>", '王某"A', "李某乙"]


def run_on(folder: Path, gold: Path, change: Any) -> Path:
    """Make a run that answers as gold, but for what `change` does to its rows."""
    Labels().save(folder)
    write_answers(folder, gold)
    with (
        (folder / "submission.jsonl").open("w", encoding="utf-8") as out,
        (folder / "completions.jsonl").open("w", encoding="utf-8") as raw,
        (folder / "confidence.jsonl").open("w", encoding="utf-8") as sure,
    ):
        for number, example in enumerate(Reader(TASK).read(gold)):
            row = json.loads(dump(TASK.gold(example)))
            change(number, row)
            out.write(dump(row) + "\n")
            reply = {"texts": [f"raw reply of {example.id}"], "finish": ["stop"]}
            raw.write(dump({"id": example.id, **reply, "dropped_sentences": 2}) + "\n")
            each = {"charges": 0.9, "articles": 0.6, "penalty": 0.3}
            told = {"id": example.id, "confidence": [each] * len(row["judgments"])}
            sure.write(dump(told) + "\n")
    decoding = {"calls": number + 1, "unreadable": 0, "repaired": 7, "repairs": {"<q>": 7}}
    decoding |= {"left_out": 4, "missing_fields": 9, "answered_by": "answered by the model"}
    decoding["submission_sha256"] = sha256(folder / "submission.jsonl")
    write_json(folder / "decode.json", decoding)
    return folder


def answer_by_classifier(run: Path) -> None:
    """Have a run's submission be the text classifier's."""
    changes: dict[str, dict[str, Any]] = {
        "manifest.json": {"answered_by": "classifier"},
        "decode.json": {"answered_by": "it was better", "calls": 0},
    }
    for name, change in changes.items():
        write_json(run / name, {**read_json(run / name), **change})
    (run / "completions.jsonl").unlink()


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Return what gives all runs a classifier: gold, but for what `change` does to an answer."""

    class Advisor:
        def __init__(self, change: Any) -> None:
            self._change = change

        def opinions(self, _example: Example, _row: Any) -> list[Any]:
            return []

        def alone(self, example: Example, _opinions: Any) -> Any:
            fallback = TASK.ask.decode("", example, Labels()).answer
            answer = json.loads(dump(example.answer or fallback))
            self._change(example, answer)
            return answer

    def by(change: Any) -> None:
        monkeypatch.setattr(AnsweredFile, "advisor", lambda _: Advisor(change))

    return by


def think(example: Example, answer: dict[str, Any]) -> None:
    """Be wrong on the first two defendants' charges of the first case."""
    if example.id == 1:
        answer["judgments"][0]["charges"] = ["抢劫罪"]
        answer["judgments"][1]["charges"] = ["诈骗罪"]


@pytest.fixture
def hostile(case: Row, write: Write, tmp_path: Path) -> Path:
    fact = f"被告人{HOSTILE[0]}、{HOSTILE[1]}、{HOSTILE[2]}共同盗窃。{HOSTILE[2]}望风。无人在场。"
    hostile, other = ([(name, *THEFT) for name in names] for names in (HOSTILE, ["甲"]))
    rows = [{**case(1, *hostile), "fact": fact}, {**case(2, *other), "fact": "被告人甲盗窃。"}]
    for row in rows:
        row["groups"] = {"class": "US$5 - $\\foo$", "confidence": "</script><q>", "[/b]": row["id"]}

    def change(number: int, row: dict[str, Any]) -> None:
        if number == 0:
            row["judgments"][1].update(charges=["抢劫罪"], penalty=5)

    return run_on(tmp_path / "run", write("gold.jsonl", rows), change)


def test_the_numbers_by_hand(hostile: Path) -> None:
    found = page_data(open_answers(hostile))
    # 盗窃罪: four in gold, three predicted, all three right. 2 * 3 / (4 + 3).
    assert found.classes["charges"] == {
        "盗窃罪": (4, 3, 6 / 7),
        "抢劫罪": (0, 1, 0),
    }
    year, ten = "有期徒刑九个月以上一年以下", "有期徒刑十年以上"  # twelve months; class 5
    assert TASK.score.order["penalty"][:3] == ("死刑", "无期徒刑", ten)
    assert sorted(TASK.score.order["penalty"]) == sorted(PENALTIES)
    assert list(found.classes["penalty"]) == [ten, year], "from the gravest on"
    assert found.classes["penalty"][year] == (4, 3, 6 / 7)
    assert [case.confidence for case in found.cases] == [pytest.approx(0.6)] * 2
    handled = {
        "shortened": "shortened to fit by 2 sentences",
        "unreadable": "the reply was unreadable, its answer: commonest labels",
    }
    assert [case.handled for case in found.cases] == [handled] * 2
    assert found.cases[0].reply == ["raw reply of 1"]
    assert (found.cases[0].opinions, found.agreements) == ([], {}), "there is no classifier"
    assert "who is right" not in page(found)


def test_the_classifier_s_answers_are_compared_with_the_model_s(
    hostile: Path, advised: Callable[[Any], None]
) -> None:
    advised(think)
    (hostile / "decode.json").unlink()  # the submission is not that of the replies
    found = page_data(open_answers(hostile))
    assert found.agreements == {
        "charges": {"agree, right": 2, "differ, model right": 1, "differ, both wrong": 1},
        "articles": {"agree, right": 4},
        "penalty": {"agree, right": 3, "differ, classifier right": 1},
    }
    ([first, second, third], [other]) = (case.opinions for case in found.cases)
    assert [own.predicted for own, _ in first] == [
        ["抢劫罪"],
        ["第二百六十四条"],
        ["有期徒刑九个月以上一年以下"],
    ]
    assert [how for _, how in second] == [
        "differ, both wrong",
        "agree, right",
        "differ, classifier right",
    ]
    assert {how for _, how in (*third, *other)} == {"agree, right"}


def test_what_a_reply_does_not_have_is_no_agreement(
    hostile: Path, advised: Callable[[Any], None]
) -> None:
    advised(think)
    first, _second = Reader(TASK).read(hostile.parent / "gold.jsonl")
    reply = json.loads(TASK.ask.target(first))
    del reply["judgments"][0]["penalty"]
    del reply["judgments"][2]
    TASK.ask.labels([first]).save(hostile)
    rows = [row for _, row in read_lines(hostile / "completions.jsonl")]
    rows[0]["texts"] = [dump(reply)]
    (hostile / "completions.jsonl").write_text("".join(dump(r) + "\n" for r in rows), "utf-8")
    found = page_data(open_answers(hostile))
    assert found.agreements["charges"] == {"differ, model right": 1, "differ, both wrong": 1}
    assert found.agreements["penalty"] == {"differ, classifier right": 1}
    lacks = NO_REPLY
    assert [[how == lacks for _, how in item] for item in found.cases[0].opinions] == [
        [False, False, True],
        [False, False, False],
        [True, True, True],
    ]
    assert {how for _, how in found.cases[1].opinions[0]} == {lacks}, "it is unreadable"


SETS = st.sets(st.sampled_from("甲乙丙"))


@given(SETS, SETS, SETS)
def test_two_answers_have_one_agreement(gold: set[str], model: set[str], other: set[str]) -> None:
    how = agreement(same("charges", gold, model), same("charges", gold, other))
    assert how in AGREEMENTS
    assert how.startswith("agree") == (model == other)
    assert (how in ("agree, right", "differ, model right")) == (model == gold)
    assert (how in ("agree, right", "differ, classifier right")) == (other == gold)


@pytest.mark.parametrize(
    ("task", "gold", "answered"),
    [("severity", {"label": 3}, {"label": 2}), ("ecthr", {"labels": [1, 2]}, {"labels": []})],
)
def test_a_task_of_classes_is_compared_too(
    task: str, gold: Any, answered: Any, advised: Callable[[Any], None], tmp_path: Path
) -> None:
    test = tmp_path / "gold.jsonl"
    test.write_text(dump({"id": 1, "text": "事实。", **gold}) + "\n", "utf-8")
    write_answers(tmp_path, test, task=task)
    Labels().save(tmp_path)
    (tmp_path / "submission.jsonl").write_text(dump({"id": 1, **answered}) + "\n", "utf-8")
    (tmp_path / "completions.jsonl").touch()
    advised(lambda _example, _answer: None)
    found = page_data(open_answers(tmp_path))
    assert found.agreements == {"class": {"differ, classifier right": 1}}
    [[[(own, _)]]] = [case.opinions for case in found.cases]
    assert own.predicted == own.gold


def test_what_the_classifier_answered_is_shown_once(
    hostile: Path, advised: Callable[[Any], None]
) -> None:
    advised(think)
    said = "The text classifier answered, not the model."
    assert said not in page(page_data(open_answers(hostile)))
    answer_by_classifier(hostile)
    found = page_data(open_answers(hostile))
    assert [(case.opinions, case.reply) for case in found.cases] == [([], [])] * 2
    assert said in page(found)


def test_what_is_said_of_another_submission_is_not_shown(hostile: Path) -> None:
    assert page_data(open_answers(hostile)).decoding["repaired"] == 7
    with (hostile / "submission.jsonl").open("a", encoding="utf-8") as out:
        out.write(dump({"id": 9, "judgments": []}) + "\n")
    found = page_data(open_answers(hostile))
    assert not found.decoding
    assert [case.confidence for case in found.cases] == [None, None]


def test_gold_of_other_examples_is_refused(hostile: Path, case: Row, write: Write) -> None:
    other = write("other.jsonl", [case(7, ("甲", *THEFT))])
    with pytest.raises(UserError, match="1 examples have no row there, 2 rows no example"):
        check_complete(open_answers(hostile, other))


def test_a_run_of_the_held_out_tenth_is_reported_on_that_alone(
    shared: Path, tmp_path: Path
) -> None:
    run = run_on(tmp_path / "run", shared / "drdz/dev.jsonl", lambda _number, _row: None)
    made = read_json(run / "manifest.json")
    made["held_out"] = True
    write_json(run / "manifest.json", made)
    found = page_data(open_answers(run))
    assert 0 < len(found.cases) < 60
    assert found.scores
    assert (found.scores.total.examples, found.scores.missing) == (len(found.cases), 0)


def test_a_text_is_split_at_the_names() -> None:
    text = "张某与张某甲打架。张某甲逃跑。"
    assert split_at_names(text, ["张某", "张某甲", ""]) == [
        ("张某", 0),
        ("与", None),
        ("张某甲", 1),
        ("打架。", None),
        ("张某甲", 1),
        ("逃跑。", None),
    ]
    assert split_at_names(text, [""]) == [(text, None)]


@given(st.text("甲乙a*.(", max_size=20), st.lists(st.text("甲乙a*.(", max_size=3), max_size=4))
def test_the_pieces_are_the_text_and_no_name_is_left(text: str, names: list[str]) -> None:
    pieces = split_at_names(text, names)
    assert "".join(piece for piece, _ in pieces) == text
    for piece, index in pieces:
        if index is None:
            assert not any(name and name in piece for name in names)
        else:
            assert piece == names[index]


def test_one_of_several_references_is_enough() -> None:
    task, gold = load_task("reading"), {"references": [["三万元", "30000元"]]}
    for predicted, correct in (("30000元", True), ("两万元", False), (None, False)):
        row = None if predicted is None else {"id": 1, "answer": predicted}
        [(_, [answer])] = items_of(task, gold, row)
        assert answer.gold == ["三万元", "30000元"]
        assert answer.correct is correct


def test_the_page_judges_as_the_metric_does() -> None:
    gold: dict[str, Any] = {
        "id": 1,
        "judgments": [{"name": "甲", "charges": ["盗窃罪"], "articles": [], "penalty": 1}],
    }
    right, wrong = dict(gold["judgments"][0]), {**gold["judgments"][0], "charges": ["抢劫罪"]}
    right["charges"] = ["盗窃罪", "盗窃罪"]  # metrics are over sets, and the first of two counts
    [(_, fields)] = items_of(TASK, gold, {"id": 1, "judgments": [right, wrong]})
    assert all(one.correct for one in fields)
    dialogue = load_task("dialogue")
    want = dialogue.gold(next(iter(Reader(dialogue).read(DIALOGUES))))
    told = json.loads(dump(want))
    [best] = told["chat"][0]["final_model_response"]
    told["chat"][0]["final_model_response"] = [{**best, "sentiment": "doubt"}, best]
    [(_, fields), *_] = items_of(dialogue, want, told)
    assert all(one.correct for one in fields)


def test_sentences_of_a_dialogue_stand_one_by_one() -> None:
    task = load_task("dialogue")
    gold = task.gold(next(iter(Reader(task).read(DIALOGUES))))
    items = list(items_of(task, gold, gold))
    assert [name for name, _ in items][:2] == [
        "甲：你怎么又喝酒了，",
        "乙：高兴嘛，儿子考上大学了。",
    ]
    assert [name for name, _ in items][-2:] == ["甲", "乙"]  # their emotions
    assert all(one.correct for _, fields in items for one in fields)
    told = json.loads(dump(gold))
    told["chat"][0]["final_model_response"][0]["sentiment"] = "positive"
    told["chat"][1]["final_model_response"] = []
    told["emo"]["甲"]["events"] = []
    changed = {n: [f.name for f in of if not f.correct] for n, of in items_of(task, gold, told)}
    assert {name: wrong for name, wrong in changed.items() if wrong} == {
        "甲：你怎么又喝酒了，": ["sentiment"],
        "乙：高兴嘛，儿子考上大学了。": ["sentiment", "aspect", "opinion", "rationale"],
        "甲": ["emotions"],
    }
    assert [f.predicted for _, of in items_of(task, gold, None) for f in of if f.predicted] == []
    told["chat"][0]["final_model_response"][0]["opinion"] += "了"  # means the same
    [(_, fields), *_] = items_of(task, gold, told)
    assert {one.name: one.correct for one in fields}["opinion"] is True, "as JSON has it"


def test_the_page_needs_nothing_else(hostile: Path) -> None:
    text = page(page_data(open_answers(hostile)))
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//", text)
    assert "<script>alert" not in text
    assert text.count("<script") == 2
    assert text.count("every example has weight 0") == 0
    assert "&lt;q&gt;" in text
    assert "<q>" not in text
    assert page(page_data(open_answers(hostile))) == text, "the same report is the same page"


def test_every_metric_and_baseline_has_a_name_in_both_languages() -> None:
    for name in task_folders():
        rules = load_task(name).score
        assert {*rules.names, rules.fallback} <= rules.titles.keys(), name
    assert TASK.score.parts == {"charge_f1": 0.3, "article_f1": 0.3, "penalty_accuracy": 0.4}


def test_the_demo_s_model_is_named(hostile: Path, tmp_path: Path) -> None:
    tiny, told = "This is the demo:", page(page_data(open_answers(hostile)))
    assert tiny not in told
    made = read_json(hostile / "manifest.json")
    made["trained"] = str(tmp_path / "run/adapter")
    write_json(hostile / "manifest.json", made)
    write_json(
        tmp_path / "run/adapter/manifest.json", {**TRAINED, "base": str(tmp_path / "base/model")}
    )
    write_json(tmp_path / "base/model/manifest.json", {"base": str(tmp_path / "base/untrained")})
    assert tiny not in page(page_data(open_answers(hostile)))
    write_json(tmp_path / "base/untrained/start.json", {})
    assert tiny in page(page_data(open_answers(hostile)))
    made["endpoint"] = "http://127.0.0.1:9/v1#other"
    write_json(hostile / "manifest.json", made)
    assert tiny not in page(page_data(open_answers(hostile)))


def test_without_gold_the_page_has_facts_and_answers(
    hostile: Path, case: Row, write: Write, advised: Callable[[Any], None]
) -> None:
    rows = [case(1, *((name, *THEFT) for name in HOSTILE)), case(2, ("甲", *THEFT), gold=False)]
    write_answers(hostile, write("unlabelled.jsonl", rows))
    (hostile / "decode.json").unlink()  # its replies are no answers
    advised(lambda _example, _answer: None)
    found = page_data(open_answers(hostile))
    assert (found.scores, found.classes, found.agreements) == (None, {}, {})
    compared = [[found.labels[how][0] for _, how in item] for item in found.cases[0].opinions]
    assert compared == [["agree"] * 3, ["differ", "agree", "differ"], ["agree"] * 3]
    assert "raw reply of 1" in page(found)
    (hostile / "submission.jsonl").write_text("", "utf-8")
    assert [case.items for case in page_data(open_answers(hostile)).cases] == [[], []]
    (hostile / "submission.jsonl").write_text('{"id": 1, "judgments": [{"name": 7}]}', "utf-8")
    with pytest.raises(UserError, match="id 1 is not in the hand-in format"):
        page_data(open_answers(hostile))
