"""`panjue explain`: who answered a field, how surely, and why."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from panjue.eval.baselines import fitted_on_these
from panjue.eval.explain import explain
from panjue.finetune.classifier.classifier import Classifier
from panjue.finetune.classifier.fit import MIN_CASES
from panjue.prompts.example import Example
from panjue.prompts.fingerprint import model_sha256
from panjue.prompts.labels import Labels
from panjue.prompts.model import CLASSIFIER
from panjue.prompts.plumbing.files import dump, read_lines, sha256
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.serve.answers import open_answers
from tests.eval.test_report import change_json
from tests.finetune.classifier.recompute import Stored, recompute
from tests.finetune.classifier.test_fit import (
    JUDGMENT,
    SEVERITY,
    classifier_of,
    examples,
    thefts,
)
from tests.opened import decoded
from tests.records import TRAINED, Write, write_answers, write_training

Panjue = Callable[..., CompletedProcess[str]]
TEXT = "赵甲窃取2.5万元。钱乙望风，编号7。"
PERSONS = ("赵甲", "钱乙")
THEFT = {"charges": ["盗窃罪"], "articles": ["264"], "penalty": "有期徒刑六个月以下"}
FRAUD = {"charges": ["诈骗罪"], "articles": ["266"], "penalty": "有期徒刑六个月以下"}


@pytest.fixture(scope="module")
def judging() -> Classifier:
    return classifier_of(JUDGMENT, thefts(MIN_CASES))


@pytest.fixture
def run(judging: Classifier, write: Write, tmp_path: Path) -> Path:
    """Return a run whose model says fraud of the first person, and nothing of the second."""
    folder = tmp_path / "run"
    write_training(folder / "adapter", judging)
    labels = JUDGMENT.ask.labels(thefts(MIN_CASES))
    labels.save(folder / "adapter")
    rows = [{"id": key, "fact": TEXT, "defendants": [*PERSONS]} for key in (1, "a\x1b[2J")]
    test = write("test.jsonl", rows)
    answers = folder / "answers/test"
    labels.save(answers)
    write_answers(
        answers,
        test,
        trained=str(folder / "adapter"),
        trained_sha256=model_sha256(folder / "adapter"),
        labels_sha256=sha256(answers / "labels.json"),
    )
    reply = {"texts": [dump({"judgments": [{"name": "赵甲", **FRAUD}]})], "finish": ["stop"]}
    write(
        str(answers / "completions.jsonl"),
        [{"id": row["id"], **reply, "dropped_sentences": 0} for row in rows],
    )
    decoded(answers, "model")
    return folder


def test_each_field_says_who_answered_and_what_the_other_one_says(
    run: Path, panjue: Panjue
) -> None:
    said = panjue("explain", run, 1)
    assert said.returncode == 0, said.stderr
    first, second = said.stdout.split("\n钱乙\n")
    assert first.startswith(f"{run / 'answers/test'}: id 1\n\n赵甲\ncharges: 诈骗罪\n")
    by_model = r"  answered by the model \(confidence [01]\.\d\d\); "
    by_model += "the text classifier's answer, not used: "
    assert re.search(by_model + "盗窃罪\n", first)
    assert re.search(by_model + "第二百六十四条\n", first)
    assert re.search(r"likeliest to the classifier: 盗窃罪 \d+\.\d%, 诈骗罪 \d+\.\d%\n", first)
    by_classifier = (
        r"charges: 盗窃罪\n  answered by the text classifier \(confidence [01]\.\d\d\); "
    )
    assert re.search(by_classifier + "the model's reply has no answer\n", second)
    assert "Contributions are log-odds." in said.stdout

    decoded(run / "answers/test", "classifier")
    said = panjue("explain", run, 1, "--person", "赵甲")
    charges = said.stdout.split("articles:")[0]
    assert "charges: 盗窃罪\n  answered by the text classifier" in charges
    assert "; the model was not asked\n" in charges
    assert "钱乙\n" not in said.stdout

    change_json(run / "answers/test/decode.json", by_field={"charges": "classifier"}, calls=2)
    said = panjue("explain", run, 1, "--person", "赵甲")
    assert "; the model's answer, not used: 诈骗罪\n" in said.stdout


def test_the_models_own_probability_stands_where_the_row_has_it(
    run: Path, write: Write, panjue: Panjue
) -> None:
    assert "own probability" not in panjue("explain", run, 1).stdout, "no row has numbers"
    answers = run / "answers/test"
    rows = [row for _, row in read_lines(answers / "completions.jsonl")]
    numbers = {"charges": [-0.5], "articles": [-0.25, -0.25], "penalty": [-0.00004]}
    write(str(answers / "completions.jsonl"), [{**row, "logprobs": [numbers]} for row in rows])
    decoded(answers, "model")

    said = panjue("explain", run, 1).stdout
    first, second = said.split("\n钱乙\n")
    own = "  the model's own probability of this answer: "
    assert re.search(
        rf"charges: 诈骗罪\n  answered by the model .*\n{own}60\.7% \(log-probability -0\.5\)\n",
        first,
    )
    assert f"{own}60.7% (log-probability -0.5)\n" in first.split("\narticles: ")[1]
    assert f"{own}100.0% (log-probability -4e-05)\n" in first.split("\npenalty: ")[1]
    assert "own probability of" not in second.split("Contributions")[0], "he is not in the reply"
    assert "\nThe model's own probability is how likely it was to write exactly this" in said

    change_json(answers / "decode.json", by_field={"charges": "classifier"})
    said = panjue("explain", run, 1, "--person", "赵甲").stdout
    assert "; the model's answer, not used: 诈骗罪\n" in said
    assert "  the model's own probability of its answer: 60.7% (log-probability -0.5)\n" in said

    decoded(answers, "classifier")
    assert "own probability" not in panjue("explain", run, 1).stdout, "the model was not asked"
    submission = answers / "submission.jsonl"
    submission.write_text(submission.read_text("utf-8").replace("盗窃罪", "诈骗罪"), "utf-8")
    assert "own probability" not in panjue("explain", run, 1).stdout, "nobody knows who answered"


def test_what_is_printed_is_what_follows_from_the_stored_file(run: Path, panjue: Panjue) -> None:
    """The numbers of every line, to the digits that are shown."""
    lines = panjue("explain", run, 1, "--person", "赵甲").stdout.splitlines()
    stored = Stored.read(run / "adapter" / CLASSIFIER)
    example = Example(1, TEXT, PERSONS)
    linear, fields = recompute(stored, example, 2, JUDGMENT.answer.evidence)
    columns = {pair: number for number, pair in enumerate(stored.labels)}
    for field, label, shown in (
        ("charges", "诈骗罪", "诈骗罪"),
        ("articles", "266", "第二百六十六条"),
        ("penalty", FRAUD["penalty"], FRAUD["penalty"]),
    ):
        column = columns[field, str(label)]
        number = stored.about["fields"][field]["labels"].index(label)
        [start] = [place for place, line in enumerate(lines) if line.startswith(f"{field}: ")]
        at = start + 3
        score = linear[0].scores[:, column].sum()
        bias = stored.arrays["bias"][column]
        assert lines[at].startswith(f"  {shown}: linear model {score:+.2f} ({bias:+.2f} whatever")
        _, contributions, _ = fields[field].trees[0, number]
        average = f"({contributions[-1]:+.2f} on average)"
        assert f"trees {contributions.sum():+.2f} {average}" in lines[at]
        assert lines[at].endswith(f" {fields[field].before[0, number]:.1%}")
        words = linear[0].words(column)
        strongest = sorted(words.values(), reverse=True)[:5]
        printed = {line[:22].strip(): line[22:] for line in lines[at + 1 : at + 9]}
        numbers = [float(one) for one in re.findall(r"[+-]\d+\.\d\d", printed.get("words for", ""))]
        assert numbers == [round(one, 2) for one in strongest if one >= 0.005]
        weakest = sorted(words.values())[:5]
        numbers = [
            float(one) for one in re.findall(r" ([+-]\d+\.\d\d)", printed.get("words against", ""))
        ]
        assert numbers == [round(one, 2) for one in weakest if one <= -0.005]


def test_an_id_or_a_person_that_is_not_there_is_one_line(run: Path, panjue: Panjue) -> None:
    for words, line in [
        ((run, 7), f"{run.parent / 'test.jsonl'}: has no case with the id 7; the first id is 1"),
        ((run, 1, "--person", "孙丙"), "id 1: has no person '孙丙', but 赵甲, 钱乙"),
        ((run / "nothing", 1), f"{run / 'nothing'}: there is no such folder"),
        ((run / "adapter", 1), "has no answers"),
    ]:
        said = panjue("explain", *words)
        assert (said.returncode, said.stdout) == (2, "")
        assert line in said.stderr
        assert said.stderr.count("\n") == 1
    (run / "answers/test/submission.jsonl").write_text("", "utf-8")
    said = panjue("explain", run / "answers/test", 1)
    assert "submission.jsonl: has no answer to id 1" in said.stderr


def test_an_id_from_a_file_does_not_act_on_the_terminal(run: Path, panjue: Panjue) -> None:
    said = panjue("explain", run, "a\x1b[2J")
    assert said.returncode == 0
    assert "id a\\x1b[2J" in said.stdout
    assert "\x1b" not in said.stdout


def test_of_an_edited_submission_nobody_knows_who_answered(run: Path, panjue: Panjue) -> None:
    submission = run / "answers/test/submission.jsonl"
    submission.write_text(submission.read_text("utf-8").replace("诈骗罪", "盗窃罪"), "utf-8")
    said = panjue("explain", run, 1, "--person", "赵甲").stdout
    assert "was changed since it was decoded, so nobody knows who answers" in said
    assert (
        "charges: 盗窃罪\n  nobody knows who answered\n  likeliest to the classifier: 盗窃罪"
        in said
    )
    assert "words for" in said


def test_cases_of_the_training_are_said_to_be(run: Path, panjue: Panjue) -> None:
    assert "was fitted on these cases" not in panjue("explain", run, 1).stdout
    digest = sha256(run.parent / "test.jsonl")
    change_json(run / "adapter/manifest.json", train_sha256=digest)
    fitted = {"trained_sha256": model_sha256(run / "adapter")}
    change_json(run / "answers/test/manifest.json", **fitted)
    assert "The text classifier was fitted on these cases" in panjue("explain", run, 1).stdout


@pytest.mark.parametrize(
    ("earlier", "held_out", "is_known"),
    [
        ({"train_sha256": "TEST"}, False, True),
        ({"mix_sha256": "TEST"}, False, True),
        ({"from_record": {**TRAINED, "train_sha256": "TEST"}}, False, True),
        ({"train_sha256": "TEST"}, True, False),  # the tenth that both hold out
        ({"train_sha256": "TEST", "dev_sha256": "other"}, True, True),
        ({"train_sha256": "TEST", "adopted": ["saves"]}, False, False),  # by another trainer
        ({"train_sha256": "other"}, False, False),
    ],
)
def test_cases_of_an_earlier_training_are_said_to_be(
    earlier: dict[str, Any], held_out: bool, is_known: bool, run: Path
) -> None:
    digest = sha256(run.parent / "test.jsonl")
    start = json.loads(dump({**TRAINED, **earlier}).replace("TEST", digest))
    change_json(run / "adapter/manifest.json", from_record=start)
    adapter = model_sha256(run / "adapter")
    change_json(run / "answers/test/manifest.json", trained_sha256=adapter, held_out=held_out)
    opened = open_answers(run)
    assert (fitted_on_these(opened) is not None) == is_known
    if is_known and not held_out:
        said = "An earlier training of the model had these cases: the model is surer of them"
        assert any(line.startswith(said) for line in explain(opened, "1", None))


@pytest.mark.parametrize(
    ("record", "reason", "by"),
    [
        (
            {"trained": None, "endpoint": "http://127.0.0.1:9/v1#other"},
            "no training answered, or it is not there any more",
            "answered by the model (confidence 0.",
        ),
        (
            {"voted": {"../a": "", "../b": ""}, "trained": None},
            "the vote of 2 runs has no text classifier of its own",
            "answered by the vote of 2 runs",
        ),
        ({"trained_sha256": "0"}, "is not the training that gave these answers", "answered by the"),
    ],
)
def test_without_a_text_classifier_one_line_says_so(
    record: Mapping[str, Any], reason: str, by: str, run: Path, panjue: Panjue
) -> None:
    change_json(run / "answers/test/manifest.json", **record)
    said = panjue("explain", run / "answers/test", 1)
    assert said.returncode == 0, said.stderr
    assert re.search(f"\nnothing to explain: .*{reason}", said.stdout)
    assert f"charges: 诈骗罪\n  {by}" in said.stdout
    assert "likeliest" not in said.stdout
    assert "log-odds" not in said.stdout


def test_a_task_of_classes_is_explained_too(write: Write, panjue: Panjue, tmp_path: Path) -> None:
    cases = examples(100)
    write_training(tmp_path / "run/adapter", classifier_of(SEVERITY, cases), task="severity")
    SEVERITY.ask.labels(cases).save(tmp_path / "run/adapter")
    test = write("test.jsonl", [{"id": "x", "fact": "某日在村口偷"}])
    answers = tmp_path / "run/answers/test"
    SEVERITY.ask.labels(cases).save(answers)
    made = {"trained": str(tmp_path / "run/adapter")}
    write_answers(answers, test, task="severity", asked=False, **made)
    decoded(answers, "classifier")
    said = panjue("explain", tmp_path / "run", "x")
    assert said.returncode == 0, said.stderr
    by = "\n\nclass: 一年以下\n  answered by the text classifier (confidence 1.00); "
    assert f"{by}the model was not asked\n" in said.stdout
    assert re.search(r"words against +\[every case\] -\d", said.stdout)
    assert re.search(r"words for +.*偷 \+\d", said.stdout)
    assert re.search(r"sentences for +\+\d\.\d\d 某日在村口偷\n", said.stdout)
    refused = panjue("explain", tmp_path / "run", "x", "--person", "赵甲")
    assert "its answer is about no persons; leave --person out" in refused.stderr


def test_a_task_without_labels_has_nothing_to_explain(
    write: Write, panjue: Panjue, tmp_path: Path
) -> None:
    rows = [row for _, row in read_lines(sample("cloze"))]
    test = write("test.jsonl", rows[:1])
    [example] = Reader(load_task("cloze")).read(test)
    write_answers(tmp_path / "run", test, task="cloze")
    Labels().save(tmp_path / "run")
    task = load_task("cloze")
    submission = task.data.submission
    answer = task.ask.decode("", example, Labels()).answer
    with submission.writing(tmp_path / "run" / submission.name) as put:
        put(task.data.write(example, answer))
    (tmp_path / "run/completions.jsonl").touch()
    said = panjue("explain", tmp_path / "run", example.id)
    assert said.returncode == 0, said.stderr
    reason = "the task cloze has no labels that a text classifier knows"
    assert f"nothing to explain: {reason}" in said.stdout
    assert "answered by the model" in said.stdout


def sample(task: str) -> Path:
    return Path(__file__).parents[2] / "prompts/tasks" / task / "sample.jsonl"


def test_it_starts_without_torch(run: Path) -> None:
    code = (
        "import sys; from panjue.prompts.cli import app; sys.argv[1:] = sys.argv[1:]\n"
        "try: app()\nexcept SystemExit: pass\n"
        "print([name for name in ('torch', 'transformers', 'vllm') if name in sys.modules])"
    )
    words = [sys.executable, "-c", code, "explain", str(run), "1"]
    said = subprocess.check_output(words, text=True)
    assert "words for" in said
    assert said.splitlines()[-1] == "[]"
