"""Several runs vote: the majority counts for each field, and in a tie the better run."""

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from panjue.eval.score import score
from panjue.eval.vote import elected, vote
from panjue.prompts.cli_scores import answers_of_voter
from panjue.prompts.fingerprint import model_sha256
from panjue.prompts.labels import Labels, collect, load_labels, merged_labels
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump, read_json, read_lines, sha256, write_json
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task, task_folders
from panjue.serve.answers import open_answers
from tests.opened import decoded
from tests.records import TRAINED, Row, Write, believing, write_answers, write_training

TASK = load_task("judgment")
Panjue = Callable[..., CompletedProcess[str]]
THEFT = (["盗窃罪"], ["264"], 13)
FRAUD = (["诈骗罪"], ["266"], 8)
ROBBERY = (["抢劫罪"], ["263"], 5)
BOTH = (["盗窃罪", "诈骗罪"], ["264", "266"], 11)
BOTH_TURNED = (["诈骗罪", "盗窃罪"], ["266", "264"], 11)

Judged = tuple[list[str], list[str], int]


@pytest.fixture
def test(case: Row, write: Write) -> Path:
    return write("test.jsonl", [case(i, ("甲", *THEFT), ("乙", *FRAUD)) for i in range(3)])


@pytest.fixture
def run(row: Row, write: Write, test: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return what makes a run that answers this of 甲 in every case, and 乙 always right."""

    def made(name: str, judged: Judged, held_out: Sequence[float] = ()) -> Path:
        folder = tmp_path / name / "answers/test"
        known = {"charges": [f"{name}罪", "盗窃罪"], "articles": ["264"], "penalty": ["死刑"]}
        collect([known]).save(folder)
        of_labels = {"labels_sha256": sha256(folder / "labels.json")}
        write_answers(folder, test, **of_labels)
        rows = [row(i, ("甲", *judged), ("乙", *FRAUD)) for i in range(3)]
        submission = write(str(folder / "submission.jsonl"), rows)
        by_field = dict.fromkeys(TASK.answer.fields, "model")
        decoding = {"submission_sha256": sha256(submission), "by_field": by_field, "calls": 3}
        write_json(folder / "decode.json", decoding)
        if held_out:
            fields = {}
            for field, score in zip(TASK.answer.fields, held_out, strict=True):
                metric = TASK.score.metric_of(field)
                scores = {"model": score, "classifier": 0.99, "low": -1, "high": 1}
                fields[field] = {"answered_by": "model", "metric": metric, **scores}
            adapter = folder.parents[1] / "adapter"
            write_training(adapter, believing(TASK, {}))
            of_labels |= {"trained": str(adapter), "trained_sha256": model_sha256(adapter)}
            write_answers(folder, test, **of_labels)
            beside = folder.with_name("held-out")
            write_answers(beside, test, held_out=True, **of_labels)
            write_json(beside / "choice.json", {"cases": 9, "counted": 9, "fields": fields})
        return folder.parents[1]

    return made


def answers_to(folder: Path) -> list[Judged]:
    """Return what a folder answers of 甲."""
    rows = [row for _, row in read_lines(folder / "submission.jsonl")]
    of_person = [row["judgments"][0] for row in rows]
    return [(one["charges"], one["articles"], one["penalty"]) for one in of_person]


def voted(test: Path, out: Path, runs: Sequence[Path]) -> list[str]:
    return list(vote([answers_of_voter(run, test) for run in runs], out))


values = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=7)


@given(values, st.randoms())
def test_most_votes_win_whatever_their_order(cast: list[str], random: Any) -> None:
    tied = {"field": 0}
    value = elected(cast, "field", tied)
    most = max(map(cast.count, cast))
    assert cast.count(value) == most
    assert bool(tied["field"]) == (len({one for one in cast if cast.count(one) == most}) > 1)
    if not tied["field"]:
        random.shuffle(cast)
        assert elected(cast, "field", tied) == value


def test_the_order_of_a_label_set_plays_no_part() -> None:
    tied = {"field": 0}
    assert elected([["c"], ["a", "b"], ["b", "a"]], "field", tied) == ["a", "b"]
    assert not tied["field"]


def test_each_field_is_voted_on_alone(run: Callable[..., Path], test: Path, tmp_path: Path) -> None:
    mixed = (["盗窃罪"], ["266"], 5)
    runs = [run("a", THEFT), run("b", FRAUD), run("c", mixed), run("d", BOTH), run("e", ROBBERY)]
    lines = voted(test, tmp_path / "out", runs)
    assert answers_to(tmp_path / "out") == [(["盗窃罪"], ["266"], 5)] * 3
    assert "charges 0" in lines[0]


def test_in_a_tie_the_run_named_first_counts(
    run: Callable[..., Path], test: Path, tmp_path: Path
) -> None:
    runs = [run("a", THEFT), run("b", FRAUD), run("c", ROBBERY)]
    for first in range(3):
        order = runs[first:] + runs[:first]
        ties, _ = voted(test, tmp_path / "out", order)[-2:]
        assert ties.startswith(f"ties, in which {'abc'[first]}/test counts: charges 3, ")
        assert answers_to(tmp_path / "out")[0] == (THEFT, FRAUD, ROBBERY)[first]


def test_two_runs_of_one_mind_win(run: Callable[..., Path], test: Path, tmp_path: Path) -> None:
    voted(test, tmp_path / "out", [run("c", FRAUD), run("a", BOTH), run("b", BOTH_TURNED)])
    assert answers_to(tmp_path / "out")[0] == BOTH, "as the first of them writes it"


def test_a_run_and_its_vote_may_move_together(
    run: Callable[..., Path], test: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [run("a", THEFT), run("b", FRAUD)]
    monkeypatch.chdir(tmp_path)
    voted(test, Path("out"), [one.relative_to(tmp_path) for one in runs])
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("a", "b", "out"):
        (tmp_path / name).rename(moved / name)
    monkeypatch.chdir("/")
    assert not open_answers(moved / "out", test).changed


def test_the_folder_is_read_as_other_answers_are(
    run: Callable[..., Path], test: Path, tmp_path: Path, panjue: Panjue
) -> None:
    out = tmp_path / "runs/vote"
    runs = [run("a", THEFT), run("b", THEFT), run("c", FRAUD)]
    done = panjue("vote", test, out, *runs)
    assert done.returncode == 0, done.stderr
    *_, written, step = done.stdout.splitlines()
    assert written == f"written: {out}/submission.jsonl"
    assert step == f"next: panjue check {out} --cases {test}"
    panjue("score", test, out, "--json", out / "scores.json")
    assert read_json(out / "scores.json")["final"] == 1
    assert panjue("score", test, out).stdout.endswith("\nvote of 3: a/test, b/test, c/test\n")
    checked = panjue("check", out, "--cases", test).stdout
    assert "诈骗罪" in checked, "no training knows it"
    assert "盗窃罪" not in checked
    assert "vote against a/test: 0 examples won, 0 lost" in panjue("compare", runs[0], out).stdout
    assert panjue("fairness", test, out, "--by", "defendants").returncode == 0
    assert panjue("report", out).returncode == 0
    page = (out / "report.html").read_text("utf-8")
    assert "3 runs voted on the answers." in page
    assert "text classifier answered" not in page
    with pytest.raises(UserError, match="is a vote, which has no replies; `panjue vote` makes it"):
        decoded(out)
    assert panjue("bundle", out, tmp_path / "out.zip").returncode == 2
    first = (out / "submission.jsonl").read_bytes()
    done = panjue("vote", test, out, *runs)
    assert "replaced" not in done.stdout
    assert (out / "scores.json").exists(), "the same vote"
    done = panjue("vote", test, out, runs[0], runs[2])
    assert (out / "submission.jsonl").read_bytes() == first, "the first of two that differ"
    told = "replaced: was vote of 3: a/test, b/test, c/test; deleted scores.json, report.html"
    assert told in done.stdout, "equal answers of others"


def test_what_training_saw_is_said_of_a_vote_too(
    run: Callable[..., Path], test: Path, tmp_path: Path, panjue: Panjue
) -> None:
    runs = [run("a", THEFT), run("b", THEFT)]
    adapter = runs[1] / "adapter"
    write_json(adapter / "manifest.json", {**TRAINED, "train_sha256": sha256(test)})
    write_json(adapter / "labels.json", {})
    path = runs[1] / "answers/test/manifest.json"
    write_json(path, {**read_json(path), "trained": str(adapter)})
    panjue("vote", test, tmp_path / "out", *runs)
    assert "these cases were trained on" in panjue("score", test, tmp_path / "out").stdout
    shutil.rmtree(runs[1])
    assert panjue("score", test, tmp_path / "out").returncode == 0, (
        "the vote needs no runs any more"
    )


def test_labels_that_any_training_knows_are_known(
    run: Callable[..., Path], test: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    voted(test, out, [run("a", THEFT), run("b", THEFT)])
    labels = load_labels(out / "labels.json")
    assert dict(labels.counts["charges"]) == {"盗窃罪": 2, "a罪": 1, "b罪": 1}
    assert labels.most == {"charges": 2, "articles": 1, "penalty": 1}
    assert dict(labels.pairs["盗窃罪"]) == {"264": 2}
    assert merged_labels([labels, labels]) == labels
    assert open_answers(out).changed == ""
    Labels().save(out)
    assert "labels.json was changed" in open_answers(out).changed


def refused(match: str, *words: Any) -> None:
    with pytest.raises(UserError, match=match):
        voted(*words)


def test_what_cannot_vote_is_one_line(
    run: Callable[..., Path], test: Path, tmp_path: Path, case: Row, write: Write
) -> None:
    a, b = run("a", THEFT), run("b", FRAUD)
    out = tmp_path / "out"
    refused("give two runs or more, each once, after OUT$", test, out, [a])
    refused("has no answers to", test, out, [a, tmp_path / "nowhere"])
    refused("give two runs or more, each once", test, out, [a, b, a / "answers/test"])
    refused(
        "a/answers/test: is no earlier vote, so it is kept; OUT comes second$",
        test,
        a / "answers/test",
        [b, run("c", THEFT)],
    )
    other = write("other.jsonl", [case(i, ("甲", *THEFT), ("乙", *FRAUD)) for i in range(2)])
    told = re.escape(f"{a}: has no answers to {other}; make them: panjue generate {a} {other}")
    refused(f"^{told}$", other, out, [a, b])
    voted(test, out, [a, b])
    refused("out: votes itself; OUT is a folder of its own$", test, out, [a, out])
    assert not (tmp_path / "free").exists()
    foreign = write("free/submission.jsonl", [{"mine": 1}])
    refused("was not made by panjue", test, foreign.parent, [a, b])
    submission = b / "answers/test/submission.jsonl"
    rows = submission.read_text("utf-8").splitlines(keepends=True)
    submission.write_text("".join(rows).replace("甲", "丙"), "utf-8")
    refused("was changed since it was decoded", test, out, [a, b])
    rewrite_decoding(submission)
    refused("id 0: is not in the hand-in format", test, out, [a, b])
    submission.write_text("".join(rows[:2]), "utf-8")
    refused("1 examples have no row there", test, out, [a, b])
    path = b / "answers/test/manifest.json"
    write_json(path, {**read_json(path), "task": "severity"})
    refused("has no answers of the task to", test, out, [a, b])


def rewrite_decoding(submission: Path) -> None:
    """Have a submission been decoded as it is now."""
    path = submission.with_name("decode.json")
    write_json(path, {**read_json(path), "submission_sha256": sha256(submission)})


class Killed(BaseException):
    """Ends a vote as SIGKILL does."""


def write_once(path: Path, value: Any) -> None:
    """Write that a vote is unfinished, and end it when it is finished."""
    if "unfinished" not in value:
        raise Killed
    write_json(path, value)


def test_a_vote_that_was_killed_is_not_scored_and_made_again(
    run: Callable[..., Path], test: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [run("a", THEFT), run("b", THEFT)]
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("panjue.eval.vote.write_json", write_once)
        with pytest.raises(Killed):
            voted(test, out, runs)
    assert read_json(out / "decode.json")["unfinished"]
    with pytest.raises(UserError, match="stopped before the end"):
        score(Reader(TASK), test, out, open_answers(out))
    voted(test, out, runs)
    assert "unfinished" not in read_json(out / "decode.json")
    assert answers_to(out) == [THEFT] * 3


def test_a_training_is_not_replaced_by_a_vote(
    run: Callable[..., Path], test: Path, tmp_path: Path
) -> None:
    runs = [run("a", THEFT), run("b", FRAUD)]
    write_json(tmp_path / "trained/manifest.json", TRAINED)
    refused("is no earlier vote, so it is kept", test, tmp_path / "trained", runs)
    assert [*(tmp_path / "trained").iterdir()] == [tmp_path / "trained/manifest.json"]


@pytest.mark.parametrize("name", [name for name in task_folders() if name != "judgment"])
def test_every_task_votes(name: str, tmp_path: Path, panjue: Panjue) -> None:
    """Two have all right, the third is empty: right wins."""
    [sample] = task_folders()[name].glob("sample.*")
    task = load_task(name)
    examples = list(Reader(task).read(sample))
    labels = task.ask.labels(examples)
    runs = []
    for number in range(3):
        folder = tmp_path / f"{number}/answers/sample"
        labels.save(folder)
        write_answers(folder, sample, task=name)
        replies = []
        with task.data.submission.writing(folder / task.data.submission.name) as write:
            for example in examples:
                answer = example.answer
                if number == 0 or answer is None:
                    answer = task.ask.decode("", example, labels).answer
                write(task.data.write(example, answer))
                reply = task.ask.target(example) if number else ""
                rest = {"finish": ["stop"], "dropped_sentences": 0}
                replies.append({"id": example.id, "texts": [reply], **rest})
        with (folder / "completions.jsonl").open("w", encoding="utf-8") as out:
            out.writelines(f"{dump(row)}\n" for row in replies)
        runs.append(folder)
    done = panjue("vote", sample, tmp_path / "out", *runs)
    if task.ranking:
        assert "ranks lists, which cannot be voted on" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    submission = task.data.submission.name
    assert sha256(tmp_path / "out" / submission) == sha256(runs[1] / submission)
    assert panjue("score", sample, tmp_path / "out").returncode == 0


def test_a_vote_says_when_what_voted_is_gone_or_another(
    run: Callable[..., Path], test: Path, tmp_path: Path
) -> None:
    one, other = run("one", THEFT), run("other", FRAUD)
    out = tmp_path / "out"
    voted(test, out, [one, other])
    assert not open_answers(out).changed
    submission = other / "answers/test/submission.jsonl"
    submission.write_bytes(submission.read_bytes() + b"\n")
    assert f"{submission}, which voted, is missing, or was changed" in open_answers(out).changed
