"""Who answers each field: the model or the text classifier, as their held-out answers say."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from panjue.eval.choice import best_by_field, choice_lines, row_of_reply
from panjue.eval.report import page_data
from panjue.finetune.classifier.classifier import Classifier
from panjue.finetune.trained import keep_choice, read_trained
from panjue.prompts.fingerprint import model_sha256
from panjue.prompts.labels import collect
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump, read_json, read_lines, sha256, write_json
from panjue.prompts.plumbing.records import AnsweredBy, Choice, model_less_classifier
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.prompts.tasks.judgment.penalties import PENALTIES
from panjue.serve.answers import asked_otherwise, open_answers
from panjue.serve.decoding import decode
from tests.opened import decoded
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
    decoded(held_out, "model")
    answered = open_answers(held_out)
    choice = best_by_field(answered)
    assert answered.trained
    keep_choice(answered.trained, choice)
    return choice


def trained_sha256(answers: Path) -> str:
    return str(read_json(answers / "manifest.json")["trained_sha256"])


@pytest.mark.parametrize(
    ("article", "penalty", "articles", "better"),
    [
        ("264", 13, (0.5, 1.0), {"charges": "model", "articles": "classifier", "penalty": "model"}),
        ("266", 8, (0.5, 0.0), dict.fromkeys(("charges", "articles", "penalty"), "model")),
    ],
)
def test_the_better_one_answers_each_field(
    held_out: Path,
    article: str,
    penalty: int,
    articles: tuple[float, float],
    better: dict[str, AnsweredBy],
) -> None:
    choice = chosen(held_out, article, penalty)
    assert choice.answered_by == better, "of two that are equal the model answers"
    assert (choice.cases, choice.counted) == (10, 10)
    assert choice.best["articles"].metric == "article_f1"
    assert tuple(choice.score("articles", who) for who in choice.candidates) == articles
    assert choice.score("penalty", "classifier") == float(penalty == 13)


def test_the_choice_lies_beside_the_weights_with_intervals_worked_by_hand(held_out: Path) -> None:
    choice = chosen(held_out)
    assert read_trained(held_out.parents[1] / "adapter").choices == (choice,)
    assert model_sha256(held_out.parents[1] / "adapter") == trained_sha256(held_out)
    # The model loses 1 on five of ten: a mean of 0.5 with a standard error of 0.5 / √10.
    error = 1.96 * 0.5 / 10**0.5
    _, low, high = model_less_classifier(choice.best["articles"])
    assert (low, high) == pytest.approx((-0.5 - error, -0.5 + error), abs=0.06)
    first, _, said, _, warning = choice_lines(choice)
    assert first == "10 held-out cases compare model and text classifier; all count"
    assert said.startswith(
        "  articles: article_f1 model 0.5000, text classifier 1.0000 (difference -0.5000, 95% "
    )
    assert said.endswith(f"interval {low:+.4f} to {high:+.4f}): classifier")
    assert warning == "  under 30 cases count, so who is better may be luck"


def test_a_reply_that_cannot_be_read_counts_as_empty(held_out: Path, write: Write) -> None:
    """The classifier fills it in, but that is not what the model can."""
    write(COMPLETIONS, REFUSED)
    choice = chosen(held_out)
    assert [choice.score(name, "model") for name in choice.best] == [0, 0, 0]
    assert set(choice.answered_by.values()) == {"classifier"}
    assert choice.calibration == {}, "the model itself has answered nothing"


def test_what_a_reply_leaves_out_is_empty(held_out: Path) -> None:
    answered = open_answers(held_out)
    example = next(answered.examples())
    reply = dump({"judgments": [{"name": "甲", "charges": ["盗窃罪"]}]})
    row = row_of_reply(TASK, example, TASK.ask.decode(reply, example, answered.labels))
    nothing: dict[str, Any] = {"articles": [], "penalty": None}
    assert row == {
        "id": 0,
        "judgments": [
            {"name": "甲", "charges": ["盗窃罪"], **nothing},
            {"name": "乙", "charges": [], **nothing},
        ],
    }
    unread = TASK.ask.decode("我无法判断。", example, answered.labels)
    assert row_of_reply(TASK, example, unread) is None


def test_opinions_that_rows_keep_are_not_computed_again(
    held_out: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = chosen(held_out)
    advisor = open_answers(held_out).advisor
    assert advisor
    rows = []
    examples = Reader(TASK).read(held_out.parents[2] / "cases.jsonl")
    replies = read_lines(held_out / "completions.jsonl")
    for example, (_, row) in zip(examples, replies, strict=True):
        rows.append({**row, "opinions": list(map(vars, advisor.opinions(example)))})
    write(COMPLETIONS, rows)
    monkeypatch.setattr(Classifier, "probabilities", None)  # whoever calls it fails
    assert best_by_field(open_answers(held_out)) == choice
    report = page_data(open_answers(held_out))
    assert report.agreements["articles"] == {"agree, right": 10, "differ, classifier right": 10}
    assert report.scores
    assert report.scores.baselines["text classifier"]


def submission_of(folder: Path) -> list[dict[str, Any]]:
    rows = [row for _, row in read_lines(folder / "submission.jsonl")]
    return [judgment for row in rows for judgment in row["judgments"]]


def confidences_of(folder: Path, field: str) -> list[float]:
    rows = [row for _, row in read_lines(folder / "confidence.jsonl")]
    return [of_item[field] for row in rows for of_item in row["confidence"]]


@pytest.fixture
def answered(held_out: Path, case: Row, write: Write) -> Path:
    """Return answers to other cases of the same text, made as those to the held-out cases."""
    cases = [{**case(i, *GOLD), "fact": f"第{i}次作案。"} for i in range(10)]
    folder = shutil.copytree(held_out, held_out.with_name("test"))
    test = write("test.jsonl", cases)
    record = read_json(folder / "manifest.json")
    write_json(folder / "manifest.json", {**record, "test": str(test), "test_sha256": sha256(test)})
    return folder


def made_alike(folder: Path, held_out: Path) -> Path:
    """Give answers the training of the held-out ones."""
    of_held_out = read_json(held_out / "manifest.json")
    record = read_json(folder / "manifest.json")
    changed = {"trained_sha256": of_held_out["trained_sha256"]}
    write_json(folder / "manifest.json", {**record, **changed})
    return folder


def test_each_field_is_answered_by_whom_the_choice_names(held_out: Path, answered: Path) -> None:
    """The model has every other article wrong, the classifier all penalties."""
    chosen(held_out, penalty=8)
    made_alike(answered, held_out)
    tally = decoded(answered)
    right = {"charges": ["盗窃罪"], "articles": ["264"], "penalty": 13}
    assert [{**one, "name": ""} for one in submission_of(answered)] == [{**right, "name": ""}] * 20
    assert [*tally.lines()][-1] == (
        "charges: model (1.00, classifier 1.00); articles: classifier (1.00, model .50); "
        "penalty: model (1.00, classifier .00)"
    )
    decoded(answered, "model")
    assert [one["articles"] for one in submission_of(answered)][2:4] == [["266"], ["266"]]
    decoded(answered, "classifier")
    assert {one["penalty"] for one in submission_of(answered)} == {8}


def test_the_choice_of_answers_made_in_the_same_way_counts_first(
    held_out: Path, answered: Path
) -> None:
    """Else the newest of the same training, but none of replies without a schema."""
    own = chosen(held_out, penalty=8)
    made_alike(answered, held_out)
    trained = read_trained(held_out.parents[1] / "adapter")
    free = own.model_copy(update={"asked": {**own.asked, "constrained": False}})
    seeded = own.model_copy(update={"asked": {**own.asked, "seed": 1}})
    for choice in (free, seeded):
        keep_choice(trained, choice)
    assert open_answers(answered).choice == own
    record = read_json(answered / "manifest.json")
    write_json(answered / "manifest.json", {**record, "sampling": {"temperature": 0.5}})
    opened = open_answers(answered)
    assert opened.choice == seeded
    told = "who answers was decided on answers that were made in another way: seed: 1 -> 0; "
    assert any(line.startswith(told) for line in decode(opened, "auto").lines())
    assert (
        asked_otherwise(seeded, opened.record) == "seed: 1 -> 0; sampling.temperature: null -> 0.5"
    )
    write_json(answered / "manifest.json", {**record, "constrained": False, "seed": 3})
    assert open_answers(answered).choice == free


def test_where_nobody_has_decided_an_earlier_decoding_says_who_answers(
    held_out: Path, answered: Path
) -> None:
    """Held-out answers may be deleted; what is lost with the choice is never the model's."""
    chosen(held_out, penalty=8)
    made_alike(answered, held_out)
    said = [*decoded(answered).lines()][-1]
    submission = (answered / "submission.jsonl").read_bytes()
    shutil.rmtree(held_out)
    assert [*decoded(answered).lines()][-1] == said
    (held_out.parents[1] / "adapter/choice.json").unlink()
    lines = [*decoded(answered).lines()]
    assert lines[-1] == "charges: model; articles: classifier; penalty: model, as decoded before"
    assert "no choice lies beside the weights: confidences in the model are not calibrated" in lines
    assert (answered / "submission.jsonl").read_bytes() == submission
    decoded(answered, "classifier")
    with pytest.raises(UserError, match=r"nobody has decided who answers"):
        decoded(answered, "auto")
    (answered / "decode.json").unlink()
    with pytest.raises(UserError, match=r"nobody has decided who answers, .* answer=classifier$"):
        decoded(answered)
    decoded(answered, "model")


