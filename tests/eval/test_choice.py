"""Who answers: the model or the text classifier, as their held-out answers say."""

from dataclasses import replace
from pathlib import Path

import pytest

from panjue.eval.choice import CHOICE, Choice, choose, read_choice
from panjue.eval.report import page_data
from panjue.finetune.classifier.classifier import Classifier
from panjue.prompts.labels import collect
from panjue.prompts.model import model_sha256
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump, read_json, read_lines, write_json
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.prompts.tasks.judgment.penalties import PENALTIES
from panjue.serve.answers import open_answers
from panjue.serve.decoding import decode_answers
from tests.records import Row, Write, believing, write_answers, write_training

TASK = load_task("judgment")
GOLD = ("甲", ["盗窃罪"], ["264"], 13), ("乙", ["盗窃罪"], ["264"], 13)
COMPLETIONS = "run/answers/held-out/completions.jsonl"
REFUSED = [{"id": i, "refused": "too long"} for i in range(10)]  # the classifier answers these


def reply(article: str) -> str:
    one = {"charges": ["盗窃罪"], "articles": [article], "penalty": PENALTIES[13]}
    return dump({"judgments": [{"name": name, **one} for name in ("甲", "乙")]})


@pytest.fixture
def held_out(case: Row, write: Write, tmp_path: Path) -> Path:
    """Return answers to ten held-out cases; every other one has a wrong article."""
    test = write("cases.jsonl", [case(i, *GOLD) for i in range(10)])
    rest = {"finish": ["stop"], "dropped_sentences": 0}
    rest |= dict.fromkeys(("prompt_tokens", "cached_tokens", "completion_tokens"), 1)
    rows = [{"id": i, "texts": [reply("266" if i % 2 else "264")], **rest} for i in range(10)]
    folder = write(COMPLETIONS, rows).parent
    known = [("盗窃罪", "264", PENALTIES[13]), ("诈骗罪", "266", PENALTIES[8])]
    collect({"charges": [c], "articles": [a], "penalty": [p]} for c, a, p in known).save(folder)
    write_answers(folder, test, trained=str(tmp_path / "run/adapter"))
    return folder


def chosen(held_out: Path, article: str = "264", penalty: int = 13, **training: str) -> Choice:
    """Return the choice between the model and a classifier that always answers this."""
    articles = {"264": -4.0, "266": -4.0, article: 4.0}
    one = {"charges": {"盗窃罪": 4.0}, "articles": articles, "penalty": {PENALTIES[penalty]: 0.0}}
    adapter = held_out.parents[1] / "adapter"
    write_training(adapter, believing(TASK, one), **training)
    record = read_json(held_out / "manifest.json")
    write_json(held_out / "manifest.json", {**record, "trained_sha256": model_sha256(adapter)})
    decode_answers(held_out)
    return choose(held_out, held_out)


@pytest.mark.parametrize(
    ("article", "penalty", "score", "better"),
    [("264", 13, 1, "classifier"), ("266", 13, 0.7, "model"), ("264", 8, 0.6, "model")],
)
def test_the_better_one_answers(
    held_out: Path, article: str, penalty: int, score: float, better: str
) -> None:
    choice = chosen(held_out, article, penalty)
    assert choice.answered_by == better
    # 0.3 + 0.3 + 0.4, or 0.3 + 0 + 0.4 with a wrong article.
    assert (choice.metric, choice.cases) == ("final", 10)
    assert (choice.model, choice.classifier) == pytest.approx((0.85, score))
    assert choice.difference == pytest.approx(0.85 - score)


def test_a_choice_is_kept_with_an_interval_worked_by_hand(held_out: Path) -> None:
    assert read_choice(held_out) is None
    choice = chosen(held_out)
    assert read_choice(held_out) == choice
    # The model loses 0.3 on five of ten: a mean of 0.15 with a standard error of 0.15 / √10.
    error = 1.96 * 0.15 / 10**0.5
    assert (choice.low, choice.high) == pytest.approx((-0.15 - error, -0.15 + error), abs=0.02)
    assert str(choice) == (
        "final on 10 held-out cases: model 0.8500, text classifier 1.0000 "
        f"(difference -0.1500, 95% interval {choice.low:+.4f} to {choice.high:+.4f})"
    )


def test_of_two_that_are_equal_the_model_answers(
    held_out: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("panjue.finetune.classifier.calibration.MIN_SCALED", 20)
    write(COMPLETIONS, REFUSED)
    choice = chosen(held_out, "266")
    assert (choice.model, choice.difference, choice.answered_by) == (choice.classifier, 0, "model")
    assert choice.scaling == {}, "the model itself has answered nothing"
    assert replace(choice, difference=-1e-12).answered_by == "model", "a difference by rounding"
    assert replace(choice, difference=-1e-6).answered_by == "classifier"


def test_opinions_that_rows_keep_are_not_computed_again(
    held_out: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = chosen(held_out)
    advisor = open_answers(held_out).advisor()
    assert advisor
    rows = []
    examples = Reader(TASK).read(held_out.parents[2] / "cases.jsonl")
    replies = read_lines(held_out / "completions.jsonl")
    for example, (_, row) in zip(examples, replies, strict=True):
        rows.append({**row, "opinions": list(map(vars, advisor.opinions(example)))})
    write(COMPLETIONS, rows)
    monkeypatch.setattr(Classifier, "probabilities", None)  # whoever calls it fails
    assert choose(held_out, held_out) == choice
    report = page_data(open_answers(held_out))
    assert report.agreements["articles"] == {"agree, right": 10, "differ, classifier right": 10}
    assert report.scores
    assert report.scores.baselines["text classifier"]


def penalties_of(folder: Path) -> list[float]:
    rows = [row for _, row in read_lines(folder / "confidence.jsonl")]
    return [of_item["penalty"] for row in rows for of_item in row["confidence"]]


def test_the_confidence_in_the_model_is_scaled_by_held_out_cases(
    held_out: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("panjue.finetune.classifier.calibration.MIN_SCALED", 20)
    choice = chosen(held_out, penalty=8)  # the model is right throughout, the classifier nowhere
    assert penalties_of(held_out) == [0] * 20
    record = read_json(held_out / "manifest.json")
    write_json(held_out / "manifest.json", {**record, "scaling": choice.scaling})
    chosen(held_out, penalty=8, dev_sha256=record["test_sha256"])
    assert penalties_of(held_out) == [0] * 20, "it was made of these very cases"
    chosen(held_out, penalty=8)
    assert penalties_of(held_out) == [pytest.approx(21 / 22, abs=1e-3)] * 20
    write(COMPLETIONS, REFUSED)
    decode_answers(held_out)  # now it is the classifier that answers
    assert penalties_of(held_out) == [1] * 20


def test_a_choice_of_another_version_is_one_line(held_out: Path) -> None:
    write_json(held_out / CHOICE, {"cases": "many"})
    with pytest.raises(UserError, match=r"choice\.json: is of another version; delete it"):
        read_choice(held_out)
