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
from panjue.prompts.labels import Labels, collect, load_labels, merged_labels
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump, read_json, read_lines, sha256, write_json
from panjue.prompts.plumbing.run import Choice, FieldChoice
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task, task_folders
from panjue.serve.answers import open_answers
from panjue.serve.decoding import decode_answers
from tests.records import TRAINED, Row, Write, write_answers

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
                ends = {"low": -1, "high": 1, "classifier": 0.99}
                metric = TASK.score.metric_of(field)
                fields[field] = FieldChoice(answered_by="model", metric=metric, model=score, **ends)
            choice = Choice(cases=9, counted=9, fields=fields, calibration={})
            beside = folder.with_name("held-out")
            write_answers(beside, test, held_out=True, **of_labels)
            write_json(beside / "choice.json", choice.model_dump(mode="json"))
        return folder.parents[1]

    return made


def answers_to(folder: Path) -> list[Judged]:
    """Return what a folder answers of 甲."""
    rows = [row for _, row in read_lines(folder / "submission.jsonl")]
    of_person = [row["judgments"][0] for row in rows]
    return [(one["charges"], one["articles"], one["penalty"]) for one in of_person]


values = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=7)


@given(values, st.randoms())
def test_most_votes_win_whatever_their_order(cast: list[str], random: Any) -> None:
    value, how = elected(cast)
    most = max(map(cast.count, cast))
    assert cast.count(value) == most
    assert (how == "tied") == (len({one for one in cast if cast.count(one) == most}) > 1)
    assert (how == "alike") == (len(set(cast)) == 1)
    if how != "tied":
        random.shuffle(cast)
        assert elected(cast) == (value, how)


def test_the_order_of_a_label_set_plays_no_part() -> None:
    assert elected([["c"], ["a", "b"], ["b", "a"]]) == (["a", "b"], "by most votes")


def test_each_field_is_voted_on_alone(run: Callable[..., Path], test: Path, tmp_path: Path) -> None:
    mixed = (["盗窃罪"], ["266"], 5)
    runs = [run("a", THEFT), run("b", FRAUD), run("c", mixed), run("d", BOTH), run("e", ROBBERY)]
    found = vote(test, tmp_path / "out", runs)
    assert answers_to(tmp_path / "out") == [(["盗窃罪"], ["266"], 5)] * 3
    assert dict(found.counts["charges"]) == {"alike": 3, "by most votes": 3, "tied": 0}


def test_in_a_tie_the_run_that_is_better_at_the_field_counts(
    run: Callable[..., Path], test: Path, tmp_path: Path
) -> None:
    runs = [
        run("a", THEFT, (0.5, 0.6, 0.1)),
        run("b", FRAUD, (0.7, 0.5, 0.2)),
        run("c", ROBBERY, (0.6, 0.5, 0.3)),
    ]
    for order in (runs, runs[::-1]):
        found = vote(test, tmp_path / "out", order)
        assert answers_to(tmp_path / "out")[0] == (["诈骗罪"], ["264"], 5), "whatever the order"
    assert next(found.lines()) == (
        "  charges: 3 alike, 0 by most votes, 3 tied (the better run counts: b/test, 0.7000)"
    )
    runs.append(run("d", BOTH))  # nobody knows how good it is
    found = vote(test, tmp_path / "out", [runs[2], *runs[:2], runs[3]])
    assert answers_to(tmp_path / "out")[0] == ROBBERY
    assert next(found.lines()).endswith(
        "3 tied (the run named first counts: not all have held-out scores of charges)"
    )


def test_two_runs_of_one_mind_against_a_better_one_win(
    run: Callable[..., Path], test: Path, tmp_path: Path
) -> None:
    runs = [run("a", BOTH, (0.1,) * 3), run("b", BOTH_TURNED, (0.2,) * 3)]
    vote(test, tmp_path / "out", [*runs, run("c", FRAUD, (0.9,) * 3)])
    assert answers_to(tmp_path / "out")[0] == BOTH_TURNED, "as the better one writes it"


def test_the_classifier_counts_by_its_own_score_where_it_answered(
    run: Callable[..., Path], test: Path, tmp_path: Path
) -> None:
    """Held-out cases gave it 0.99 everywhere."""
    runs = [run("a", THEFT, (0.8,) * 3), run("b", FRAUD, (0.7,) * 3)]
    path = runs[1] / "answers/test/decode.json"
    decoding = read_json(path)
    write_json(path, {**decoding, "by_field": {**decoding["by_field"], "charges": "classifier"}})
    vote(test, tmp_path / "out", runs)
    assert answers_to(tmp_path / "out")[0] == (["诈骗罪"], ["264"], 13)
    write_json(path, {**decoding, "submission_sha256": "of another"})
    found = vote(test, tmp_path / "out", runs)
    assert "run named first" in next(found.lines()), "who answered is not known"


