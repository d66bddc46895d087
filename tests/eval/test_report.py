"""The report page: its numbers by hand."""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.utils import htmlsafe_json_dumps

from panjue.eval import report
from panjue.eval.agreement import AGREEMENTS, NO_REPLY, agreement
from panjue.eval.report import page, page_data
from panjue.eval.shown import items_of
from panjue.finetune.classifier.classifier import Classifier
from panjue.prompts.example import Example
from panjue.prompts.fingerprint import model_sha256
from panjue.prompts.labels import Labels
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump, read_json, read_lines, sha256, write_json
from panjue.prompts.plumbing.records import TrainingSummary
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task, task_folders
from panjue.prompts.tasks.metrics import Item, field_of
from panjue.serve.answers import DEMO_ANSWERED, Answered, check_complete, open_answers
from tests.records import TRAINED, Row, Write, believing, write_answers

TASK = load_task("judgment")
DIALOGUES = Path(__file__).parents[2] / "prompts/tasks/dialogue/sample.folder"
THEFT = (["盗窃罪"], ["264"], 11)
HOSTILE = ["<script>alert(1)</script>", '王某"A', "李某乙"]

YEAR = "有期徒刑九个月以上一年以下"
BELIEVED = {
    "charges": {"盗窃罪": 2.0, "诈骗罪": -1.0, "抢夺罪": -2.0, "放火罪": -3.0},
    "articles": {"264": 2.0},
    "penalty": {YEAR: 1.0, "拘役": 0.0},
    "labels": {"Article 3": 1.0},
}
"""Logits of the classifier of `advised`, whatever the text."""

LOG = (
    {"step": 5, "seconds": 1.0, "loss": 2.0},
    {"step": 10, "seconds": 2.0, "loss": 1.0},
    {"step": 10, "seconds": 2.0, "eval_loss": 0.5},
    {"step": 20, "seconds": 4.0, "loss": 0.25},
    {"step": 20, "seconds": 4.0, "eval_loss": 0.75},
)


def run_on(folder: Path, gold: Path, change: Any) -> Path:
    """Make a run that answers as gold, but for what `change` does to its rows."""
    rows = []
    replies = []
    confidences = []
    for number, example in enumerate(Reader(TASK).read(gold)):
        row = json.loads(dump(TASK.gold(example)))
        change(number, row)
        rows.append(row)
        reply = {"texts": [f"raw reply of {example.id}"], "finish": ["stop"]}
        replies.append({"id": example.id, **reply, "dropped_sentences": 2})
        each = {"charges": 0.9, "articles": 0.6, "penalty": 0.3}
        confidences.append({"id": example.id, "confidence": [each] * len(row["judgments"])})
    Labels().save(folder)
    write_answers(folder, gold)
    write_lines(folder / "submission.jsonl", rows)
    write_lines(folder / "completions.jsonl", replies)
    write_lines(folder / "confidence.jsonl", confidences)
    decoding = {"calls": len(rows), "unreadable": 0, "repaired": 7, "repairs": {"<q>": 7}}
    digest = sha256(folder / "submission.jsonl")
    write_json(folder / "decode.json", {**decoding, "submission_sha256": digest})
    return folder


def write_lines(path: Path, rows: Iterable[Any]) -> None:
    path.write_text("".join(dump(row) + "\n" for row in rows), "utf-8")


