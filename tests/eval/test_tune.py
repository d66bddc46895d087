import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy.sparse import csr_array

from panjue.eval.answers import open_answers
from panjue.eval.classifier import Classifier, FieldWeights, View
from panjue.eval.decide import decider_of
from panjue.eval.decoding import decode_answers
from panjue.eval.rule import Fitted, Rule, is_fitted_on
from panjue.eval.score import remarks, score
from panjue.eval.tune import Fitting, held_out_cases, main, ratios
from panjue.prompts.example import Example
from panjue.prompts.labels import collect
from panjue.prompts.model import CLASSIFIER, model_sha256
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump, read_json, sha256, write_json
from panjue.prompts.plumbing.run import AnswersRecord
from panjue.prompts.reader import Reader, is_held_out
from panjue.prompts.task import load_task
from panjue.prompts.tasks.judgment.repair import PENALTIES

Row = Callable[..., dict[str, Any]]
Write = Callable[..., Path]
JUDGED: Any = load_task("judgment").answer
ANSWERED: dict[str, Any] = {
    **{"task": "judgment", "prompt_sha256": "", "adapter": "lora", "constrained": True},
    **{"max_tokens": 3072, "seed": 0, "engine": {}, "sampling": {}, "samples": 0},
}
"""What every record of answers has."""
TRAINED: dict[str, Any] = {
    **{"task": "judgment", "base": "base", "base_sha256": "", "train": "train.jsonl"},
    **{"train_sha256": "", "prompt_sha256": "", "max_tokens": 3072, "method": "lora"},
    **{"dtype": "float32", "seed": 0, "score_examples": 0, "patience": 3},
    **{"trainer": {}, "lora": {}, "quantization": {}},
}
"""What every record of a training has."""
GOLD = ("甲", ["盗窃罪"], ["264"], 13), ("乙", ["盗窃罪"], ["264"], 13)


def reply(article: str) -> str:
    judgments = [
        {"name": name, "charges": ["盗窃罪"], "articles": [article], "penalty": PENALTIES[13]}
        for name in ("甲", "乙")
    ]
    return dump({"judgments": judgments})


def make_run(case: Row, write: Write, folder: Path, *, gold: bool) -> Path:
    """Make a run whose samples prefer an article that belongs to no charge."""
    test = write("cases.jsonl", [case(i, *GOLD, gold=gold) for i in range(3)])
    texts = [reply("266"), reply("266"), reply("264")]
    rest = {"prompt_tokens": 1, "cached_tokens": 0, "completion_tokens": 1}
    rest |= {"dropped_sentences": 0}
    rows = [
        {"id": i, "texts": texts, "finish": ["stop"] * 3, "near_ties": [], **rest} for i in range(3)
    ]
    write("run/completions.jsonl", rows)
    labels = [(["盗窃罪"], ["264"], 13), (["诈骗罪"], ["266"], 8)]
    collect({"charges": c, "articles": a, "penalty": [PENALTIES[p]]} for c, a, p in labels).save(
        folder / "run"
    )
    made = {"test": str(test), "test_sha256": sha256(test), "trained": str(folder / "adapter")}
    write_json(folder / "run/manifest.json", {**ANSWERED, **made, "samples": 2})
    write_json(folder / "adapter/manifest.json", {**TRAINED, "dev_sha256": sha256(test)})
    return folder / "run"


def rules_in(folder: Path) -> dict[str, Any]:
    rules: dict[str, Any] = read_json(folder / "adapter/decision.json")["rules"]
    return rules


def test_the_smallest_of_the_best_strengths_is_kept_where_decoding_finds_it(
    case: Row, write: Write, tmp_path: Path
) -> None:
    run = make_run(case, write, tmp_path, gold=True)
    main(run)
    # 266 has expected F1 2/3 and 264 has 1/3. With 266 the charge and the article are lonely and
    # pay twice the strength: the first strength over 1/6 mends it.
    assert rules_in(tmp_path)["2"]["pair_price"] == 0.2
    assert decode_answers(run).pair_price == 0.2
    first = json.loads((run / "submission.jsonl").read_text("utf-8").splitlines()[0])
    assert first["judgments"][0]["articles"] == ["264"]


