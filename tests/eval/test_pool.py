"""Beliefs of the model, pooled with those of the text classifier."""

import os
import subprocess
import sys
from collections.abc import Sequence
from math import exp
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_array

from panjue.eval.beliefs import Belief
from panjue.eval.classifier import Classifier, FieldWeights, View, grams
from panjue.eval.decide import Decider
from panjue.eval.pool import Exponents, belief_of, pool_beliefs
from panjue.eval.rule import Rule
from panjue.prompts.example import Example
from panjue.prompts.plumbing.files import dump
from panjue.prompts.task import load_task
from panjue.serve.judge import decide

SEVERITY = load_task("severity")
CASE = Example(id=1, text="甲")
WORDS = ["一年以下", "十年以上"]
LABELS = SEVERITY.ask.labels(
    Example(id=i, text="甲", answer={"label": word}) for i, word in enumerate(WORDS)
)


def field(*, is_set: bool, sizes: Sequence[float] = (0, 1, 1, 1)) -> FieldWeights:
    empty = csr_array((2, 2), dtype=np.float32)
    return FieldWeights(("a", "b"), empty, np.zeros(2, np.float32), 1, 0, is_set, sizes)


def test_a_pool_worked_by_hand() -> None:
    first, second = {"a": 0.5, "b": 0.5}, {"a": 0.8, "b": 0.2}
    # A tenth of the model's belief is spread as the classifier has it: 0.53 and 0.47.
    both = 0.53 * 0.8 + 0.47 * 0.2
    assert pool_beliefs(first, second, (1, 1)) == pytest.approx(
        {"a": 0.424 / both, "b": 0.094 / both}
    )
    root = (0.53 * 0.8) ** 0.5 + (0.47 * 0.2) ** 0.5
    assert pool_beliefs(first, second, (0.5, 0.5))["a"] == pytest.approx((0.53 * 0.8) ** 0.5 / root)


def test_label_sets_of_independent_labels_worked_by_hand() -> None:
    opinion = {"a": 0.5, "b": 0.8}  # odds 1 and 4
    sets = {frozenset("a"): 1 / 9, frozenset("b"): 4 / 9, frozenset("ab"): 4 / 9}
    assert belief_of(field(is_set=True), opinion) == pytest.approx(sets)
    with_none = belief_of(field(is_set=True, sizes=(1, 1, 1, 1)), opinion)
    assert with_none[frozenset()] == pytest.approx(1 / 10)
    # Chances 0.5 of one label and 0.4 of two; training had sets of two half as often as that.
    rare = belief_of(field(is_set=True, sizes=(0, 1, 0.5, 1)), opinion)
    assert rare == pytest.approx(dict(zip(sets, (0.1 / 0.7, 0.4 / 0.7, 0.2 / 0.7), strict=True)))


def test_sets_that_are_left_out_keep_their_probability() -> None:
    opinion = dict.fromkeys("abcdefgh", 0.1)
    belief = belief_of(field(is_set=True, sizes=(1, 1, 1, 1)), opinion)
    # Of eight labels, six form sets of up to three, and one each of four, five and six.
    ways = [1, 6, 15, 20, 1, 1, 1]
    assert len(belief) == sum(ways)
    assert sum(belief.values()) == pytest.approx(
        sum(n * 0.1**k * 0.9 ** (8 - k) for k, n in enumerate(ways))
    )
    assert pool_beliefs({frozenset("a"): 1.0}, {frozenset("a"): 0.5}, (1, 1)) == pytest.approx(
        {frozenset("a"): 0.95 * 0.5 / (0.95 * 0.5 + 0.05 * 0.5)}
    )


def test_every_process_has_the_same_belief_to_the_last_bit() -> None:
    """Texts have other hashes in each process, and a sum of floats depends on its order."""
    code = (
        "from types import SimpleNamespace\n"
        "from panjue.eval.beliefs import marginals\n"
        "from panjue.eval.pool import belief_of\n"
        "field = SimpleNamespace(is_set=True, sizes=(0, 1, 1, 1))\n"
        "opinion = {name: 0.1 + 0.07 * i for i, name in enumerate('abcdefgh')}\n"
        "belief = belief_of(field, opinion, {frozenset('axyz'): 0.3})\n"
        "print([(sorted(labels), mass.hex()) for labels, mass in belief.items()])\n"
        "print(sorted(marginals(belief).items()))\n"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in (1, 2)
    }
    assert len(said) == 1