def change_json(path: Path, **changes: Any) -> None:
    write_json(path, {**read_json(path), **changes})


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return what gives all runs a classifier: gold, but for what `change` does to an answer."""

    def by(change: Any, classifier: Classifier | None = None) -> None:
        def alone(example: Example, _opinions: Any) -> Any:
            fallback = TASK.ask.decode("", example, Labels()).answer
            answer = json.loads(dump(example.answer or fallback))
            change(example, answer)
            return answer

        def advisor(answered: Answered) -> Any:
            logits = {name: BELIEVED[name] for name in answered.task.answer.fields}
            thinking = classifier or believing(answered.task, logits)
            return SimpleNamespace(opinions=lambda *_: [], alone=alone, classifier=thinking)

        monkeypatch.setattr(Answered, "advisor", property(advisor))

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


@pytest.fixture
def of_training(hostile: Path, tmp_path: Path) -> Path:
    """Return the hostile run with the training that answered, and its held-out answers."""
    run = tmp_path / "trained"
    settings = {"trainer": {"learning_rate": 0.1, "deepspeed": "/somebody/secret.json"}}
    write_json(run / "adapter/manifest.json", {**TRAINED, **settings, "examples": 9})
    write_lines(run / "log.jsonl", LOG)
    summary = TrainingSummary(
        config="mine",
        changed={"trainer.learning_rate": 0.1},
        finished="2026-11-28",
        steps=20,
        kept_step=10,
        held_out=3,
        held_out_loss=0.5,
        tokens=123456,
        seconds=7800,
        memory=3 * 2**30,
        device="NVIDIA H100",
    )
    write_json(run / "training.json", summary.model_dump())
    change_json(hostile / "manifest.json", trained=str(run / "adapter"))
    held_out = run / "answers/held-out"
    record = {**read_json(hostile / "manifest.json"), "held_out": True}
    record["trained_sha256"] = model_sha256(run / "adapter")
    write_json(held_out / "manifest.json", record)
    of_field = {"metric": "charge_f1", "model": 0.5, "classifier": 0.75, "low": -0.5, "high": 0.125}
    fields = {"charges": {**of_field, "answered_by": "classifier"}}
    choice = {"cases": 40, "counted": 40, "fields": fields, "calibration": {}}
    write_json(held_out / "choice.json", choice)
    return hostile


def test_the_training_and_the_choice_are_shown(of_training: Path) -> None:
    text = page(page_data(open_answers(of_training)))
    for shown in ("123,456", "2 h 10 min", "3.0 GiB (NVIDIA H100)", "held-out loss of"):
        assert shown in text
    assert "Model and text classifier answered 40 held-out cases" in text
    assert text.count("<circle") == 2, "each evaluation"
    assert "/somebody" not in text
    assert re.search(r"trainer.learning_rate</th><td>0.1</td>", text)
    change_json(of_training / "manifest.json", endpoint="http://127.0.0.1:9/v1#other")
    assert "<svg" not in page(page_data(open_answers(of_training)))


def test_a_training_of_version_0_4_is_shown_without_what_it_did_not_record(
    of_training: Path, tmp_path: Path
) -> None:
    (tmp_path / "trained/training.json").unlink()
    text = page(page_data(open_answers(of_training)))
    assert "<svg" in text
    assert "2 h 10 min" not in text
    (tmp_path / "trained/log.jsonl").unlink()
    assert "<svg" not in page(page_data(open_answers(of_training)))


@pytest.mark.parametrize("has_gold", [True, False])
def test_a_page_that_is_full_says_so_and_counts_all_cases(
    has_gold: bool, hostile: Path, case: Row, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_gold:
        cases = [case(1, *((name, *THEFT) for name in HOSTILE), gold=False)]
        write_answers(hostile, write("blind.jsonl", [*cases, case(2, ("甲", *THEFT), gold=False)]))
    whole = page_data(open_answers(hostile))
    assert "Here are the first" not in page(whole)
    first = report.case_for_page(TASK, whole.cases[0])
    size = len(htmlsafe_json_dumps(first, **report.JSON).encode())
    monkeypatch.setattr(report, "MAX_CASE_BYTES", size)
    found = page_data(open_answers(hostile))
    assert (found.cases, found.n_cases) == (whole.cases[:1], 2)
    assert repr(found.scores) == repr(whole.scores)
    assert found.classes == whole.classes
    assert "This page lists the first 1 of 2 cases." in page(found)
    monkeypatch.setattr(report, "MAX_CASE_BYTES", 0)
    assert page_data(open_answers(hostile)).cases == []


def test_the_numbers_by_hand(hostile: Path) -> None:
    found = page_data(open_answers(hostile))
    # 盗窃罪: four in gold, three predicted, all three right. 2 * 3 / (4 + 3).
    assert found.classes["charges"] == {"盗窃罪": (4, 3, 6 / 7), "抢劫罪": (0, 1, 0)}
    year, ten = "有期徒刑九个月以上一年以下", "有期徒刑十年以上"  # twelve months; class 5
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
    year = "有期徒刑九个月以上一年以下"
    assert [own.predicted for own, _ in first] == [["抢劫罪"], ["第二百六十四条"], [year]]
    compared = ["differ, both wrong", "agree, right", "differ, classifier right"]
    assert [how for _, how in second] == compared
    assert {how for _, how in (*third, *other)} == {"agree, right"}


def test_a_person_without_a_name_costs_the_others_no_reasons(
    hostile: Path, advised: Callable[[Any], None]
) -> None:
    advised(think)
    rows = [row for _, row in read_lines(hostile / "submission.jsonl")]
    del rows[0]["judgments"][1]["name"]
    write_lines(hostile / "submission.jsonl", rows)
    found = page_data(open_answers(hostile))
    reasons = []
    for of_person in found.cases[0].whys:
        fields = [field.reasons for field in of_person if field.reasons]
        reasons.append([[why.label for why in field.answered] for field in fields])
    assert reasons[0] == reasons[2] == [["盗窃罪"], ["264"], [YEAR]]
    assert reasons[1] == [[], [], []]
    assert "</html>" in page(found)


def test_without_gold_a_row_of_nobody_is_named(
    hostile: Path, advised: Callable[[Any], None]
) -> None:
    advised(think)
    gold = hostile.parent / "gold.jsonl"
    rows = [row for _, row in read_lines(gold)]
    write_lines(gold, [{key: row[key] for key in row if key != "outcomes"} for row in rows])
    write_answers(hostile, gold)
    row = {"id": 1, "judgments": []}
    write_lines(hostile / "submission.jsonl", [row])
    with pytest.raises(UserError, match="id 1 is not in the hand-in format; see `panjue check`"):
        page_data(open_answers(hostile))


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
    write_lines(hostile / "completions.jsonl", rows)
    found = page_data(open_answers(hostile))
    assert found.agreements["charges"] == {"differ, model right": 1, "differ, both wrong": 1}
    assert found.agreements["penalty"] == {"differ, classifier right": 1}
    lacking = [[how == NO_REPLY for _, how in item] for item in found.cases[0].opinions]
    assert lacking == [[False, False, True], [False] * 3, [True] * 3]
    assert {how for _, how in found.cases[1].opinions[0]} == {NO_REPLY}, "it is unreadable"


def test_what_the_classifier_answered_is_compared_with_the_reply(
    hostile: Path, advised: Callable[[Any], None]
) -> None:
    """The model's own answer to such a field is in its reply alone."""
    advised(think)
    by_field = {"charges": "model", "articles": "model", "penalty": "classifier"}
    judgments = [
        {
            "name": name,
            "charges": ["盗窃罪"],
            "articles": ["264"],
            "penalty": "有期徒刑一年以上二年以下",
        }
        for name in HOSTILE
    ]
    del judgments[1]["penalty"]
    rows = [row for _, row in read_lines(hostile / "completions.jsonl")]
    rows[0]["texts"] = [dump({"judgments": judgments})]
    write_lines(hostile / "completions.jsonl", rows)
    change_json(hostile / "decode.json", by_field=by_field)
    found = page_data(open_answers(hostile))
    [first, second, third] = [of_item[2] for of_item in found.cases[0].opinions]
    two_years = "有期徒刑一年以上二年以下"
    assert (first[0].predicted, first[1]) == ([two_years], "differ, classifier right")
    assert (second[0].predicted, second[1]) == ((), NO_REPLY)
    assert third[1] == "differ, classifier right"
    charges, _ = found.cases[0].opinions[0][0]
    assert charges.predicted == ["抢劫罪"], "the classifier's, as the model answered"
    data = json.loads(page(found).split('id="data">')[1].split("</script>")[0])
    assert data["answeredBy"] == list(by_field.values())


