from itertools import chain, combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from panjue.eval.beliefs import Belief, Estimator, LabelIndex, walk
from panjue.eval.decide import Decider, best_set, decider_of
from panjue.prompts.example import Example
from panjue.prompts.labels import Labels, collect
from panjue.prompts.plumbing.files import dump
from panjue.prompts.task import load_task
from panjue.prompts.tasks.judgment.repair import PENALTIES

TASK = load_task("judgment")


def beliefs_over(labels: str) -> st.SearchStrategy[Belief]:
    sets = st.frozensets(st.sampled_from(labels), max_size=3)
    return st.dictionaries(sets, st.floats(0.05, 1), min_size=1, max_size=5).map(
        lambda weights: {labels: w / sum(weights.values()) for labels, w in weights.items()}
    )


def all_sets(labels: str, most: int, least: int = 1) -> list[frozenset[str]]:
    sizes = (combinations(labels, size) for size in range(least, most + 1))
    return [frozenset(picked) for picked in chain.from_iterable(sizes)]


def expected_f1(chosen: frozenset[str], belief: Belief) -> float:
    """Return the expected F1 of `chosen` if the gold set is distributed as `belief`.

    F1 is 1 if both sets are empty.
    """
    if not chosen:
        return belief.get(chosen, 0.0)
    return sum(
        mass * 2 * len(chosen & gold) / (len(chosen) + len(gold)) for gold, mass in belief.items()
    )


@given(beliefs_over("abcdef"), st.integers(1, 6))
def test_the_best_set_is_the_best_of_all_sets(belief: Belief, most: int) -> None:
    chosen = best_set(belief, most)
    best = max(expected_f1(candidate, belief) for candidate in all_sets("abcdef", most, least=0))
    assert len(chosen) <= most
    assert expected_f1(chosen, belief) == pytest.approx(best)


def test_of_two_equally_good_sets_the_smaller_is_chosen() -> None:
    # Gold is {a} or {a, b} with even odds. {a}: (1 + 2/3) / 2; {a, b}: (2/3 + 1) / 2; {b}: 1/3.
    assert best_set({frozenset("a"): 0.5, frozenset("ab"): 0.5}, 2) == {"a"}


WRITTEN = LabelIndex({"1": 10, "10": 60, "13": 30, "8": 40})
CHARGES = LabelIndex({"盗窃罪": 60, "盗伐林木罪": 20, "诈骗罪": 20})


def test_a_digit_that_was_not_taken_shares_its_mass_among_the_classes_it_begins() -> None:
    # Taken: 8, at 0.6. The other way, 1, is 1, 10 or 13: 10 + 60 + 30 of training's hundred.
    belief = walk('{"p":"8"}', [(6, [("8", 0.6), ("1", 0.4)])], [(5, 8)], WRITTEN)
    wanted = {"8": 0.6, "1": 0.04, "10": 0.24, "13": 0.12}
    assert belief == pytest.approx({frozenset([k]): p for k, p in wanted.items()})


def test_two_digits_are_two_forks() -> None:
    alternatives = [(6, [("1", 0.5), ("8", 0.5)]), (7, [("3", 0.6), ("0", 0.3), ('"}', 0.1)])]
    belief = walk('{"p":"13"}', alternatives, [(5, 9)], WRITTEN)
    wanted = {"8": 0.5, "13": 0.3, "10": 0.15, "1": 0.05}
    assert belief == pytest.approx({frozenset([k]): p for k, p in wanted.items()})


def test_forks_of_the_last_label_count_and_earlier_ones_are_left_to_the_samples() -> None:
    text = '{"c":["盗窃罪","诈骗罪"]}'
    # `"盗窃` over `"诈`; then `","` over `"]`; then `诈骗` over `盗`, which is shared 60 to 20.
    alternatives = [
        (6, [('"盗窃', 0.8), ('"诈', 0.2)]),
        (10, [('","', 0.5), ('"]', 0.5)]),
        (13, [("诈骗", 0.75), ("盗", 0.25)]),
    ]
    belief = walk(text, alternatives, [(6, 11), (12, 17)], CHARGES)
    theft, fraud, timber = "盗窃罪", "诈骗罪", "盗伐林木罪"
    wanted = {
        frozenset([theft, fraud]): 0.75,
        frozenset([theft]): 0.25 * 60 / 80,
        frozenset([theft, timber]): 0.25 * 20 / 80,
    }
    assert belief == pytest.approx(wanted)


@given(st.floats(0.1, 0.9))
def test_how_often_a_list_goes_on_is_believed_as_the_model_has_it(more: float) -> None:
    # The list is A, and B behind it with probability `more`; a fork lies behind A.
    short, long = '{"c":["盗窃罪"]}', '{"c":["盗窃罪","诈骗罪"]}'
    ends = [(10, [('"]', 1 - more), ('","', more)])], [(10, [('","', more), ('"]', 1 - more)])]
    one = walk(short, ends[0], [(6, 11)], CHARGES)
    two = walk(long, ends[1], [(6, 11), (12, 17)], CHARGES)
    both = frozenset(["盗窃罪", "诈骗罪"])
    mean = (1 - more) * one.get(both, 0.0) + more * two[both]
    assert mean == pytest.approx(more)


@given(st.floats(0.05, 0.95))
def test_one_label_is_believed_as_the_model_has_it_whichever_was_sampled(chance: float) -> None:
    ways = [("8", chance), ("13", 1 - chance)]
    eight = walk('{"p":"8"}', [(6, ways)], [(5, 8)], WRITTEN)
    other = walk('{"p":"13"}', [(6, ways[::-1])], [(5, 9)], WRITTEN)
    assert eight == pytest.approx(other)
    assert eight[frozenset(["8"])] == pytest.approx(chance)


