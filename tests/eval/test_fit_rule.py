import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_array

from panjue.eval.classifier import Classifier, FieldWeights, View
from panjue.eval.decoding import decode_answers
from panjue.eval.fit_rule import fit_rules
from panjue.eval.rule import Fitted, Rule, is_fitted_on
from panjue.eval.score import remarks, score
from panjue.prompts.labels import collect
from panjue.prompts.model import CLASSIFIER
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump, read_json, sha256, write_json
from panjue.prompts.plumbing.run import AnswersRecord
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.prompts.tasks.judgment.repair import PENALTIES
from tests.eval.records import TRAINED, Row, Write, write_answers

JUDGED: Any = load_task("judgment").answer
GOLD = ("甲", ["盗窃罪"], ["264"], 13), ("乙", ["盗窃罪"], ["264"], 13)


def reply(article: str) -> str:
    judgments = [
        {"name": name, "charges": ["盗窃罪"], "articles": [article], "penalty": PENALTIES[13]}
        for name in ("甲", "乙")
    ]
    return dump({"judgments": judgments})


@pytest.fixture
def run(case: Row, write: Write, tmp_path: Path) -> Path:
    """Return a run whose samples prefer an article that belongs to no charge."""
    test = write("cases.jsonl", [case(i, *GOLD) for i in range(3)])
    texts = [reply("266"), reply("266"), reply("264")]
    rest = {"prompt_tokens": 1, "cached_tokens": 0, "completion_tokens": 1}
    rest |= {"dropped_sentences": 0}
    rows = [
        {"id": i, "texts": texts, "finish": ["stop"] * 3, "near_ties": [], **rest} for i in range(3)
    ]
    write("run/completions.jsonl", rows)
    labels = [(["盗窃罪"], ["264"], 13), (["诈骗罪"], ["266"], 8)]
    collect({"charges": c, "articles": a, "penalty": [PENALTIES[p]]} for c, a, p in labels).save(
        tmp_path / "run"
    )
    write_answers(tmp_path / "run", test, trained=str(tmp_path / "adapter"), samples=2)
    write_json(tmp_path / "adapter/manifest.json", {**TRAINED, "dev_sha256": sha256(test)})
    return tmp_path / "run"


def rules_in(run: Path) -> dict[str, Any]:
    rules: dict[str, Any] = read_json(run.parent / "adapter/decision.json")["rules"]
    return rules


def add_classifier(run: Path, articles: dict[str, float], penalty: int = 13) -> None:
    """Write a classifier that believes the same of every text; articles with their logits."""
    logits = {
        "charges": {"盗窃罪": 0.0},
        "articles": articles,
        "penalty": {PENALTIES[penalty]: 0.0},
    }
    view = View(np.zeros(1, np.uint32), np.ones(1, np.float32))
    fields = {
        name: FieldWeights(
            labels=tuple(of),
            weights=csr_array((2, len(of)), dtype=np.float32),
            bias=np.array(list(of.values()), np.float32),
            scale=1,
            shift=0,
            is_set=name != "penalty",
        )
        for name, of in logits.items()
    }
    path = run.parent / "adapter" / CLASSIFIER
    Classifier(JUDGED, (view, view), fields).save(path)
    change(path.parent, classifier_sha256=sha256(path))


def change(folder: Path, **more: Any) -> None:
    """Change the manifest of a folder."""
    write_json(folder / "manifest.json", {**read_json(folder / "manifest.json"), **more})