def test_who_answered_each_field_how_surely_and_what_the_classifier_thinks(
    hostile: Path, advised: Callable[[Any], None]
) -> None:
    advised(think)
    by_field = {"charges": "model", "articles": "model", "penalty": "classifier"}
    reply = {"judgments": [{"name": HOSTILE[0], "charges": ["盗窃罪"], "penalty": YEAR}]}
    rows = [row for _, row in read_lines(hostile / "completions.jsonl")]
    rows[0]["texts"] = [dump(reply)]
    write_lines(hostile / "completions.jsonl", rows)
    changes = {"by_field": by_field, "fallback": "text classifier"}
    change_json(hostile / "decode.json", **changes)
    TASK.ask.labels(Reader(TASK).read(hostile.parent / "gold.jsonl")).save(hostile)

    def by() -> list[list[str]]:
        found = page_data(open_answers(hostile))
        return [[why.by for why in of_item] for of_item in found.cases[0].whys]

    assert by() == [["model", "classifier", "classifier"], *[["classifier"] * 3] * 2]
    found = page_data(open_answers(hostile))
    [first, second, _] = found.cases[0].whys
    assert [why.confidence for why in first] == [0.9, 0.6, 0.3]
    [charges, articles, penalty] = [why.reasons for why in first if why.reasons]
    chances = {"盗窃罪": 0.8808, "诈骗罪": 0.2689, "抢夺罪": 0.1192}
    assert [label for label, _ in charges.likeliest] == [*chances]
    assert dict(charges.likeliest) == pytest.approx(chances, abs=1e-4)
    assert [[why.label for why in of.answered] for of in (charges, articles, penalty)] == [
        ["盗窃罪"],
        ["264"],
        [YEAR],
    ]
    assert second[0].reasons, "its charge is one that the classifier does not know"
    assert second[0].reasons.answered == []
    data = json.loads(page(found).split('id="data">')[1].split("</script>")[0])
    assert data["cases"][0]["whys"][0][1] == [
        *("classifier", 0.6, [["第二百六十四条", 0.881]]),
        [["第二百六十四条", 0.881, 2.0, None, 1.0, [], [], []]],
    ]
    change_json(hostile / "decode.json", fallback="commonest labels")
    assert by()[0] == ["model", "commonest labels", "classifier"]
    change_json(hostile / "decode.json", submission_sha256="0")
    assert by() == [[""] * 3] * 3, "edited since"
    change_json(hostile / "manifest.json", voted={"../a": "", "../b": ""})
    (hostile / "decode.json").unlink()
    assert by() == [["vote"] * 3] * 3