def test_the_folder_is_read_as_other_answers_are(
    run: Callable[..., Path], test: Path, tmp_path: Path, panjue: Panjue
) -> None:
    out = tmp_path / "runs/vote"
    runs = [run("a", THEFT), run("b", THEFT), run("c", FRAUD)]
    done = panjue("vote", test, out, *runs)
    assert done.returncode == 0, done.stderr
    *_, written, step = done.stdout.splitlines()
    assert written == f"written: {out}/submission.jsonl"
    assert step == f"next: panjue score {test} {out}"
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
    assert "The vote of 3 runs." in page
    assert "text classifier answered" not in page
    with pytest.raises(UserError, match="is a vote, which has no replies; `panjue vote` makes it"):
        decode_answers(out)
    assert panjue("bundle", out, tmp_path / "out.zip").returncode == 2
    first = (out / "submission.jsonl").read_bytes()
    done = panjue("vote", test, out, runs[0], runs[2])
    assert f"{out}/submission.jsonl: replaced" not in done.stdout, "the first of two that differ"
    assert (out / "submission.jsonl").read_bytes() == first
    assert (out / "scores.json").exists()
    done = panjue("vote", test, out, runs[2], runs[0])
    assert (
        "replaced: was vote of 2: a/test, c/test; deleted scores.json, report.html" in done.stdout
    )


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
    vote(test, out, [run("a", THEFT), run("b", THEFT)])
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
        vote(*words)


def test_what_cannot_vote_is_one_line(
    run: Callable[..., Path], test: Path, tmp_path: Path, case: Row, write: Write
) -> None:
    a, b = run("a", THEFT), run("b", FRAUD)
    out = tmp_path / "out"
    usage = "panjue vote TEST OUT RUN RUN2$"
    refused("no file .*nothing.jsonl$", tmp_path / "nothing.jsonl", out, [a, b])
    refused(f"a: has answers; the file of cases comes first: {usage}", a, test, [b, b])
    refused(f"give two runs or more, after OUT: {usage}", test, out, [a])
    refused("there is no such folder$", test, out, [a, tmp_path / "nowhere"])
    refused("answers/test: is given 2 times", test, out, [a, b, a / "answers/test"])
    refused(
        f"a/answers/test: is no earlier vote, so it is kept; OUT comes second: {usage}",
        test,
        a / "answers/test",
        [b, run("c", THEFT)],
    )
    other = write("other.jsonl", [case(i, ("甲", *THEFT), ("乙", *FRAUD)) for i in range(2)])
    told = re.escape(f"{a}: has no answers to {other}; make them: panjue generate {a} {other}")
    refused(f"^{told}$", other, out, [a, b])
    vote(test, out, [a, b])
    refused(f"out: votes itself; OUT is a folder of its own: {usage}", test, out, [a, out])
    assert not (tmp_path / "free").exists()
    foreign = write("free/submission.jsonl", [{"mine": 1}])
    refused("was not made by panjue", test, foreign.parent, [a, b])
    rows = (b / "answers/test/submission.jsonl").read_text("utf-8").splitlines(keepends=True)
    (b / "answers/test/submission.jsonl").write_text("".join(rows[:2]), "utf-8")
    refused("1 examples have no row there", test, out, [a, b])
    turned = "".join(rows).replace("甲", "丙")
    (b / "answers/test/submission.jsonl").write_text(turned, "utf-8")
    refused("id 0 is not in the hand-in format", test, out, [a, b])
    path = b / "answers/test/manifest.json"
    write_json(path, {**read_json(path), "task": "severity"})
    (b / "answers/test/submission.jsonl").unlink()
    refused("has no submission.jsonl|must be", test, out, [a, b])


def test_a_vote_that_was_killed_is_not_scored_and_made_again(
    run: Callable[..., Path], test: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [run("a", THEFT), run("b", THEFT)]
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(Labels, "save", None)  # whoever calls it fails
        with pytest.raises(TypeError):
            vote(test, out, runs)
    assert not (out / "labels.json").exists()
    assert read_json(out / "decode.json")["unfinished"]
    with pytest.raises(UserError, match="stopped before the end"):
        score(Reader(TASK), test, out, open_answers(out))
    vote(test, out, runs)
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
    assert done.returncode == 0, done.stderr
    submission = task.data.submission.name
    if task.ranking:  # lists are filled up
        made = task.data.submission.index(tmp_path / "out" / submission)
        for example in examples:
            right = task.gold(example)["references"][0]
            assert (made.get(example.id) or {})["ret"][0] in right
    else:
        assert sha256(tmp_path / "out" / submission) == sha256(runs[1] / submission)
    assert panjue("score", sample, tmp_path / "out").returncode == 0


def test_a_vote_says_when_what_voted_is_gone_or_another(
    run: Callable[..., Path], test: Path, tmp_path: Path
) -> None:
    one, other = run("one", THEFT), run("other", FRAUD)
    out = tmp_path / "out"
    vote(test, out, [one, other])
    assert not open_answers(out).changed
    submission = other / "answers/test/submission.jsonl"
    submission.write_bytes(submission.read_bytes() + b"\n")
    assert f"{submission}, which voted, is missing, or was changed" in open_answers(out).changed