def test_the_classifier_counts_in_the_fields_in_which_it_gains(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_classifier(run, {"264": 4.0, "266": -4.0}, penalty=8)
    fit_rules(run)
    # Charges and penalty are right already; the articles become so: 0.3 + 0.3 * 0 + 0.4, then 1.
    assert capsys.readouterr().out.splitlines()[-1] == (
        "3 replies a case, cross-validation: classifier 0.6000, both 1.0000, replies 0.7000; "
        "kept: the model's replies, with the text classifier for articles"
    )
    rule = {"exponents": {"articles": [1.0, 1.0]}, "classifier_alone": False}
    assert rules_in(run)["2"] == rule
    assert decode_answers(run).rule == Rule({"articles": (1.0, 1.0)})
    assert read_json(run / "decode.json")["rule"] == rule
    assert '"264"' in (run / "submission.jsonl").read_text("utf-8")
    scores = score(Reader(load_task("judgment")), tmp_path / "cases.jsonl", run)
    assert scores.total.mean["final"] == 1
    assert (scores.baselines["text classifier"] or {})["final"] == pytest.approx(0.6)
    decode_answers(run, greedy=True)
    assert '"266"' in (run / "submission.jsonl").read_text("utf-8")


def with_one_reply(run: Path, write: Write) -> None:
    """Leave the first replies, which are wrong, and let the first case be one that is too long."""
    rows = [
        {**json.loads(line), "texts": [reply("266")], "finish": ["stop"]}
        for line in (run / "completions.jsonl").read_text("utf-8").splitlines()
    ]
    write("run/completions.jsonl", [{"id": 0, "refused": "too long"}, *rows[1:]])
    change(run, samples=0)


def articles_of(run: Path) -> list[list[str]]:
    rows = map(json.loads, (run / "submission.jsonl").read_text("utf-8").splitlines())
    return [judgment["articles"] for row in rows for judgment in row["judgments"]]


def test_where_the_classifier_is_as_good_its_answer_is_the_answer(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_classifier(run, {"264": 4.0, "266": -4.0})
    fit_rules(run)
    assert capsys.readouterr().out.count("kept: the text classifier's answers") == 2
    assert [rule["classifier_alone"] for rule in rules_in(run).values()] == [True, True]
    tally = decode_answers(run)
    assert "3 answers decided from 9 replies, by the text classifier's answers" in tally.lines()
    assert articles_of(run) == [["264"]] * 6
    confident = json.loads((run / "confidence.jsonl").read_text("utf-8").splitlines()[0])
    assert confident["confidence"][0]["articles"] == pytest.approx(0.96, abs=0.03)
    scores = score(Reader(load_task("judgment")), tmp_path / "cases.jsonl", run)
    assert any(line.startswith("the text classifier answered") for line in remarks(scores))
    decode_answers(run, greedy=True)
    scores = score(Reader(load_task("judgment")), tmp_path / "cases.jsonl", run)
    assert not any(line.startswith("the text classifier answered") for line in remarks(scores))


@pytest.mark.parametrize(
    "other", [{"samples": 1}, {"sampling": {"temperature": 0.7}}, {"constrained": False}]
)
def test_a_rule_for_other_replies_is_refused(other: dict[str, Any], run: Path) -> None:
    fit_rules(run)
    change(run, **other)
    with pytest.raises(UserError, match=r"answers with samples=0 or 2 .* again fits"):
        decode_answers(run)
    decode_answers(run, greedy=True)
    assert articles_of(run) == [["266"]] * 6


@pytest.mark.parametrize(("size", "is_other"), [(8, False), (30, True)])
def test_cases_of_other_lengths_are_told(
    size: int, is_other: bool, run: Path, case: Row, write: Write
) -> None:
    rows = [{**case(i, *GOLD), "fact": "事" * 5} for i in range(3)]
    test = write("cases.jsonl", rows)
    change(run, test_sha256=sha256(test))
    fit_rules(run)
    write("cases.jsonl", [{**row, "fact": "事" * size} for row in rows])
    change(run, test_sha256=sha256(test))
    told = f"fitted on cases of 5 characters (median), these have {size}"
    assert any(told in line for line in decode_answers(run).lines()) == is_other


def test_a_rule_of_another_version_is_one_line(run: Path, tmp_path: Path) -> None:
    write_json(tmp_path / "adapter/decision.json", {"pair_price": 0.2})
    with pytest.raises(UserError, match="another version; delete it"):
        decode_answers(run)


def test_a_classifier_that_gains_nothing_changes_no_decision(run: Path, tmp_path: Path) -> None:
    fit_rules(run)
    decode_answers(run)
    files = (run / "submission.jsonl", run / "confidence.jsonl", tmp_path / "adapter/decision.json")
    before = [path.read_bytes() for path in files]
    add_classifier(run, {"264": -4.0, "266": 4.0}, penalty=8)
    fit_rules(run)
    decode_answers(run)
    assert [path.read_bytes() for path in files] == before


def test_one_reply_is_enough_beside_a_classifier_and_none_too(run: Path, write: Write) -> None:
    with_one_reply(run, write)
    add_classifier(run, {"264": 4.0, "266": -4.0}, penalty=8)
    fit_rules(run)
    assert list(rules_in(run)["0"]["exponents"]) == ["articles"]
    tally = decode_answers(run)
    assert tally.decided == 3
    assert "0 unreadable (their answer: text classifier)" in next(tally.lines())
    assert articles_of(run) == [["264"]] * 6
    assert len((run / "confidence.jsonl").read_text("utf-8").splitlines()) == 3


@pytest.mark.parametrize("greedy", [False, True])
def test_the_classifier_answers_what_could_not_be_asked(
    greedy: bool, run: Path, write: Write
) -> None:
    with_one_reply(run, write)
    # Training's commonest articles are 264 and 266, in this order: the fallback would be 264.
    add_classifier(run, {"264": -4.0, "266": 4.0}, penalty=8)
    decode_answers(run, greedy=greedy)
    rows = [json.loads(row) for row in (run / "submission.jsonl").read_text("utf-8").splitlines()]
    judgments = [[(j["articles"], j["penalty"]) for j in row["judgments"]] for row in rows]
    assert judgments == [[(["266"], 8)] * 2, *[[(["266"], 13)] * 2] * 2]
    assert not (run / "confidence.jsonl").exists()
    fit_rules(run)
    assert rules_in(run)["0"] == {"exponents": {}, "classifier_alone": False}


def test_cases_that_could_not_be_asked_fit_nothing(run: Path, write: Write) -> None:
    write("run/completions.jsonl", [{"id": i, "refused": "too long"} for i in range(3)])
    add_classifier(run, {"264": 4.0, "266": -4.0})
    fit_rules(run)
    assert not any(rule["exponents"] for rule in rules_in(run).values())


def test_a_baseline_that_is_broken_or_was_fitted_on_gold_has_no_score(
    run: Path, tmp_path: Path
) -> None:
    gold = tmp_path / "cases.jsonl"
    reader, adapter = Reader(load_task("judgment")), tmp_path / "adapter"
    add_classifier(run, {"264": 4.0, "266": -4.0})
    decode_answers(run)
    assert score(reader, gold, run).baselines["text classifier"]
    change(adapter, train_sha256=sha256(gold))
    assert "text classifier" not in score(reader, gold, run).baselines
    change(adapter, train_sha256="")
    (adapter / CLASSIFIER).unlink()
    scores = score(reader, gold, run)
    assert scores.baselines["text classifier"] is None
    assert any(
        line == f"text classifier: unknown, {adapter}/classifier.npz: is missing; restore it, or "
        "train again"
        for line in remarks(scores)
    )


def test_a_rule_without_its_classifier_is_one_line(run: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    add_classifier(run, {"264": 4.0, "266": -4.0})
    fit_rules(run)
    write_json(adapter / "manifest.json", TRAINED)
    told = f"{adapter}/decision.json: needs a classifier, which training did not fit"
    with pytest.raises(UserError, match=re.escape(told)):
        decode_answers(run)


def test_cases_without_gold_are_nothing_to_fit_on(run: Path, case: Row, write: Write) -> None:
    test = write("cases.jsonl", [case(i, *GOLD, gold=False) for i in range(3)])
    change(run, test_sha256=sha256(test))
    with pytest.raises(UserError, match="id 0 has no gold answer to fit on"):
        fit_rules(run)


def test_what_the_base_answered_is_not_decided_by_the_adapters_rule(
    run: Path, tmp_path: Path
) -> None:
    rules = dict.fromkeys((0, 2), Rule(classifier_alone=True))
    fitted = Fitted({}, {"sampling": {}, "constrained": True}, 3, rules)
    write_json(tmp_path / "adapter/decision.json", asdict(fitted))
    for other in ({"adapter": "none"}, {"adapter": "lora", "endpoint": "http://x/v1#m"}):
        change(run, **other)
        assert decode_answers(run).rule == Rule()
        assert read_json(run / "decode.json")["decision_sha256"] is None


def test_a_fit_is_known_by_the_cases_it_was_made_on(run: Path, tmp_path: Path) -> None:
    made = AnswersRecord.read(run)
    assert not is_fitted_on(tmp_path / "adapter", made)
    fit_rules(run)
    assert is_fitted_on(tmp_path / "adapter", made)
    assert not is_fitted_on(tmp_path / "adapter", made.model_copy(update={"held_out": True}))
    assert str(tmp_path) not in (tmp_path / "adapter/decision.json").read_text("utf-8")
    assert decode_answers(run).decision_sha256 == sha256(tmp_path / "adapter/decision.json")
