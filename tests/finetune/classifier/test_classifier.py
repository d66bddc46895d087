"""The text classifier: its n-grams, its file, and its probabilities."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.special import expit

from panjue.finetune.classifier.classifier import Classifier, load_classifier, read_classifier
from panjue.finetune.classifier.features import PLACES, View, facts, marked, views
from panjue.finetune.classifier.grams import (
    FIRST_NAME,
    NUMBER,
    PERSON,
    Hashes,
    Text,
    _before_four_bytes,
    grams,
    magnitude,
)
from panjue.finetune.classifier.label_sets import LabelField
from panjue.prompts.example import Example, LabelFields
from panjue.prompts.model import CLASSIFIER
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump, sha256
from panjue.prompts.task import load_task
from tests.records import write_training

TASK = load_task("severity")
NAMES = ("张某甲", "张某", "李某")
TEXT = "张某甲盗窃3万元，张某望风；李某销赃200元。"
CASE = Example(id=1, text=TEXT, names=NAMES)


def masked(text: str) -> str:
    return NUMBER.sub(lambda found: magnitude(found[0]), text)


def test_numbers_of_one_third_of_a_decade_are_one_character() -> None:
    assert masked("3万元") == masked("30000元") == masked("30,000.00元") == masked("3余万元")
    assert masked("30000元") == masked("31000元") != masked("60000元") != masked("3000元")
    assert len({masked(text) for text in ("0", "0.001", "1", "9" * 400)}) == 4


@given(st.text(), st.lists(st.text(min_size=1), max_size=3, unique=True))
def test_any_text_and_any_names_have_n_grams(text: str, names: list[str]) -> None:
    example = Example(id=1, text=text, names=tuple(names))
    items = len(names) or 1
    case = marked(example, items)
    [_], own = views([case])
    assert len(own) == len(facts(case, lambda _: ())) == items


@given(st.permutations(["赵甲", "钱乙", "孙丙"]))
def test_other_names_change_nothing(names: list[str]) -> None:
    new = dict(zip(NAMES, names, strict=True))
    text = re.sub("|".join(NAMES), lambda found: new[found[0]], TEXT)
    [whole], own = views([marked(CASE, 3)])
    [same], also = views([marked(Example(id=1, text=text, names=tuple(names)), 3)])
    for one, other in zip([whole, *own], [same, *also], strict=True):
        assert one.tolist() == other.tolist()


def test_where_an_item_stands_worked_by_hand() -> None:
    rows = facts(marked(CASE, 3), lambda text: [text.count("元")])
    length = len("甲盗窃3万元，乙望风；丙销赃200元。")  # with one character for each name
    expected = [
        [0, 3, 0, length, 7, 1, 0, 2, 1],
        [1, 3, 0.5, length, 4, 1, 7 / length, 2, 0],
        [2, 3, 1, length, 8, 1, 11 / length, 2, 1],
    ]
    assert rows == [pytest.approx(row) for row in expected]
    assert len(rows[0]) == len(PLACES) + 2


TOKEN = re.compile(r"[^\W\d_\u4e00-\u9fff]+|[\u4e00-\u9fff\ue000-\uf8ff]")
CHARACTERS = st.sampled_from("甲乙ab A1,.万余é𠮷日ご한\ue010\uf010_\nΣßİ①²") | st.characters()


def hashes(text: str) -> Hashes:
    [of_text] = grams([Text(text)])
    return of_text


@given(st.lists(st.text(CHARACTERS, max_size=12), min_size=1, max_size=5))
def test_the_n_grams_of_texts_are_those_of_each_token_by_token(texts: list[str]) -> None:
    for text, found in zip(texts, grams([Text(text) for text in texts]), strict=True):
        tokens = TOKEN.findall(masked(text.lower()))
        pairs = [f"{first} {second}" for first, second in pairwise(tokens)]
        assert found.tolist() == [crc32(gram.encode()) for gram in (*tokens, *pairs)]


def test_two_of_one_name_are_named_by_the_same_clauses() -> None:
    """Which of them a clause means nobody can tell; their places differ."""
    case = marked(Example(1, "张某行窃。李某望风。", names=("张某", "李某", "张某")), 3)
    assert case.own[0] == case.own[2] != ""
    _, [first, _, third] = views([case])
    names_of_both = facts(case, lambda _: [])
    named = [row[PLACES.index("named")] for row in names_of_both]
    assert named == [1, 1, 1]
    shared = set(first.tolist()) & set(third.tolist())
    assert len(shared) > len(first) / 2, "all but the place"


def test_names_and_positions_worked_by_hand() -> None:
    [found] = grams([Text("\ue010打\ue011\ue012", names=2, own=1, position=("of 2",))])
    tokens = ["\ue001", "打", "\ue000", "\ue012"]  # the last is a character of the text itself
    pairs = [f"{first} {second}" for first, second in pairwise(tokens)]
    assert found.tolist() == [crc32(gram.encode()) for gram in (*tokens, *pairs, "of 2")]


def test_the_examples_of_hashes() -> None:
    [found] = grams([Text(chr(FIRST_NAME) + "偷3万元", names=1, own=0)])
    tokens = [chr(PERSON), "偷", "\uf017", "元"]
    pairs = [f"{first} {second}" for first, second in pairwise(tokens)]
    assert found.tolist() == [crc32(gram.encode()) for gram in (*tokens, *pairs)]
    assert (found[1], found[4]) == (0x27F5447C, 0x1923942E)
    assert _before_four_bytes(found[1:2]).tolist() == [0x9ABB9AAB]
    assert crc32(" 元".encode()) == 0x1C1ADCFD
    assert hashes("偷元")[-1] == 0x86A14656 == 0x9ABB9AAB ^ 0x1C1ADCFD


def test_words_of_other_scripts_are_whole() -> None:
    words = [*hashes("the"), *hashes("court"), hashes("the court")[-1]]
    assert hashes("The court").tolist() == words


def test_a_vector_worked_by_hand() -> None:
    view = View(np.array([5, 8], np.uint32), np.array([1.0, 2.0], np.float32))
    twice = 1 + math.log(2)
    length = math.hypot(twice, 2)
    for text, vector in [
        ([5, 5, 8], [twice / length, 2 / length]),
        ([8], [0, 1]),
        ([4, 6, 9], [0, 0]),
        ([], [0, 0]),
    ]:
        rows, _ = view.rows_and_shares([np.array(text, np.uint32)])
        assert rows.toarray()[0] == pytest.approx(vector)


def small(*, is_set: bool, scale: float = 1.0, shift: float = 0.0) -> Classifier:
    """Return a classifier of two fields that knows one n-gram by each view."""
    view = View(np.array(sorted(hashes("甲"))), np.ones(1, np.float32))
    names = ("label", "other")
    return Classifier(
        label_fields=LabelFields(sets=names) if is_set else LabelFields(classes=names),
        views=[view, view],
        weights=[csr_array([[2.0, -1.0, 5.0]]), csr_array((1, 3))],
        bias=np.zeros(3, np.float32),
        fields={
            "label": LabelField(["a", "b"], is_set, scale, shift),
            "other": LabelField(["c"], is_set, scale, shift),
        },
    )


def test_probabilities_worked_by_hand() -> None:
    example = Example(id=1, text="甲")
    [of_class] = small(is_set=False).probabilities(example)
    assert of_class["label"] == pytest.approx({"a": expit(3), "b": expit(-3)})
    assert of_class["other"] == {"c": 1}
    [of_set] = small(is_set=True, scale=0.5, shift=1).probabilities(example)
    assert of_set["label"] == pytest.approx({"a": expit(2), "b": expit(0.5)})
    assert of_set["other"] == pytest.approx({"c": expit(3.5)})


@given(st.lists(st.text("甲乙", max_size=4), max_size=5))
def test_predictions_of_many_cases_are_those_of_each(texts: Sequence[str]) -> None:
    examples = [Example(id=number, text=text) for number, text in enumerate(texts)]
    for classifier in (small(is_set=False), small(is_set=True)):
        alone = [classifier.probabilities(example) for example in examples]
        assert classifier.predict(examples) == alone


DECIDES = LabelFields(classes=("label", "other"))
TWO_CLASSES = replace(TASK, answer=DECIDES)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the file of `small`, written as by a training."""
    write_training(tmp_path, small(is_set=False))
    return tmp_path / CLASSIFIER