def add_classifier(adapter: Path, articles: dict[str, float], penalty: int = 13) -> None:
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
    Classifier(JUDGED, (view, view), fields).save(adapter / CLASSIFIER)
    manifest = read_json(adapter / "manifest.json")
    write_json(
        adapter / "manifest.json", {**manifest, "classifier_sha256": sha256(adapter / CLASSIFIER)}
    )


def test_the_classifier_counts_in_the_fields_in_which_it_gains(
    case: Row, write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(case, write, tmp_path, gold=True)
    add_classifier(tmp_path / "adapter", {"264": 4.0, "266": -4.0}, penalty=8)
    main(run)
    printed = capsys.readouterr().out.splitlines()
    # Charges and penalty are right already; the articles become so: 0.3 + 0.3 * 0 + 0.4, then 1.
    assert printed[-5:-1] == [
        "text classifier, charges: not used; in cross-validation final 0.7000 -> 0.7000",
        "text classifier, articles: exponents 1, 1; in cross-validation final 0.7000 -> 1.0000",
        "text classifier, penalty: not used; in cross-validation final 0.7000 -> 0.3000",
        "final in cross-validation: first replies 0.7000, decided answers 1.0000, the text "
        "classifier's 0.6000; kept: decided answers",
    ]
    rule = rules_in(tmp_path)["2"]
    assert rule["exponents"] == {"articles": [1.0, 1.0]}
    assert rule["pair_price"] == 0, "the articles go with their charges already"
    assert decode_answers(run).classifier == {"articles": (1.0, 1.0)}
    assert read_json(run / "decode.json")["classifier"] == {"articles": [1.0, 1.0]}
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
    made = read_json(run / "manifest.json")
    write_json(run / "manifest.json", {**made, "samples": 0})


def articles_of(run: Path) -> list[list[str]]:
    rows = map(json.loads, (run / "submission.jsonl").read_text("utf-8").splitlines())
    return [judgment["articles"] for row in rows for judgment in row["judgments"]]


def test_where_the_classifier_is_as_good_as_what_is_decided_its_answer_is_the_answer(
    case: Row, write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(case, write, tmp_path, gold=True)
    add_classifier(tmp_path / "adapter", {"264": 4.0, "266": -4.0})
    main(run)
    assert capsys.readouterr().out.count("kept: the text classifier's") == 2
    assert [rule["classifier_alone"] for rule in rules_in(tmp_path).values()] == [True, True]
    tally = decode_answers(run)
    assert any("the text classifier's, as no other was better" in line for line in tally.lines())
    assert articles_of(run) == [["264"]] * 6
    confident = json.loads((run / "confidence.jsonl").read_text("utf-8").splitlines()[0])
    assert confident["confidence"][0]["articles"] == pytest.approx(0.96, abs=0.03)


def test_a_rule_for_one_reply_is_fitted_beside_that_for_all(
    case: Row, write: Write, tmp_path: Path
) -> None:
    run = make_run(case, write, tmp_path, gold=True)
    main(run)
    assert {samples: rule["pair_price"] for samples, rule in rules_in(tmp_path).items()} == {
        "0": 0.0, "2": 0.2,
    }  # fmt: skip
    with_one_reply(run, write)
    decode_answers(run)
    assert articles_of(run)[2:] == [["266"]] * 4, "as there is one reply, and no classifier"


CHANGES: list[tuple[dict[str, Any], str, str]] = [
    ({"samples": 1}, "samples=0 or 2, not 1", "samples=1 answers=tune"),
    (
        {"sampling": {"temperature": 0.7}},
        "sampling={}, not {'temperature': 0.7}",
        "samples=2 answers=tune sampling.temperature=0.7",
    ),
    (
        {"constrained": False},
        "constrained=True, not False",
        "samples=2 answers=tune constrained=false",
    ),
]


@pytest.mark.parametrize(("change", "difference", "words"), CHANGES)
def test_a_rule_for_other_replies_is_refused_with_the_command_that_fits_one(
    change: dict[str, Any], difference: str, words: str, case: Row, write: Write, tmp_path: Path
) -> None:
    run = make_run(case, write, tmp_path, gold=True)
    main(run)
    write_json(run / "manifest.json", {**read_json(run / "manifest.json"), **change})
    with pytest.raises(UserError) as raised:
        decode_answers(run)
    assert str(raised.value) == (
        f"{tmp_path}/adapter/decision.json: was fitted on other answers ({difference}); "
        f"`panjue generate {tmp_path} train.jsonl held_out=true {words} && panjue tune {tmp_path}` "
        f"fits a rule for these; `panjue decode {run} --greedy` takes the first replies"
    )
    decode_answers(run, greedy=True)
    assert articles_of(run) == [["266"]] * 6


@pytest.mark.parametrize(("size", "is_refused"), [(8, False), (30, True)])
def test_a_rule_for_cases_of_other_lengths_is_refused(
    size: int, is_refused: bool, case: Row, write: Write, tmp_path: Path
) -> None:
    run = make_run(case, write, tmp_path, gold=True)
    rows = [{**case(i, *GOLD), "fact": "事" * 5} for i in range(3)]
    test = write("cases.jsonl", rows)
    made = {**read_json(run / "manifest.json"), "test_sha256": sha256(test)}
    write_json(run / "manifest.json", made)
    write_json(tmp_path / "adapter/manifest.json", {**TRAINED, "dev_sha256": sha256(test)})
    main(run)
    write("cases.jsonl", [{**row, "fact": "事" * size} for row in rows])
    write_json(run / "manifest.json", {**made, "test_sha256": sha256(test)})
    if not is_refused:
        assert decode_answers(run).pair_price == 0.2
        return
    with pytest.raises(UserError, match=f"cases of 5 characters, not {size}"):
        decode_answers(run)


def test_a_rule_of_another_version_is_one_line(case: Row, write: Write, tmp_path: Path) -> None:
    run = make_run(case, write, tmp_path, gold=True)
    write_json(tmp_path / "adapter/decision.json", {"pair_price": 0.2})
    with pytest.raises(UserError, match="another version; run `panjue tune`"):
        decode_answers(run)


def test_a_classifier_that_gains_nothing_changes_no_decision(
    case: Row, write: Write, tmp_path: Path
) -> None:
    run = make_run(case, write, tmp_path, gold=True)
    main(run)
    decode_answers(run)
    files = (run / "submission.jsonl", run / "confidence.jsonl", tmp_path / "adapter/decision.json")
    before = [path.read_bytes() for path in files]
    add_classifier(tmp_path / "adapter", {"264": -4.0, "266": 4.0}, penalty=8)
    main(run)
    decode_answers(run)
    assert [path.read_bytes() for path in files] == before


def test_one_reply_is_enough_beside_a_classifier_and_none_too(
    case: Row, write: Write, tmp_path: Path
) -> None:
    run = make_run(case, write, tmp_path, gold=True)
    with_one_reply(run, write)
    with pytest.raises(UserError, match="has no samples to decide from; generate with samples=8"):
        main(run)
    add_classifier(tmp_path / "adapter", {"264": 4.0, "266": -4.0}, penalty=8)
    main(run)
    assert list(rules_in(tmp_path)["0"]["exponents"]) == ["articles"]
    tally = decode_answers(run)
    assert tally.decided == 3
    assert "0 unreadable (their answer: text classifier)" in next(tally.lines())
    assert articles_of(run) == [["264"]] * 6
    assert len((run / "confidence.jsonl").read_text("utf-8").splitlines()) == 3


@pytest.mark.parametrize("greedy", [False, True])
def test_the_classifier_answers_what_could_not_be_asked_with_any_rule_or_none(
    greedy: bool, case: Row, write: Write, tmp_path: Path
) -> None:
    run = make_run(case, write, tmp_path, gold=True)
    with_one_reply(run, write)
    # Training's commonest articles are 264 and 266, in this order: the fallback would be 264.
    add_classifier(tmp_path / "adapter", {"264": -4.0, "266": 4.0}, penalty=8)
    decode_answers(run, greedy=greedy)
    rows = [json.loads(row) for row in (run / "submission.jsonl").read_text("utf-8").splitlines()]
    judgments = [[(j["articles"], j["penalty"]) for j in row["judgments"]] for row in rows]
    assert judgments == [[(["266"], 8)] * 2, *[[(["266"], 13)] * 2] * 2]
    assert not (run / "confidence.jsonl").exists()
    main(run)
    assert rules_in(tmp_path)["0"] == read_json_rule(Rule())


def read_json_rule(rule: Rule) -> dict[str, Any]:
    """Return a rule as the file has it."""
    result: dict[str, Any] = json.loads(dump(asdict(rule)))
    return result


def test_cases_that_could_not_be_asked_fit_nothing(case: Row, write: Write, tmp_path: Path) -> None:
    run = make_run(case, write, tmp_path, gold=True)
    write("run/completions.jsonl", [{"id": i, "refused": "too long"} for i in range(3)])
    add_classifier(tmp_path / "adapter", {"264": 4.0, "266": -4.0})
    main(run)
    assert not any(rule["exponents"] for rule in rules_in(tmp_path).values())


def test_a_baseline_that_is_broken_or_was_fitted_on_the_gold_file_has_no_score(
    case: Row, write: Write, tmp_path: Path
) -> None:
    run, gold = make_run(case, write, tmp_path, gold=True), tmp_path / "cases.jsonl"
    reader, adapter = Reader(load_task("judgment")), tmp_path / "adapter"
    add_classifier(adapter, {"264": 4.0, "266": -4.0})
    decode_answers(run)
    assert score(reader, gold, run).baselines["text classifier"]
    manifest = read_json(adapter / "manifest.json")
    write_json(adapter / "manifest.json", {**manifest, "train_sha256": sha256(gold)})
    assert "text classifier" not in score(reader, gold, run).baselines
    write_json(adapter / "manifest.json", manifest)
    (adapter / CLASSIFIER).unlink()
    scores = score(reader, gold, run)
    assert scores.baselines["text classifier"] is None
    assert any(
        line == f"text classifier: unknown, {adapter}/classifier.npz: is missing; restore it, or "
        "train again"
        for line in remarks(scores)
    )


def test_a_classifier_that_is_gone_is_one_line(case: Row, write: Write, tmp_path: Path) -> None:
    run = make_run(case, write, tmp_path, gold=True)
    adapter = tmp_path / "adapter"
    add_classifier(adapter, {"264": 4.0, "266": -4.0})
    main(run)
    (adapter / CLASSIFIER).unlink()
    missing = f"{adapter}/classifier.npz: is missing; restore it, or train again"
    with pytest.raises(UserError, match=re.escape(missing)):
        decode_answers(run)
    write_json(adapter / "manifest.json", TRAINED)
    told = f"{adapter}/decision.json: needs a classifier, which training did not fit"
    with pytest.raises(UserError, match=re.escape(told)):
        decode_answers(run)


def test_class_ratios_worked_by_hand() -> None:
    # With one more of each: a is 4 of 5 and believed 2 of 5, b is 1 of 5 and believed 3 of 5.
    assert ratios({"a": 3}, {"a": 1.0, "b": 2.0}) == pytest.approx({"a": 2.0, "b": 1 / 3})


def test_cases_without_gold_are_nothing_to_tune_on(case: Row, write: Write, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="id 0 has no gold answer to tune on"):
        main(make_run(case, write, tmp_path, gold=False))


def test_nothing_is_fitted_on_cases_that_training_did_not_hold_out(
    case: Row, write: Write, tmp_path: Path
) -> None:
    run = make_run(case, write, tmp_path, gold=True)
    write_json(tmp_path / "adapter/manifest.json", TRAINED)
    with pytest.raises(UserError, match="not those that training held out"):
        main(run)


def test_what_was_fitted_is_no_part_of_the_adapters_identity(tmp_path: Path) -> None:
    write_json(tmp_path / "labels.json", {})
    before = model_sha256(tmp_path)
    write_json(tmp_path / "decision.json", {"pair_price": 0.2})
    assert model_sha256(tmp_path) == before


def test_what_the_base_answered_is_neither_fitted_nor_decided_by_the_adapters_fit(
    case: Row, write: Write, tmp_path: Path
) -> None:
    run = make_run(case, write, tmp_path, gold=True)
    manifest = read_json(run / "manifest.json")
    rules = {0: Rule(pair_price=0.2), 2: Rule(pair_price=0.2)}
    fitted = Fitted({}, {"sampling": {}, "constrained": True}, 3, rules)
    write_json(tmp_path / "adapter/decision.json", asdict(fitted))
    for change in ({"adapter": "none"}, {"endpoint": "http://x/v1#m"}):
        write_json(run / "manifest.json", {**manifest, **change})
        with pytest.raises(UserError, match="only answers of a fine-tuned model"):
            main(run)
        assert decode_answers(run).pair_price == 0
        assert read_json(run / "decode.json")["decision_sha256"] is None


def test_a_fit_is_known_by_the_cases_it_was_made_on(
    case: Row, write: Write, tmp_path: Path
) -> None:
    run = make_run(case, write, tmp_path, gold=True)
    made = AnswersRecord.read(run)
    assert not is_fitted_on(tmp_path / "adapter", made)
    main(run)
    assert is_fitted_on(tmp_path / "adapter", made)
    assert not is_fitted_on(tmp_path / "adapter", made.model_copy(update={"held_out": True}))
    assert str(tmp_path) not in (tmp_path / "adapter/decision.json").read_text("utf-8")
    assert decode_answers(run).decision_sha256 == sha256(tmp_path / "adapter/decision.json")


def test_class_ratios_count_the_whole_training_file(
    case: Row, write: Write, tmp_path: Path
) -> None:
    """And not the held-out tenth alone, which was asked: there no case is of class 8."""
    run = make_run(case, write, tmp_path, gold=True)
    made = read_json(run / "manifest.json")
    facts = {i: f"事实{i}。" for i in range(60)}
    asked = [i for i, fact in facts.items() if is_held_out(Example(i, fact))]
    graver = [(name, charges, articles, 8) for name, charges, articles, _ in GOLD]
    rows = [
        case(i, *(GOLD if i in asked else graver)) | {"fact": fact} for i, fact in facts.items()
    ]
    test = write("cases.jsonl", rows)
    changed = {"test_sha256": sha256(test), "held_out": True}
    write_json(run / "manifest.json", {**made, **changed})
    first = json.loads((run / "completions.jsonl").read_text("utf-8").splitlines()[0])
    write("run/completions.jsonl", [{**first, "id": key} for key in asked])
    # All replies say class 13. One more of each class on both sides: of gold 2 n + 1 to 2 (60 - n)
    # + 1, of what is believed 2 n + 1 to 1.
    n, opened = len(asked), open_answers(run)
    assert 0 < n < 20
    scale = (2 * n + 2) / (2 * 60 + 2)
    decider = decider_of(opened.task, opened.labels, opened.trained)
    assert decider
    fitting = Fitting(opened, decider, held_out_cases(opened, decider, 3))
    rule = fitting.rule(2, Console(quiet=True))
    assert rule.class_ratios["penalty"][PENALTIES[8]] == pytest.approx(scale * (2 * (60 - n) + 1))
    assert rule.class_ratios["penalty"][PENALTIES[13]] == pytest.approx(scale)
