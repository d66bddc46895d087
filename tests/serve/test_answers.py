from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from panjue.eval.agreement import NO_REPLY
from panjue.eval.report import page_data
from panjue.eval.score import ScoreResult, score
from panjue.eval.show_scores import remarks
from panjue.prompts.cli_generate import decode_again, next_step
from panjue.prompts.labels import collect
from panjue.prompts.model import CLASSIFIER
from panjue.prompts.plumbing import files
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump, read_json, read_lines, sha256, write_json
from panjue.prompts.plumbing.records import StoredScores
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.prompts.tasks.judgment.penalties import PENALTIES
from panjue.serve.answers import open_answers
from panjue.serve.decoding import decode
from tests.opened import decoded
from tests.records import Row, Write, believing, write_answers, write_training

TASK = load_task("judgment")
KEYS = (1, 2, 3, 4, 5, "f")
PEOPLE = ("甲", ["盗窃罪"], ["264"], 8), ("乙", ["盗窃罪"], ["264"], 8)
GOOD: list[dict[str, Any]] = [
    {"name": "甲", "charges": ["诈骗罪"], "articles": ["266"], "penalty": 10},
    {"name": "乙", "charges": ["盗窃罪"], "articles": ["264"], "penalty": 2},
]


def completion(key: int | str, text: str, finish: str = "stop", dropped: int = 0) -> dict[str, Any]:
    return {"id": key, "texts": [text], "finish": [finish], "dropped_sentences": dropped}


ANSWER = [{**judgment, "penalty": PENALTIES[judgment["penalty"]]} for judgment in GOOD]
WHOLE = dump({"judgments": ANSWER})
COMPLETIONS = [
    completion("f", WHOLE.replace(dump(PENALTIES[2]), "99").replace('"264"', '"264","1: 2"')),
    completion(1, WHOLE),
    completion(2, f"```json\n{WHOLE}\n```", dropped=3),
    completion(3, WHOLE[: WHOLE.index('"乙"')], finish="length"),
    completion(4, "我无法判断。"),
    {"id": 5, "refused": "the prompt needs 9000 tokens, max_tokens is 4096"},
]


@pytest.fixture
def run(case: Row, write: Write, tmp_path: Path) -> Path:
    """Return a run folder with the completions of six cases, in another order than the cases."""
    test = write("test.jsonl", [case(key, *PEOPLE, gold=False) for key in KEYS])
    write("run/completions.jsonl", COMPLETIONS)
    theft = {"charges": ["盗窃罪"], "articles": ["264"], "penalty": [PENALTIES[8]]}
    fraud = {"charges": ["诈骗罪"], "articles": ["266"], "penalty": [PENALTIES[10]]}
    collect([theft, theft, fraud]).save(tmp_path / "run")
    write_answers(tmp_path / "run", test, trained=".")
    return tmp_path / "run"


def scored(run: Path, gold: Path) -> ScoreResult:
    """Return the score of answers, with what is known of how they were made."""
    return score(Reader(TASK), gold, run, open_answers(run, gold))