probabilities = st.floats(1e-6, 1 - 1e-6)
opinions = st.dictionaries(st.sampled_from("abcdefghijkl"), probabilities, min_size=1)
label_sets = st.frozensets(st.sampled_from("abcxyz"), min_size=1, max_size=5)
beliefs = st.dictionaries(label_sets, probabilities, min_size=1, max_size=5).map(
    lambda masses: {s: m / sum(masses.values()) for s, m in masses.items()}
)
powers = st.floats(0.25, 1)


@given(beliefs, opinions, powers, powers)
def test_a_pool_is_a_belief(
    belief: Belief, opinion: dict[str, float], one: float, two: float
) -> None:
    result = pool_beliefs(belief, belief_of(field(is_set=True), opinion, belief), (one, two))
    assert 0 < sum(result.values()) <= 1 + 1e-9
    assert all(0 < mass <= 1 for mass in result.values())


def test_a_reply_that_nobody_believes_is_still_a_value() -> None:
    opinion = {**{f"other {i}": 0.015 for i in range(300)}, "a": 1e-5}
    belief = {frozenset("a"): 1.0}
    second = belief_of(field(is_set=True), opinion, belief)
    assert max(pool_beliefs(belief, second, (1, 1)).values()) < 1e-3
    assert pool_beliefs({"a": 1.0}, {"a": 1e-9, "b": 0.0}, (1, 1))


def classifier(likely: str) -> Classifier:
    """Return a classifier that believes one word, whatever the text."""
    view = View(np.array(sorted(grams("甲"))), np.ones(1, np.float32))
    bias = np.array([5.0 if word == likely else 0.0 for word in WORDS], np.float32)
    weights = csr_array((2, 2), dtype=np.float32)
    label = FieldWeights(tuple(WORDS), weights, bias, 1, 0, is_set=False)
    decides: Any = SEVERITY.answer
    return Classifier(decides, (view, view), {"label": label})


def reply(word: str) -> str:
    return dump({"label": word})


def pooling(**exponents: Exponents) -> Decider:
    """Return a decider whose classifier believes the gravest class."""
    return Decider(SEVERITY, LABELS, Rule(exponents=exponents), classifier("十年以上"))


def test_one_reply_and_the_classifier_are_decided_together() -> None:
    completion = {"texts": [reply("一年以下")]}
    assert Decider(SEVERITY, LABELS).decide(CASE, completion).answer == {"label": "一年以下"}
    decided = pooling(label=(1.0, 1.0)).decide(CASE, completion)
    assert decided.answer == {"label": "十年以上"}
    unlikely = 1 / (1 + exp(5))
    one, other = (0.9 + 0.1 * unlikely) * unlikely, 0.1 * (1 - unlikely) ** 2
    assert decided.confidence[0]["label"] == pytest.approx(other / (one + other))


def test_a_server_decides_one_reply_and_the_classifier_together() -> None:
    asker: Any = SimpleNamespace(task=SEVERITY, labels=LABELS)
    completion = {"texts": [reply("一年以下")], "alternatives": []}  # as from an endpoint
    alone = pooling().with_rule(Rule(classifier_alone=True))
    for decider, label in ((pooling(), 1), (pooling(label=(1.0, 1.0)), 5), (alone, 5)):
        assert decide(asker, decider, CASE, completion)["label"] == label


@pytest.mark.parametrize("row", [{"texts": ["???"]}, {"refused": "too long"}])
def test_without_a_readable_reply_the_classifier_decides_alone(row: dict[str, Any]) -> None:
    for decider in (pooling(label=(1.0, 0.25)), pooling()):
        for keep_first in (False, True):
            decided = decider.decide(CASE, row, keep_first=keep_first)
            assert decided.answer == {"label": "十年以上"}


@given(st.lists(st.sampled_from(WORDS).map(reply) | st.text(max_size=20), min_size=1, max_size=5))
def test_without_weights_every_decision_is_that_of_the_model(texts: list[str]) -> None:
    row = {"texts": [reply(WORDS[0]), *texts]}
    plain = Decider(SEVERITY, LABELS).decide(CASE, row)
    assert pooling().decide(CASE, row) == plain