SETS = st.sets(st.sampled_from("甲乙丙"))


@given(SETS, SETS, SETS)
def test_two_answers_have_one_agreement(gold: set[str], model: set[str], other: set[str]) -> None:
    how = agreement(field_of("charges", gold, model), field_of("charges", gold, other))
    assert how in AGREEMENTS
    assert how.startswith("agree") == (model == other)
    assert (how in ("agree, right", "differ, model right")) == (model == gold)
    assert (how in ("agree, right", "differ, classifier right")) == (other == gold)


def test_a_task_of_classes_is_compared_too(advised: Callable[[Any], None], tmp_path: Path) -> None:
    write_lines(tmp_path / "gold.jsonl", [{"id": 1, "text": "事实。", "labels": [1, 2]}])
    write_answers(tmp_path, tmp_path / "gold.jsonl", task="ecthr")
    Labels().save(tmp_path)
    write_lines(tmp_path / "submission.jsonl", [{"id": 1, "labels": []}])
    (tmp_path / "completions.jsonl").touch()
    advised(lambda _example, _answer: None)
    found = page_data(open_answers(tmp_path))
    assert found.agreements == {"class": {"differ, classifier right": 1}}
    [[[(own, _)]]] = [case.opinions for case in found.cases]
    assert own.predicted == own.gold