def test_what_is_written_is_read_again(path: Path) -> None:
    read = load_classifier(path.parent, sha256(path), TWO_CLASSES)
    example = Example(id=1, text="甲乙")
    assert read.probabilities(example) == small(is_set=False).probabilities(example)
    first = path.read_bytes()
    read.save(path)
    assert path.read_bytes() == first


def test_a_file_of_version_0_4_is_read(path: Path) -> None:
    """It does not say how often training has labels, nor how many n-grams a usual text has."""
    with np.load(path) as archive:
        arrays = dict(archive)
    about = json.loads(arrays["about"].tobytes())
    del about["usual_share"]
    for of_field in about["fields"].values():
        del of_field["frequencies"]
    arrays["about"] = np.frombuffer(dump(about).encode(), np.uint8)
    np.savez_compressed(path, allow_pickle=False, **arrays)
    for text in ("甲乙", "unseen"):
        example = Example(id=1, text=text)
        read = read_classifier(path, DECIDES)
        assert read.probabilities(example) == small(is_set=False).probabilities(example)


def test_no_pickle_is_read(tmp_path: Path) -> None:
    np.savez(tmp_path / CLASSIFIER, about=np.array([{}], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        read_classifier(tmp_path / CLASSIFIER, TWO_CLASSES.answer)


def test_a_file_that_is_missing_or_another_is_one_line(path: Path) -> None:
    line = f"^{path}: is missing, or is not what the training wrote; restore it, or train again$"
    digest = sha256(path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=line):
        load_classifier(path.parent, digest, TWO_CLASSES)
    path.unlink()
    with pytest.raises(UserError, match=line):
        load_classifier(path.parent, digest, TWO_CLASSES)


def test_a_file_of_another_version_or_task_is_one_line(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = f"^{path}: is no classifier of this version of panjue; train again$"
    with pytest.raises(UserError, match=line):
        load_classifier(path.parent, sha256(path), TASK)
    monkeypatch.setattr("panjue.finetune.classifier.classifier.FILE_VERSION", 0)
    with pytest.raises(UserError, match=line):
        load_classifier(path.parent, sha256(path), TWO_CLASSES)