def test_a_choice_that_a_version_before_0_5_made_lies_beside_the_answers(
    held_out: Path, answered: Path
) -> None:
    own = chosen(held_out, penalty=8)
    made_alike(answered, held_out)
    record = read_json(held_out / "manifest.json")
    write_json(held_out / "manifest.json", {**record, "held_out": True})
    (held_out.parents[1] / "adapter/choice.json").unlink()
    fields = {}
    for name, best in own.best.items():
        mean, low, high = model_less_classifier(best)
        scores = {who: own.score(name, who) for who in own.candidates}
        assert mean == pytest.approx(scores["model"] - scores["classifier"])
        ends = {"low": low, "high": high, "metric": best.metric}
        fields[name] = {"answered_by": best.candidate, **scores, **ends}
    calibration = {}
    for name, groups in own.calibration.items():
        calibration[name] = {group: [of.classifier, of.shift] for group, of in groups.items()}
    old = {"cases": 10, "counted": 10, "fields": fields, "calibration": calibration}
    write_json(held_out / "choice.json", old)
    found = open_answers(answered)
    assert found.choice
    assert found.choice.answered_by == own.answered_by
    assert found.choice.texts == own.texts
    assert found.trained
    keep_choice(found.trained, found.choice)
    shutil.rmtree(held_out)
    assert open_answers(answered).choice == found.choice, "it lies with the weights now"


