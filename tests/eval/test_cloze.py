"""The cloze score and the votes that make a ranked list."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from panjue.eval.cloze import f1, token_f1, tokens
from panjue.eval.rank import ranked
from panjue.eval.score import score
from panjue.prompts.files import dump
from panjue.prompts.labels import Labels
from panjue.prompts.task import Example, load_task

TASK = load_task("cloze")
LABELS = Labels({"answers": {"france": 5, "japan": 3, "italy": 2, "spain": 2, "peru": 1}})
EXAMPLE = Example("q", "born in [MASK].")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("columbia university", 1.0), ("ucla", 0.0), ("Columbia city", 0.5)],
)
def test_the_organisers_example(answer: str, expected: float) -> None:
    assert token_f1("columbia university", answer) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  United States, of America!", ["united", "states", "of", "america"]),
        ("a-b", ["ab"]),  # the mark is deleted, not replaced, and the article is gone into it
        ("an apple a day", ["apple", "day"]),
        ("theatre", ["theatre"]),
        ("“the”", ["“", "”"]),  # only ASCII marks are deleted
        ("the", []),
    ],
)
def test_tokens(text: str, expected: list[str]) -> None:
    assert tokens(text) == expected


@given(st.text(), st.text())
def test_token_f1_is_symmetric_and_bounded(one: str, other: str) -> None:
    assert 0 <= token_f1(one, other) <= 1
    assert token_f1(one, other) == token_f1(other, one)
    assert token_f1(one, one) == 1


def test_the_best_pair_counts() -> None:
    gold = {"references": (("new york city", "big apple"),)}
    assert f1(gold, {"ret": ["boston", "new york"]}) == pytest.approx(2 * 2 / 5)
    assert f1(gold, {"ret": ["boston", "new york", "the Big Apple"]}) == 1
    assert f1(gold, {"ret": []}) == f1(gold, None) == 0


@pytest.mark.parametrize("ret", ["peru", {"peru": 1}, None, ["peru"] * 6, [3]])
def test_what_no_contest_would_take_is_not_scored(ret: object) -> None:
    with pytest.raises((TypeError, AttributeError)):
        f1({"references": (("peru",),)}, {"ret": ret})


def test_filled_places_are_counted() -> None:
    assert ranked(TASK, EXAMPLE, [reply("cuba", "peru")], LABELS)[1] == 3
    assert ranked(TASK, EXAMPLE, [""], LABELS)[1] == 5
    assert ranked(TASK, EXAMPLE, [reply(*"abcde"), reply("f")], LABELS)[1] == 0


def reply(*answers: str) -> str:
    return dump({"answers": answers})


def answers(*replies: str, labels: Labels = LABELS) -> list[str]:
    found: list[str] = ranked(TASK, EXAMPLE, replies, labels)[0]["answers"]
    return found


def test_votes_by_hand() -> None:
    """Peru 1 + 1/2, chile 1, cuba 1/2 + 1/3, france 1/3: the rest are the commonest."""
    replies = reply("peru", "cuba", "france"), reply("chile", "peru", "cuba")
    assert answers(*replies) == ["peru", "chile", "cuba", "france", "japan"]


@given(st.lists(st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=5, unique=True)))
def test_a_ranked_list_is_full_and_names_nobody_twice(lists: list[list[str]]) -> None:
    found = answers(*(reply(*listed) for listed in lists))
    assert len(found) == len(set(found)) == 5
    if len(lists) == 1:
        assert found[: len(lists[0])] == lists[0], "one reply keeps its order"


def test_unreadable_replies_have_no_vote() -> None:
    commonest = ["france", "japan", "italy", "spain", "peru"]
    assert answers("", "") == answers() == commonest
    assert answers("", reply("cuba")) == ["cuba", *commonest[:4]]


def test_groups_and_the_fallback(tmp_path: Path) -> None:
    rows = [
        {"qid": "1", "query": "[MASK]", "answer": ["peru"], "domain": "Facts"},
        {"qid": "2", "query": "a [MASK]", "answer": ["cuba"], "NeedReasoning": True},
    ]
    gold = tmp_path / "gold.jsonl"
    gold.write_text("".join(dump(row) + "\n" for row in rows), "utf-8")
    LABELS.save(tmp_path)
    (tmp_path / "submission.csv").write_text('id,ret\n1,"[""chile""]"\n2,"[""cuba""]"\n', "utf-8")
    found = score(TASK, gold, tmp_path).to_json()
    assert (found["f1"], found["peers"]) == (0.5, {"commonest answers": {"f1": 0.5}})
    assert found["groups"]["domain"]["Facts"]["f1"] == 0
    assert found["groups"]["NeedReasoning"]["True"]["f1"] == 1
    assert found["unknown_gold_labels"] is None, "its answers are no closed set"


def test_the_commonest_real_answers_as_measured_before(shared: Path, tmp_path: Path) -> None:
    labels = TASK.labels(TASK.read(shared / "kct/train.jsonl"))
    labels.save(tmp_path)
    with TASK.handin.writing(tmp_path / "submission.csv") as write:
        for example in TASK.read(shared / "kct/dev.jsonl"):
            assert example.answer is not None
            write(TASK.submission(example, example.answer))
    found = score(TASK, shared / "kct/dev.jsonl", tmp_path).to_json()
    assert found["f1"] == 1
    assert found["peers"]["commonest answers"]["f1"] == pytest.approx(0.186, abs=5e-4)