def judged(guess: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the submission where `guess` answers what no reply has."""
    first, second = GOOD
    from_fallback = [{"name": name, **guess} for name in ("甲", "乙")]
    return [
        {"id": 1, "judgments": GOOD},
        {"id": 2, "judgments": GOOD},
        {"id": 3, "judgments": [first, from_fallback[1]]},  # cut before 乙
        {"id": 4, "judgments": from_fallback},
        {"id": 5, "judgments": from_fallback},
        {"id": "f", "judgments": [first, {**second, "penalty": guess["penalty"]}]},
    ]


def said_of(scores: ScoreResult) -> list[str]:
    return [remark.english for remark in remarks(scores)]


def submission_of(run: Path) -> list[dict[str, Any]]:
    return [row for _, row in read_lines(run / "submission.jsonl")]


def test_after_answers_comes_a_score_or_without_gold_a_check(
    run: Path, case: Row, write: Write
) -> None:
    test = run.with_name("test.jsonl")
    assert next_step(open_answers(run), decoded(run)) == f"next: panjue check {run} --cases {test}"
    gold = write("my gold.jsonl", [case(key, *PEOPLE) for key in KEYS])
    answered = open_answers(run, gold)
    assert next_step(answered, decode(answered)) == f"next: panjue score '{gold}' {run}"


def test_every_case_is_answered_in_the_order_of_the_test_file(run: Path) -> None:
    decoded(run)
    commonest = {"charges": ["盗窃罪"], "articles": ["264"], "penalty": 8}
    assert submission_of(run) == judged(commonest)


class Killed(BaseException):
    """Ends decoding as SIGKILL does."""


@pytest.mark.parametrize("kept", range(5))
def test_decoding_that_is_killed_is_neither_clean_nor_scored_as_if_all_were_asked(
    kept: int,
    run: Path,
    gold: Path,
    adapter: Path,
    panjue: Callable[..., CompletedProcess[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So many of its files have replaced those of an earlier decoding."""
    check = ("check", run, "--cases", run.parent / "test.jsonl")
    decoded(run, "classifier")
    (run / "scores.json").write_text("{}", "utf-8")
    left = kept
    plain = files.replace

    def killed(temporary: Path, path: Path, *others: Any) -> None:
        nonlocal left
        if not left:
            raise Killed
        left -= 1
        plain(temporary, path, *others)

    monkeypatch.setattr(files, "replace", killed)
    with pytest.raises(Killed):
        decoded(run, "model")
    monkeypatch.setattr(files, "replace", plain)
    if kept:
        way_out = f"stopped before the end; run `panjue decode {run}`, or wait if one runs"
        for words in (check, ("score", gold, run), ("report", run, "--gold", gold)):
            done = panjue(*words)
            assert (done.returncode, way_out in done.stderr, done.stdout) == (2, True, "")
    else:
        assert scored(run, gold).answered_by.startswith("answered by the text classifier")
    tally = decoded(run, None if kept else "model")
    assert tally.replaced.startswith("was answered by the text classifier, as answer=classifier")
    assert not (run / "scores.json").exists()
    assert "without a reply: 1, " in panjue(*check).stdout
    assert scored(run, gold).never_asked


def test_a_case_that_was_never_asked_is_named_everywhere(
    run: Path, gold: Path, panjue: Callable[..., CompletedProcess[str]]
) -> None:
    decoded(run)
    reason = "5: the prompt needs 9000 tokens, max_tokens is 4096"
    said = (
        f"without a reply: 1, their answers are not the model's: id {reason}; "
        "a model with a longer context can be asked"
    )
    scores = scored(run, gold)
    assert {said, "unreadable replies: 16.67%"} <= set(said_of(scores))
    assert scores.to_json()["never_asked"] == [reason]
    checked = panjue("check", run, "--cases", run.parent / "test.jsonl")
    assert checked.returncode == 1
    assert checked.stdout.splitlines()[0] == f"{run}/submission.jsonl: {said}"
    change(run, trained=None)
    assert panjue("report", run, "--gold", gold).returncode == 0
    text = (run / "report.html").read_text("utf-8")
    for note in (
        "without a reply: 1",
        '"could not be asked: the prompt needs 9000 tokens',
        '"shortened to fit by 3 sentences"',
        '"1 replies cut by length"',
        '"repaired: not the JSON that was asked for"',
        '"the reply was unreadable, its answer: commonest labels"',
    ):
        assert note in text


def test_what_was_met_is_counted(run: Path) -> None:
    tally = decoded(run)
    lines = list(tally.lines())
    assert lines[:4] == [
        "6 examples: 1 first replies valid as they came, 3 repaired, 1 unreadable",
        "1 cut by length, 1 could not be asked, 1 shortened to fit",
        "left out by replies: 1 persons, 1 fields",
        "what replies lack is answered by: commonest labels",
    ]
    assert lines[4].startswith("without a reply: 1, ")
    assert lines[5] == "      3 × no answer"
    assert lines[-1] == "answered by the model"
    saved = read_json(run / "decode.json")
    counts = {"examples": 6, "calls": 6, "valid": 1, "unreadable": 1, "missing_fields": 1}
    assert counts.items() <= saved.items()
    # The name before the colon is gone, so that kinds of repair add up.
    kinds = ("not the JSON that was asked for", "no answer", "penalty missing or of no class")
    label = "articles '1: 2' unknown, dropped"
    assert saved["repairs"] == dict(zip((*kinds, label), (1, 3, 1, 1), strict=True))
    assert saved["submission_sha256"] == sha256(run / "submission.jsonl")


def test_other_reasons_to_end_are_counted_and_named(run: Path, write: Write) -> None:
    filtered = [completion(key, WHOLE[:60], finish="content_filter") for key in KEYS[:3]]
    rows = [*filtered, completion(4, "", finish="content_filter"), completion(5, WHOLE, "repeat")]
    rows.append({"id": "f", "refused": '400: {"code": "data_inspection_failed"}'})
    write("run/completions.jsonl", rows)
    lines = list(decoded(run).lines())
    assert "ended by a content filter: 4; by repeat: 1" in lines
    [line] = [line for line in lines if line.startswith("without a reply: 1")]
    assert line.endswith("; 1 refused for their content: another model can be asked")
    assert read_json(run / "decode.json")["finish"] == {"content_filter": 4, "repeat": 1}
    change(run, trained=None)
    assert "content filter" in page_data(open_answers(run)).cases[0].handled


def test_the_model_is_not_said_to_have_answered_where_no_reply_could_be_read(
    run: Path, write: Write
) -> None:
    unread = [completion(key, "我无法判断。") for key in KEYS[:-1]]
    write("run/completions.jsonl", [*unread, COMPLETIONS[-1] | {"id": KEYS[-1]}])
    said = "answered by: commonest labels, since no reply could be read"
    assert list(decoded(run).lines())[-1] == said
    assert read_json(run / "decode.json")["answered_by"] == said


def test_decoding_again_writes_the_same_bytes(run: Path) -> None:
    written = []
    for _ in range(2):
        decoded(run)
        written.append({path.name: path.read_bytes() for path in run.iterdir()})
    assert written[0] == written[1]


LOGITS = {"charges": {"诈骗罪": 4, "盗窃罪": -4}, "articles": {"266": 4, "264": -4}}
FRAUD = believing(TASK, {**LOGITS, "penalty": {PENALTIES[10]: 4, PENALTIES[8]: 0}})
"""A classifier that believes in fraud whatever the text."""


@pytest.fixture
def adapter(run: Path, tmp_path: Path) -> Path:
    """Return the training of the run, which fitted a classifier."""
    write_training(tmp_path / "adapter", FRAUD)
    change(run, trained=str(tmp_path / "adapter"))
    return tmp_path / "adapter"


@pytest.fixture
def gold(case: Row, write: Write) -> Path:
    """Return the labelled cases of the run."""
    return write("gold.jsonl", [case(key, *PEOPLE) for key in KEYS])


def change(run: Path, **more: Any) -> None:
    """Change the record of the answers."""
    write_json(run / "manifest.json", {**read_json(run / "manifest.json"), **more})


BELIEVED = {"charges": ["诈骗罪"], "articles": ["266"], "penalty": 10}


def test_the_classifier_answers_what_no_reply_has(run: Path, adapter: Path, gold: Path) -> None:
    tally = decoded(run, "model")
    assert "what replies lack is answered by: text classifier" in tally.lines()
    assert submission_of(run) == judged(BELIEVED)
    told = [row for _, row in read_lines(run / "confidence.jsonl")]
    assert [row["id"] for row in told] == list(KEYS)
    sure, unsure = (item["charges"] for item in told[0]["confidence"])
    assert (round(sure, 1), round(unsure, 1)) == (1, 0), "the classifier's, in the model's answer"
    (run / "confidence.jsonl").write_text("", "utf-8")
    with pytest.raises(UserError, match=r"confidence\.jsonl: was changed; run `panjue decode "):
        scored(run, gold)
    (adapter / "manifest.json").unlink()
    decoded(run)
    assert not (run / "confidence.jsonl").exists()


def test_decoding_reads_the_record_that_is_there_once_it_has_the_lock(
    run: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(run, trained=None)
    plain = files.exclusive_lock

    @contextmanager
    def lock_after_another(folder: Path) -> Iterator[None]:
        change(run, trained=str(adapter))  # the process that had it until now
        with plain(folder):
            yield

    monkeypatch.setattr("panjue.prompts.cli_generate.exclusive_lock", lock_after_another)
    decode_again(run, "model")
    assert files.read_json(run / "decode.json")["fallback"] == "text classifier"


def test_where_the_classifier_answers_no_reply_is_needed(
    run: Path, adapter: Path, gold: Path, panjue: Callable[..., CompletedProcess[str]]
) -> None:
    (run / "completions.jsonl").unlink()
    change(run, asked=False)
    told = "answered by the text classifier"
    assert list(decoded(run).lines()) == ["6 examples", told]
    both = [{"name": name, **BELIEVED} for name in ("甲", "乙")]
    assert [row["judgments"] for row in submission_of(run)] == [both] * 6
    assert len(list(read_lines(run / "confidence.jsonl"))) == 6
    lines = said_of(scored(run, gold))
    assert told in lines
    assert not any("unreadable" in line for line in lines)
    done = panjue("report", run, "--gold", gold)
    assert done.returncode == 0, done.stderr
    (adapter / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"the model was never asked, which needs the engine"):
        decoded(run)


def test_a_classifier_that_is_broken_is_no_baseline(run: Path, adapter: Path, gold: Path) -> None:
    change(run, test=str(gold), test_sha256=sha256(gold))
    decoded(run, "model")
    (run / "completions.jsonl").write_text('{"id": 7, "tex', "utf-8")
    scores = scored(run, gold)
    assert ("text classifier" in scores.baselines, bool(scores.classifier_fault)) == (False, True)
    (adapter / CLASSIFIER).unlink()
    scores = scored(run, gold)
    assert "text classifier" not in scores.baselines
    missing = "is missing, or is not what the training wrote; restore it, or train again"
    told = f"{adapter}/classifier.npz: {missing}"
    assert f"text classifier: unknown, {told}" in said_of(scores)


@pytest.mark.parametrize("names", ["甲乙", "乙甲", "甲", "甲乙丙"])
def test_kept_opinions_are_of_the_answered_file_alone(
    run: Path, adapter: Path, case: Row, write: Write, names: str
) -> None:
    theft = {"charges": ["盗窃罪"], "articles": ["264"], "penalty": PENALTIES[8]}
    kept = {"probabilities": {"penalty": {PENALTIES[8]: 1.0}}, "answer": theft}
    write("run/completions.jsonl", [{**row, "opinions": [kept, kept]} for row in COMPLETIONS])
    test = write("test.jsonl", [case(key, *PEOPLE) for key in KEYS])
    people = [(name, *PEOPLE[0][1:]) for name in names]
    gold = write("gold.jsonl", [{**case(key, *people), "note": "other bytes"} for key in KEYS])
    change(run, test=str(test), test_sha256=sha256(test))
    decoded(run, "model")
    assert scored(run, test).baselines["text classifier"]["charge_f1"] == 1
    found = page_data(open_answers(run, gold))
    assert found.scores
    assert found.scores.baselines["text classifier"]["charge_f1"] == 0, "it believes in fraud"
    assert "repaired" not in found.cases[0].handled, "the reply has all whom it was asked about"
    lacking = [fields[0][1] == NO_REPLY for fields in found.cases[0].opinions]
    assert lacking == [name == "丙" for name in names]


LOOKED = "training and the choice between model and text classifier looked at these cases"
TRAINED_ON = "these cases were trained on"


@pytest.mark.parametrize(
    ("seen_as", "told"),
    [("train_sha256", TRAINED_ON), ("mix_sha256", TRAINED_ON), ("dev_sha256", LOOKED)],
)
def test_cases_that_training_has_seen_are_told(
    run: Path, adapter: Path, gold: Path, seen_as: str, told: str
) -> None:
    change(run, test=str(gold), test_sha256=sha256(gold))
    decoded(run, "model")
    write_training(adapter, FRAUD, **{seen_as: sha256(gold)})
    scores = scored(run, gold)
    assert scores.in_sample == told
    assert f"{told}; expect lower scores on other cases" in said_of(scores)
    assert ("text classifier" in scores.baselines) == (told == LOOKED)
    change(run, held_out=True)  # a tenth of the file, which was not trained on
    held_out = scored(run, gold)
    assert held_out.in_sample == LOOKED
    assert "text classifier" in held_out.baselines


def test_a_missing_completion_is_named_and_nothing_is_written(run: Path, write: Write) -> None:
    write("run/completions.jsonl", [row for row in COMPLETIONS if row["id"] != 4])
    with pytest.raises(UserError, match=r"completions\.jsonl: no row for id 4; .*generate"):
        decoded(run)
    assert not [path for path in run.iterdir() if path.stem in ("submission", "decode", "cases")]


def test_a_changed_or_missing_test_file_is_named(run: Path) -> None:
    test = run.parent / "test.jsonl"
    test.write_text(test.read_text("utf-8").replace("事实", "事"), "utf-8")
    with pytest.raises(UserError, match=r"test\.jsonl: missing, or not the file"):
        decoded(run)
    test.unlink()
    with pytest.raises(UserError, match=r"test\.jsonl: missing"):
        decoded(run)


def test_a_run_without_answers_is_named(run: Path) -> None:
    (run / "manifest.json").unlink()
    with pytest.raises(UserError, match="run: has no answers; `panjue generate` makes them"):
        decoded(run)
    with pytest.raises(UserError, match="nowhere: there is no such folder"):
        decoded(run / "nowhere")


def test_missing_or_broken_completions_are_told_with_the_way_on(run: Path, write: Write) -> None:
    decoded(run)
    place = run / "completions.jsonl"
    place.write_text('{"id": 7, "tex', "utf-8")
    with pytest.raises(UserError, match=r"not JSON.*`panjue generate` again drops it if it is the"):
        decoded(run)
    write("run/completions.jsonl", [{"id": 1, "texts": ["{}"]}])
    for read in (decoded, lambda path: page_data(open_answers(path))):
        with pytest.raises(UserError, match=r"id 1: needs 'texts', .*delete the line"):
            read(run)
    place.unlink()
    with pytest.raises(UserError, match=r"No such file or directory; run `panjue generate`$"):
        decoded(run)


def test_an_edited_submission_is_said_everywhere_to_be_edited(
    run: Path, gold: Path, panjue: Callable[..., CompletedProcess[str]]
) -> None:
    decoded(run)
    assert panjue("score", gold, run).returncode == 0
    assert (run / "scores.json").exists()
    path = run / "submission.jsonl"
    path.write_text(path.read_text("utf-8").replace('"264"', '"266"', 1), "utf-8")
    told = f"{path}: was changed since it was decoded, so nobody knows who answers"
    before = (run / "scores.json").read_bytes()
    for words in (
        ("score", gold, run),
        ("check", run, "--cases", gold),
        ("fairness", gold, run, "--by", "defendants"),
        ("compare", run, run, "--gold", gold),
    ):
        assert told in panjue(*words).stdout, words
    assert (run / "scores.json").read_bytes() == before, "its scores are not kept"
    assert StoredScores.read(run, path.name) is None
    page = page_data(open_answers(run, gold))
    assert page.by
    assert page.by[0].startswith("The submission was changed since it was decoded")
    assert not any(case.opinions or case.reply for case in page.cases)
    refused = panjue("vote", run.parent / "test.jsonl", run.parent / "out", run, run)
    assert refused.returncode == 2


def test_scores_of_some_cases_or_of_other_outcomes_are_not_kept(
    run: Path,
    gold: Path,
    case: Row,
    write: Write,
    panjue: Callable[..., CompletedProcess[str]],
) -> None:
    decoded(run)
    some = write("some.jsonl", [row for _, row in read_lines(gold)][:2])
    assert "and 6 were answered" in panjue("score", some, run).stdout
    assert not (run / "scores.json").exists()
    change(run, test=str(gold), test_sha256=sha256(gold))
    others = write("others.jsonl", [case(key, *PEOPLE[::-1]) for key in KEYS])
    said = panjue("score", others, run).stdout
    assert f"it has outcomes of its own, and {others} has others" in said
    assert not (run / "scores.json").exists()
    panjue("score", gold, run)
    assert (run / "scores.json").exists()


def test_a_submission_of_other_answers_is_not_replaced_without_a_word(run: Path) -> None:
    told = f"{run}/submission.jsonl: replaced: was answered by the model"
    decoded(run)
    assert told not in decoded(run).lines()
    (run / "submission.jsonl").write_text("{}\n", "utf-8")
    assert told in decoded(run).lines()


def test_a_file_that_lies_alone_is_no_folder_of_answers(tmp_path: Path) -> None:
    alone = tmp_path / "submission.jsonl"
    with pytest.raises(UserError, match="there is no such folder"):
        open_answers(alone)
    alone.write_text("{}", "utf-8")
    with pytest.raises(UserError, match="is a file alone; give the folder of answers, or its run"):
        open_answers(alone)
