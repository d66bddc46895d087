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
    without,
)
from panjue.prompts.task import load_task

NAMES = ("张某", "张某甲", "李某")
BODIES = st.lists(
    st.sampled_from([*NAMES, "盗窃", "逃离现场", "价值1元", "，"]), min_size=1, max_size=6
)
SENTENCES = st.lists(
    st.builds(lambda body, end: "".join(body) + end, BODIES, st.sampled_from("。；！\n")),
    min_size=1,
    max_size=20,
)


def length(example: Example) -> int:
    return len(example.text)


def example_of(sentences: list[str]) -> Example:
    return Example(id=1, text="".join(sentences), names=NAMES)


def shortened_to(sentences: list[str], budget: int) -> Shortened:
    return shorten(example_of(sentences), budget, length)


def kept(sentences: list[str], shortened: Shortened) -> list[str]:
    gone = leaving_order(sentences, NAMES, "")[: shortened.dropped]
    return [sentence for i, sentence in enumerate(sentences) if i not in gone]


def shortest(sentences: list[str]) -> int:
    return len(without(example_of(sentences), sentences, leaving_order(sentences, NAMES, "")).text)


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
    if shortest(sentences) <= budget:
        assert shortened.fits
    if not shortened.fits:
        assert shortened.dropped == len(leaving_order(sentences, NAMES, ""))


@given(SENTENCES, st.integers(0, 300))
def test_sentences_that_introduce_a_name_stay(sentences: list[str], budget: int) -> None:
    remaining = kept(sentences, shortened_to(sentences, budget))
    for name in NAMES:
        # 张某甲 does not name 张某, so the longer name is taken out first.
        bare = [s.replace("张某甲", "") if name == "张某" else s for s in sentences]
        first = next((i for i, sentence in enumerate(bare) if name in sentence), None)
        if first is not None:
            assert sentences[first] in remaining
            assert sentences[first] in shortened_to(sentences, budget).example.text


@given(SENTENCES, st.integers(0, 300))
def test_what_stays_stays_in_order_and_each_gap_shows(sentences: list[str], budget: int) -> None:
    shortened = shortened_to(sentences, budget)
    pieces = shortened.example.text.split(GAP)
    assert "".join(pieces) == "".join(kept(sentences, shortened))
    assert "" not in pieces[1:-1]  # one gap per stretch
    assert bool(shortened.dropped) == (len(pieces) > 1)
    place, text = 0, "".join(sentences)
    for piece in pieces:
        place = text.index(piece, place) + len(piece)


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
    assert length(example) == 28
    # Middle is sentence 2; one for one: 28 -> 25 -> (2 and 1 share a gap) 20 -> 14.
    for budget, text, dropped in (
        (27, "张某入室。天气晴朗。……李某望风。张某李某均逃走。", 1),
        (25, "张某入室。天气晴朗。……李某望风。张某李某均逃走。", 1),
        (24, "张某入室。……李某望风。张某李某均逃走。", 2),
        (19, "张某入室。……李某望风。……", 3),
        (14, "张某入室。……李某望风。……", 3),
    ):
        shortened = shorten(example, budget, length)
        assert shortened == Shortened(
            Example(id=1, text=text, names=example.names), len(text), 28, dropped, fits=True
        )
    refused = shorten(example, 13, length)
    assert (refused.fits, refused.dropped, refused.tokens) == (False, 3, 14)


class Letters:
    """A tokenizer whose tokens are characters."""

    eos_token_id = 0

    def __init__(self) -> None:
        self.added_tokens_decoder: dict[int, object] = {}

    def apply_chat_template(self, messages: list[dict[str, str]], **_: object) -> list[int]:
        return [ord(letter) for letter in messages[0]["content"]]

    def __call__(self, text: str, **_: object) -> "Letters":
        self.input_ids = [ord(letter) for letter in text]
        return self


def test_the_prompt_leaves_room_for_the_reply(case: Example, labels: Labels) -> None:
    task = load_task("judgment")
    long = Example(
        case.id,
        case.text + "其间天气晴朗。" * 500 + "李某到案。",
        case.names,
        case.inputs,
        case.answer,
    )
    shortened = shortened_prompt(task, long, labels, Letters(), 1000).shortened
    assert shortened.fits
    assert shortened.dropped > 300
    content = task.ask.prompt(shortened.example)[0]["content"]
    assert "被告人张某甲、李某共同行窃。" in content
    assert "李某到案。" in content
    assert shortened.tokens == len(content)
    # The commonest answer is 76 + 75 characters for the two, a comma, 16 around them and the end:
    # 169, half as much again 253. 1000 - 64 - 253 = 683, and a sentence more would have been 7.
    assert 683 - 7 < shortened.tokens <= 683


def test_opinions_count_by_the_length_rule(case: Example, labels: Labels) -> None:
    task = load_task("judgment")
    long = Example(case.id, case.text + "其间天气晴朗。" * 500, case.names, case.inputs)
    told = Example(case.id, long.text, case.names, {**case.inputs, "opinions": "意" * 140})
    one = shortened_prompt(task, long, labels, Letters(), 1000).shortened
    other = shortened_prompt(task, told, labels, Letters(), 1000).shortened
    paragraph = len("\n分类器的意见（可能有误）：\n\n") + 140
    assert other.full_tokens == one.full_tokens + paragraph
    assert other.dropped > one.dropped
    assert other.fits
    assert other.example.inputs["opinions"] == told.inputs["opinions"], "never shortened"