def test_another_answer_replaces_the_submission_and_what_was_made_from_it(
    held_out: Path, answered: Path
) -> None:
    chosen(held_out, penalty=8)
    made_alike(answered, held_out)
    decoded(answered)
    for name in ("scores.json", "report.html"):
        (answered / name).write_text("{}", "utf-8")
    assert not decoded(answered).replaced
    assert (answered / "scores.json").exists(), "they are of the same answers"
    replaced = decoded(answered, "classifier").replaced
    assert replaced.startswith("was charges: model (1.00, ")
    assert replaced.endswith("; deleted scores.json, report.html, made from it")
    assert not (answered / "scores.json").exists()
    again = decoded(answered)
    assert [*again.lines()][-1] == "answered by the text classifier, as answer=classifier says"


def test_where_the_model_was_not_asked_it_cannot_answer(held_out: Path, answered: Path) -> None:
    chosen(held_out)
    made_alike(answered, held_out)
    (answered / "completions.jsonl").unlink()
    record = read_json(answered / "manifest.json")
    write_json(answered / "manifest.json", {**record, "asked": False})
    with pytest.raises(UserError, match=r"the model was never asked, .* answer=model`$"):
        decoded(answered, "model")
    decoded(answered, "classifier")
    write_json(answered / "manifest.json", {**record, "asked": True})
    with pytest.raises(UserError, match=r"completions\.jsonl: No such file"):
        decoded(answered, "model")


def test_the_confidence_in_the_model_is_calibrated_by_held_out_cases(
    held_out: Path, answered: Path
) -> None:
    chosen(held_out, penalty=8)  # the model is right throughout, the classifier nowhere
    made_alike(answered, held_out)
    assert confidences_of(held_out, "penalty") == pytest.approx([0] * 20, abs=1e-5)
    decoded(held_out, "model")
    assert confidences_of(held_out, "penalty") == pytest.approx([0] * 20, abs=1e-5), "its own"
    decoded(answered)
    [confidence] = set(confidences_of(answered, "penalty"))
    assert 0.8 < confidence < 0.95, "20 of 20 were right"
    same = read_json(held_out / "manifest.json")
    record = {**same, "test": str(held_out.parents[2] / "cases.jsonl"), "held_out": False}
    write_json(answered / "manifest.json", record)
    decoded(answered)
    assert confidences_of(answered, "penalty") == pytest.approx([0] * 20, abs=1e-5), (
        "the calibration was made of these very cases"
    )


def test_persons_whose_charge_never_stood_with_their_articles_are_counted(held_out: Path) -> None:
    chosen(held_out)
    tally = decoded(held_out)
    assert tally.unpaired == 10, "every other case has two persons with the article of fraud"
    assert "10 persons have a charge never seen with their articles" in tally.lines()