def classes_run(folder: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Return a folder of answers to cases of `severity`, all of the first class."""
    folder.mkdir()
    write_lines(folder / "gold.jsonl", rows)
    write_answers(folder, folder / "gold.jsonl", task="severity")
    Labels().save(folder)
    write_lines(folder / "submission.jsonl", [{"id": row["id"], "label": 0} for row in rows])
    (folder / "completions.jsonl").touch()
    return folder


CLASSES: list[dict[str, Any]] = [
    {"id": 1, "fact": "甲盗窃。", "label": 0},
    {"id": 2, "fact": "乙抢劫。", "label": 3},
]


def test_gold_is_a_judgment_only_where_judgments_are_asked_for(
    hostile: Path, tmp_path: Path
) -> None:
    assert "原判" in page(page_data(open_answers(hostile)))
    run = classes_run(tmp_path / "classes", CLASSES)
    text = page(page_data(open_answers(run)))
    assert '<span lang="zh">标准答案</span>' in text
    assert not re.search("原判|判决|漏判", text)
    run = classes_run(tmp_path / "without", [CLASSES[0], {"id": 2, "fact": "乙抢劫。"}])
    text = page(page_data(open_answers(run)))
    assert "个案件，文件中没有标准答案，因此没有分数。" in text


def test_what_the_classifier_answered_is_shown_once(
    hostile: Path, advised: Callable[[Any], None]
) -> None:
    advised(think)
    said = "The text classifier answered, not the model."
    assert said not in page(page_data(open_answers(hostile)))
    change_json(hostile / "manifest.json", asked=False)
    change_json(hostile / "decode.json", calls=0)
    (hostile / "completions.jsonl").unlink()
    found = page_data(open_answers(hostile))
    assert [(case.opinions, case.reply) for case in found.cases] == [([], [])] * 2
    assert said in page(found)


def test_what_is_said_of_another_submission_is_not_shown(hostile: Path) -> None:
    assert page_data(open_answers(hostile)).decoding["repaired"] == 7
    change_json(hostile / "decode.json", submission_sha256="0")
    found = page_data(open_answers(hostile))
    assert not found.decoding
    assert [case.confidence for case in found.cases] == [None, None]


def test_gold_of_other_examples_is_refused(hostile: Path, case: Row, write: Write) -> None:
    other = write("other.jsonl", [case(7, ("甲", *THEFT))])
    with pytest.raises(UserError, match="1 examples have no row there, 2 rows no example"):
        check_complete(open_answers(hostile, other))


def test_a_run_of_the_held_out_tenth_is_reported_on_that_alone(
    real_data: Path, tmp_path: Path
) -> None:
    run = run_on(tmp_path / "run", real_data / "drdz/dev.jsonl", lambda _number, _row: None)
    change_json(run / "manifest.json", held_out=True)
    found = page_data(open_answers(run))
    assert 0 < len(found.cases) < 60
    assert found.scores
    assert (found.scores.total.examples, found.scores.missing) == (len(found.cases), 0)


@pytest.mark.parametrize(("told", "correct"), [("30000元", True), ("两万元", False), (None, False)])
def test_one_of_several_references_is_enough(told: str | None, correct: bool) -> None:
    row = {"id": 1, "answer": told} if told else None
    [(_, [answer])] = items_of(load_task("reading"), {"references": [["三万元", "30000元"]]}, row)
    assert (answer.gold, answer.correct) == (["三万元", "30000元"], correct)


def test_of_doubled_labels_one_counts_and_of_doubled_names_the_first() -> None:
    theft = {"name": "甲", "charges": ["盗窃罪"], "articles": [], "penalty": 1}
    right = {**theft, "charges": ["盗窃罪", "盗窃罪"]}
    wrong = {**theft, "charges": ["抢劫罪"]}
    gold = {"id": 1, "judgments": [theft]}
    [(_, fields)] = items_of(TASK, gold, {"id": 1, "judgments": [right, wrong]})
    assert all(one.correct for one in fields)


def test_sentences_of_a_dialogue_stand_one_by_one() -> None:
    task = load_task("dialogue")
    gold = task.gold(next(iter(Reader(task).read(DIALOGUES))))
    first, second = "甲：你怎么又喝酒了，", "乙：高兴嘛，儿子考上大学了。"
    items = list(items_of(task, gold, gold))
    assert [name for name, _ in items][:2] == [first, second]
    assert [name for name, _ in items][-2:] == ["甲", "乙"]  # their emotions
    assert all(one.correct for _, fields in items for one in fields)

    told = json.loads(dump(gold))
    sentence = told["chat"][0]["final_model_response"][0]
    sentence["opinion"] += "了"  # means the same
    other = {**sentence, "sentiment": "doubt"}
    told["chat"][0]["final_model_response"].insert(0, other)  # the best one counts
    assert wrong_fields(items_of(task, gold, told)) == {}
    told["chat"][0]["final_model_response"] = [other]
    told["chat"][1]["final_model_response"] = []
    told["emo"]["甲"]["events"] = []
    assert wrong_fields(items_of(task, gold, told)) == {
        first: ["sentiment"],
        second: ["sentiment", "aspect", "opinion", "rationale"],
        "甲": ["emotions"],
    }
    unanswered = [fields for _, fields in items_of(task, gold, None)]
    assert not any(one.predicted for fields in unanswered for one in fields)


def wrong_fields(items: Iterable[Item]) -> dict[str, list[str]]:
    wrong = {name: [one.name for one in fields if not one.correct] for name, fields in items}
    return {name: fields for name, fields in wrong.items() if fields}


def test_the_page_needs_nothing_else(hostile: Path) -> None:
    text = page(page_data(open_answers(hostile)))
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//", text)
    assert text.count("<script") == 2
    assert "&lt;q&gt;" in text
    assert "<q>" not in text
    assert page(page_data(open_answers(hostile))) == text, "the same report is the same page"


@pytest.mark.parametrize("name", task_folders())
def test_every_metric_and_baseline_has_a_name_in_both_languages(name: str) -> None:
    rules = load_task(name).score
    assert {*rules.names, rules.fallback} <= rules.titles.keys()


def test_the_demo_s_model_is_named(
    hostile: Path, tmp_path: Path, panjue: Callable[..., CompletedProcess[str]]
) -> None:
    record = read_json(hostile / "manifest.json")

    def names_demo() -> bool:
        text = page(page_data(open_answers(hostile)))
        assert "invented cases" not in text, "which only the records of the data could say"
        scored = panjue("score", record["test"], hostile)
        reported = panjue("report", hostile)
        assert (scored.returncode, reported.returncode) == (0, 0)
        names_it = {DEMO_ANSWERED in said.stdout for said in (scored, reported)}
        assert names_it == {"Its answers to real cases mean nothing" in text}
        assert names_it == {"它对真实案件的答案和得分没有任何意义" in text}
        return names_it == {True}

    change_json(hostile / "manifest.json", trained=str(tmp_path / "run/adapter"))
    trained = {**TRAINED, "base": str(tmp_path / "base/model")}
    write_json(tmp_path / "run/adapter/manifest.json", trained)
    write_json(tmp_path / "base/model/manifest.json", {"base": str(tmp_path / "base/untrained")})
    assert not names_demo()
    write_json(tmp_path / "base/untrained/start.json", {})
    assert names_demo()
    change_json(hostile / "manifest.json", endpoint="http://127.0.0.1:9/v1#other")
    assert not names_demo()


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