LABELS = collect(
    [
        *[{"charges": ["盗窃罪"], "articles": ["264"], "penalty": [PENALTIES[13]]}] * 6,
        *[{"charges": ["诈骗罪"], "articles": ["266"], "penalty": [PENALTIES[8]]}] * 4,
    ]
)
CASE = Example(id=1, text="甲。", names=("甲",))


def reply(charge: str, article: str, penalty: int) -> str:
    judgment = {
        "name": "甲",
        "charges": [charge],
        "articles": [article],
        "penalty": PENALTIES[penalty],
    }
    return dump({"judgments": [judgment]})


def test_samples_outvote_the_first_reply_and_say_how_surely() -> None:
    texts = [reply("盗窃罪", "264", 13), *[reply("诈骗罪", "266", 8)] * 3]
    decision = Decider(TASK, LABELS).decide(CASE, {"texts": texts})
    [judgment] = decision.answer["judgments"]
    assert judgment == {
        "name": "甲",
        "charges": ["诈骗罪"],
        "articles": ["266"],
        "penalty": PENALTIES[8],
    }
    assert decision.confidence == [{"charges": 0.75, "articles": 0.75, "penalty": 0.75}]


def test_one_greedy_reply_with_forks_is_enough_to_decide_from() -> None:
    text = reply("盗窃罪", "264", 13)
    place = text.index("六个月")
    alternatives = [[[place, [["六个月", 0.4], ["三年", 0.6]]]]]
    decision = Decider(TASK, LABELS).decide(CASE, {"texts": [text], "alternatives": alternatives})
    assert decision.answer["judgments"][0]["penalty"] == PENALTIES[8]
    assert decision.confidence[0]["penalty"] == pytest.approx(0.6)


@st.composite
def replies_with_forks(draw: st.DrawFn) -> tuple[str, list[Any]]:
    valid = st.builds(
        reply, st.sampled_from(["盗窃罪", "抢劫罪"]), st.just("264"), st.integers(0, 14)
    )
    text = draw(st.text(max_size=40) | valid)
    way = st.tuples(st.text(min_size=1, max_size=3) | st.just('"]'), st.floats(1e-4, 1))
    fork = st.tuples(st.integers(0, len(text)), st.lists(way, min_size=1, max_size=3))
    return text, sorted(draw(st.lists(fork, max_size=4)))


@given(st.lists(replies_with_forks(), min_size=1, max_size=4))
def test_any_replies_and_forks_at_all_are_decided(replies: list[tuple[str, list[Any]]]) -> None:
    row = {
        "texts": [text for text, _ in replies],
        "alternatives": [alternatives for _, alternatives in replies],
    }
    decision = Decider(TASK, LABELS).decide(CASE, row)
    [judgment] = decision.answer["judgments"]
    assert judgment["charges"]
    assert judgment["articles"]
    for item in Estimator(TASK, LABELS).beliefs(CASE, row) or ():
        assert [sum(belief.values()) for belief in item.values()] == pytest.approx([1, 1, 1])


@pytest.mark.parametrize(
    ("name", "field", "replies", "decided", "confidence"),
    [
        ("severity", "label", ["十年以上", "一年以下", "一年以下"], "一年以下", 2 / 3),
        ("ecthr", "labels", [["Article 3"], [], []], [], 2 / 3),
        ("ecthr", "labels", [["Article 3"], ["Article 3", "Article 6"]], ["Article 3"], 1 / 2),
    ],
)
def test_a_class_and_a_set_of_classes_are_decided(
    name: str, field: str, replies: list[Any], decided: Any, confidence: float
) -> None:
    task = load_task(name)
    example = Example(id=1, text="Text.")
    gold = [Example(id=i, text="Text.", answer={field: value}) for i, value in enumerate(replies)]
    decider = decider_of(task, task.ask.labels(gold), None)
    assert decider
    row = {"texts": [dump({field: value}) for value in replies]}
    decision = decider.decide(example, row)
    assert decision.answer == {field: decided}
    assert decision.confidence == [{field: pytest.approx(confidence)}]
    assert task.data.write(example, decision.answer)["id"] == 1


def test_an_alternative_token_of_a_class_counts() -> None:
    task, text = load_task("severity"), dump({"label": "十年以上"})
    row = {"texts": [text], "alternatives": [[[text.index("十"), [["十", 0.4], ["五", 0.6]]]]]}
    words = ["十年以上", "五年以上十年以下"]
    gold = [Example(id=i, text="甲。", answer={"label": word}) for i, word in enumerate(words)]
    decider = Decider(task, task.ask.labels(gold))
    assert decider.decide(CASE, row).answer == {"label": "五年以上十年以下"}


def test_the_name_of_the_empty_set_is_no_label() -> None:
    ecthr = load_task("ecthr")
    gold = [
        Example(id=i, text="T.", answer={"labels": v}) for i, v in enumerate(([], ["Article 3"]))
    ]
    text = dump({"labels": ["Article 3"]})
    place = text.index("Article")
    row = {"texts": [text], "alternatives": [[[place, [["Article", 0.4], ["none", 0.6]]]]]}
    labels = ecthr.ask.labels(gold)
    assert labels.counts["label"]["none"] == 1
    assert Decider(ecthr, labels).decide(CASE, row).answer == {"labels": ["Article 3"]}


def test_an_empty_labels_file_decides_nothing_but_does_not_fail() -> None:
    labels = Labels(
        {"charges": {}, "articles": {}, "penalty": {}}, {"charges": 1, "articles": 1}, {}
    )
    decision = Decider(TASK, labels).decide(CASE, {"texts": [reply("盗窃罪", "264", 13)]})
    assert decision.answer["judgments"][0]["name"] == "甲"
