from dataclasses import replace
from typing import ClassVar

from hypothesis import given
from hypothesis import strategies as st

from panjue.prompts.example import Example
from panjue.prompts.labels import Labels
from panjue.prompts.shorten import (
    GAP,
    Shortened,
    leaving_order,
    shorten,
    shortened_prompt,
    split_sentences,
)
from panjue.prompts.task import load_task

NAMES = ("张某", "张某甲", "李某")
BODIES = st.lists(
    st.sampled_from([*NAMES, "盗窃", "逃离现场", "价值1元", "，"]), min_size=1, max_size=6
)
SENTENCES = st.lists(
    st.builds(
        lambda body, end: "".join(body) + end, BODIES, st.sampled_from(["。", "；", "！", "\n\n"])
    ),
    min_size=1,
    max_size=20,
)


def length(example: Example) -> int:
    return len(example.text)


def shortened_to(sentences: list[str], budget: int) -> Shortened:
    return shorten(Example(id=1, text="".join(sentences), names=NAMES), budget, length)


@given(st.text() | st.text(st.sampled_from("a。！？；!?;\n”’」』）) ")))
def test_sentences_joined_give_the_text(text: str) -> None:
    for longest in (None, 3):
        assert "".join(split_sentences(text, longest, ())) == text
        assert all(split_sentences(text, longest, ()))


def test_a_text_without_full_stops_falls_apart_at_its_commas_where_it_is_asked_about() -> None:
    clauses = [f"第{i}项价款为1,000元，" for i in range(30)]
    text = "".join(clauses)
    assert split_sentences(text, 200, ()) == clauses
    assert split_sentences(text, None, ()) == split_sentences(text, len(text), ()) == [text]
    asked = shorten(Example(id=1, text=text, anchor="第7项？"), 60, length)
    assert (asked.fits, asked.dropped) == (True, 27)
    assert clauses[7] in asked.example.text
    assert not shorten(Example(id=1, text=text), 60, length).fits


@given(SENTENCES, st.integers(0, 300))
def test_it_fits_wherever_the_rule_lets_it(sentences: list[str], budget: int) -> None:
    shortened = shortened_to(sentences, budget)
    assert shortened.tokens == length(shortened.example)
    assert shortened.full_tokens == len("".join(sentences))
    assert shortened.fits == (shortened.tokens <= budget)
    shortest = shortened_to(sentences, 0)
    assert shortened.fits == (shortest.tokens <= budget)
    assert shortest.dropped == len(leaving_order(sentences, NAMES, ""))
    if not shortened.fits:
        assert shortened == shortest


@given(SENTENCES, st.integers(0, 300))
def test_what_introduces_a_name_stays_all_in_order_and_each_gap_shows(
    sentences: list[str], budget: int
) -> None:
    shortened = shortened_to(sentences, budget)
    gone = leaving_order(sentences, NAMES, "")[: shortened.dropped]
    kept = [sentence for i, sentence in enumerate(sentences) if i not in gone]
    pieces = shortened.example.text.split(GAP)
    assert "".join(pieces) == "".join(kept)
    assert "" not in pieces[1:-1], "one gap for neighbors"
    assert bool(shortened.dropped) == (len(pieces) > 1)
    for name in NAMES:
        # 张某甲 does not name 张某, so the longer name is taken out first.
        bare = [s.replace("张某甲", "") if name == "张某" else s for s in sentences]
        first = next((i for i, sentence in enumerate(bare) if name in sentence), None)
        assert first is None or first not in gone


def test_leaving_order_by_hand() -> None:
    sentences = [
        "经审理查明。",  # 0: nobody, three from the middle
        "张某入室。",  # 1: introduces 张某
        "天气晴朗。",  # 2: nobody, one from the middle
        "张某与李某同去，后又返回原处。",  # 3: introduces 李某; the longest, yet it stays
        "物品若干。",  # 4: nobody, one from the middle
        "张某逃走。",  # 5: names somebody known
        "李某在家中被抓获归案。",  # 6: the same, longer
    ]
    assert leaving_order(sentences, ["张某", "李某"], "") == [2, 4, 0, 6, 5]
    assert leaving_order(sentences, ["王某"], "") == [3, 2, 4, 1, 5, 6], "the beginning stays"
    assert 1 not in leaving_order(["\n", *sentences], ["王某"], ""), "white space is no beginning"


def test_shortening_by_hand() -> None:
    sentences = ["张某入室。", "天气晴朗。", "物品若干。", "李某望风。", "张某李某均逃走。"]
    example = Example(id=1, text="".join(sentences), names=("张某", "李某"))
    # Middle is sentence 2; one for one: 28 -> 25 -> (2 and 1 share a gap) 20 -> 14.
    for budget, text, dropped in (
        (27, "张某入室。天气晴朗。……李某望风。张某李某均逃走。", 1),
        (25, "张某入室。天气晴朗。……李某望风。张某李某均逃走。", 1),
        (24, "张某入室。……李某望风。张某李某均逃走。", 2),
        (14, "张某入室。……李某望风。……", 3),
        (13, "张某入室。……李某望风。……", 3),
    ):
        shorter = replace(example, text=text)
        fits = budget >= 14
        expected = Shortened(shorter, len(text), 28, dropped, fits)
        assert shorten(example, budget, length) == expected


class Letters:
    """A tokenizer whose tokens are characters."""

    eos_token_id = 0
    added_tokens_decoder: ClassVar[dict[int, object]] = {}

    def get_chat_template(self) -> str:
        return ""

    def apply_chat_template(self, messages: list[dict[str, str]], **_: object) -> list[int]:
        return [ord(letter) for letter in messages[0]["content"]]

    def __call__(self, text: str, **_: object) -> "Letters":
        self.input_ids = [ord(letter) for letter in text]
        return self


def test_the_prompt_leaves_room_for_the_reply(case: Example, labels: Labels) -> None:
    task = load_task("judgment")
    long = replace(case, text=case.text + "其间天气晴朗。" * 500 + "李某到案。")
    shortened = shortened_prompt(task, long, labels, Letters(), 1000).shortened
    assert shortened.fits
    content = task.ask.prompt(shortened.example)[0]["content"]
    assert "被告人张某甲、李某共同行窃。" in content
    assert "李某到案。" in content
    assert shortened.tokens == len(content)
    # The commonest answer is 76 + 75 characters for the two, a comma, 16 around them and the end:
    # 169, half as much again 253. 1000 - 64 - 253 = 683, and a sentence more would have been 7.
    assert 683 - 7 < shortened.tokens <= 683
    # Opinions count too, and are never shortened.
    told = replace(long, inputs={**case.inputs, "opinions": "意" * 140})
    other = shortened_prompt(task, told, labels, Letters(), 1000).shortened
    paragraph = len("\n分类器的意见（可能有误）：\n\n") + 140
    assert other.full_tokens == shortened.full_tokens + paragraph
    assert 683 - 7 < other.tokens <= 683
    assert other.example.inputs == told.inputs


def test_a_prompt_without_room_for_a_reply_is_not_shortened(case: Example, labels: Labels) -> None:
    prompt = shortened_prompt(load_task("judgment"), case, labels, Letters(), 317)
    assert prompt.room == 317
    assert not prompt.shortened.fits
    assert prompt.shortened.example == case
