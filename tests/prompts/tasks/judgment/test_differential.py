"""Mutated replies, read a second time: slowly, and by the rules of prompts/README.md alone.

Both readings are equal, or ours has no answer: never another crime, article, person or penalty.
"""

import json
import random
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from panjue.prompts.example import Example
from panjue.prompts.labels import collect
from panjue.prompts.plumbing.files import dump
from panjue.prompts.tasks.judgment.repair import PENALTIES
from panjue.prompts.tasks.judgment.task import TASK

NAMES = ("张某", "张某甲", "李某", "买买提·艾力", "A某", "赵(大)", '钱"某')
CRIMES = {
    "盗窃罪": "264",
    "诈骗罪": "266",
    "抢劫罪": "263",
    "抢夺罪": "267",
    "赌博罪": "303-1",
    "开设赌场罪": "303-2",
    "受贿罪": "385",
    "行贿罪": "389",
    "危险驾驶罪": "133.1",
    "交通肇事罪": "133",
    "帮助信息网络犯罪活动罪": "287.2",
    "非法利用信息网络罪": "287.1",
    "走私国家禁止进出口的货物、物品罪": "151-3",
    "走私废物罪": "152-2",
    "掩饰、隐瞒犯罪所得、犯罪所得收益罪": "312",
    "伪造、变造、买卖身份证件罪": "280-3",
    "以危险方法危害公共安全罪": "114",
    "过失以危险方法危害公共安全罪": "115-2",
}
"""The charges of training, and the article that each stands with there."""

UNKNOWN_CHARGES = ("走私淫秽物品罪", "盗窃、抢夺国家机关公文罪", "贪污罪", "危害公共安全罪")
UNKNOWN_ARTICLES = ("152-1", "287", "第二百八十七条之三", "115-1", "26", "第2640条")
WITHOUT_PARAGRAPH = ("152", "第152条", "刑法第152条")  # the article of 走私废物罪
LABELS = collect(
    [
        *(
            {"charges": [charge], "articles": [article], "penalty": [PENALTIES[10]]}
            for charge, article in CRIMES.items()
        ),
        # So many labels that no list of these replies is cut to the most in training.
        {"charges": CRIMES, "articles": (), "penalty": [PENALTIES[10]]},
        {"charges": (), "articles": CRIMES.values(), "penalty": [PENALTIES[10]]},
    ]
)
FIELDS = ("charges", "articles", "penalty")
Values = dict[tuple[str, str], Any]  # (defendant, field) -> labels or a class


# How replies are written. ---------------------------------------------------------------------


def full_width(text: str) -> str:
    return "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text)


def charge_in(draw: random.Random, charge: str) -> str:
    ways = (
        charge,
        charge.removesuffix("罪"),
        f" {charge} ",
        charge.replace("、", "，"),
        charge.replace("、", ""),
        f"《{charge}》",
        f"“{charge}”",
        charge[:1] + "\u200b" + charge[1:],
        "　".join(charge),
    )
    return draw.choice(ways)


def article_in(draw: random.Random, article: str) -> str:
    if not article[0].isdigit():
        return article
    number, _, paragraph = article.partition("-")
    base, _, inserted = number.partition(".")
    written = f"第{base}条" + (f"之{inserted}" if inserted else "")
    written += f"第{paragraph}款" if paragraph else ""
    ways = (article, written, full_width(written), full_width(article), f"《刑法》{written}")
    return draw.choice(
        (*ways, f" {written} ", f"（{written}）" if draw.random() < 0.1 else written)
    )


def penalty_in(draw: random.Random, penalty: str) -> Any:
    number = PENALTIES.index(penalty)
    other = draw.choice(PENALTIES)
    ways = (
        penalty,
        penalty,
        number,
        str(number),
        f"第{number}档",
        full_width(str(number)),
        [penalty],
        [penalty, penalty],
        f" {penalty}。",
    )
    odd: tuple[Any, ...] = (
        [penalty, other],
        f"{penalty}、{other}",
        [[penalty], [other]],
        f"{number}个月",
        None,
        [],
    )
    return draw.choice(odd if draw.random() < 0.12 else ways)


def person(draw: random.Random, name: str) -> str:
    """Write one defendant's judgment, right or wrong."""
    charges = draw.sample(sorted(CRIMES), draw.randint(1, 3))
    articles = [CRIMES[charge] for charge in charges]
    if draw.random() < 0.1:
        charges.insert(draw.randrange(2), draw.choice(UNKNOWN_CHARGES))
    if draw.random() < 0.2:
        articles.insert(draw.randrange(2), draw.choice((*UNKNOWN_ARTICLES, WITHOUT_PARAGRAPH[0])))
    written: dict[str, Any] = {
        "name": draw.choice((name, name, name, full_width(name), f" {name}", f"{name}\u200b")),
        "charges": [charge_in(draw, charge) for charge in charges],
        "articles": [article_in(draw, article) for article in articles],
        "penalty": penalty_in(draw, draw.choice(PENALTIES)),
    }
    if draw.random() < 0.1:
        written["charges"] = draw.choice("、，;").join(charges)
    if draw.random() < 0.1:
        written["articles"] = [int(a) if a.isdecimal() else a for a in articles]
    pairs = draw.sample(list(written.items()), 4)
    if draw.random() < 0.05:
        pairs.remove(draw.choice(pairs))
    if draw.random() < 0.05:
        key, value = draw.choice(pairs)
        again = draw.choice((value, ["盗窃罪"], "264", "死刑"))
        pairs.append(
            (draw.choice((key, {"charges": "罪名", "penalty": "刑罚"}.get(key, key))), again)
        )
    space = draw.choice(("", " ", "\n  "))
    return "{" + f",{space}".join(f'"{k}":{space}{json.dumps(v)}' for k, v in pairs) + "}"


def answer(draw: random.Random, names: Sequence[str]) -> str:
    """Write an answer on some of the defendants in any order."""
    chosen = draw.sample(names, draw.choice((len(names), len(names), draw.randint(1, len(names)))))
    persons = [person(draw, name) for name in chosen]
    if draw.random() < 0.1:
        persons.append(person(draw, draw.choice(("王某", *names))))
    listed = f"[{','.join(persons)}]"
    forms = (f'{{"judgments":{listed}}}', listed, "\n".join(persons), f'{{"answer":{listed}}}')
    return draw.choice((forms[0], *forms))


BLOCKS = (
    ("<think>", "</think>"),
    ("<Thought>", "</THOUGHT>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
)


def reply(draw: random.Random, names: Sequence[str]) -> str:
    text = answer(draw, names)
    for _ in range(draw.choice((0, 0, 1, 1, 2))):
        text = answer(draw, names) + draw.choice(("\n更正：", "```\n改为：```json\n", "\n")) + text
    if draw.random() < 0.3:
        text = f"```json\n{text}\n```"
    if draw.random() < 0.3:
        text = draw.choice(("好的，判断如下：", "依照 {刑法} [264]：")) + text
    if draw.random() < 0.3:
        text += draw.choice(("以上仅供参考。", " 见{法条}。", "\n\n[1] 略"))
    if draw.random() < 0.3:
        start, end = draw.choice(BLOCKS)
        text = draw.choice((start, "")) + f"先想想：{answer(draw, names)}{end}" + text
    if draw.random() < 0.1:
        text += draw.choice(BLOCKS)[0] + answer(draw, names)
    if draw.random() < 0.1:
        text *= 2
    return text[: draw.randrange(len(text))] if draw.random() < 0.3 else text


# The second reader. ---------------------------------------------------------------------------


class Pairs(list[tuple[str, Any]]):
    """An object of JSON with all its keys."""


def without_thoughts(text: str) -> str:
    """Drop the think blocks from the first one on, until there is none."""
    ends = {start.lower(): end.lower() for start, end in BLOCKS}
    while True:
        lower = text.lower()
        tags = [tag for pair in ends.items() for tag in pair if tag in lower]
        if not tags:
            return text
        first = min(tags, key=lower.index)
        before, rest = text[: lower.index(first)], text[lower.index(first) + len(first) :]
        if first not in ends:  # the prompt has begun the block
            text = rest
            continue
        end = rest.lower().find(ends[first])
        if end < 0:  # it does not end
            return before
        text = before + rest[end + len(ends[first]) :]


def objects_in(text: str) -> Iterator[tuple[Any, bool]]:
    """Yield (value, whether it is whole) of the JSON objects of a text, the last one if cut."""
    decoder = json.JSONDecoder(object_pairs_hook=Pairs)
    at = text.find("{")
    while at >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
            yield value, True
        except ValueError:
            end = at + 1
            if "{" not in text[end:]:
                yield completed(text[at:]), False
        at = text.find("{", end)


def completed(text: str) -> Any:
    """Return the value of what comes before the cut: the longest part that can be closed."""
    for end in range(len(text), 0, -1):
        if end == len(text) and text[-1].isdigit():
            continue  # the 12 may be 120
        for closing in ("}", "]}", "]]}"):
            try:
                return json.loads(text[:end] + closing, object_pairs_hook=Pairs)
            except ValueError:
                continue
    return Pairs()


def persons_in(value: Any) -> Iterator[Pairs]:
    for inner in [v for _, v in value] if isinstance(value, Pairs) else value:
        if isinstance(inner, list):
            yield from persons_in(inner)
    if isinstance(value, Pairs):
        yield value


KEYS = {"charges": ("charges", "罪名"), "articles": ("articles",), "penalty": ("penalty", "刑罚")}


def plain(text: str) -> str:
    """Return a text without what two spellings may differ in."""
    signs = "\u200b、，,;；:：。·“”\"'()（）《》<>"
    return "".join(
        c for c in unicodedata.normalize("NFKC", text) if c not in signs and not c.isspace()
    )


def fields_of(found: Pairs) -> dict[str, list[list[str]]]:
    """Return all values of each field that an object has."""
    return {
        field: values
        for field, keys in KEYS.items()
        if (values := [flat(value) for key, value in found if key in keys])
    }


def flat(value: Any) -> list[str]:
    if isinstance(value, list):
        return [text for inner in value for text in flat(inner)]
    return [str(value)]


CHARGE_OF = {plain(charge).removesuffix("罪"): charge for charge in CRIMES}


def charges_in(texts: list[str]) -> list[str]:
    parts = []
    for text in texts:
        split = [part for part in text.replace("，", "、").replace(";", "、").split("、") if part]
        is_known = plain(text).removesuffix("罪") in CHARGE_OF
        is_list = all(part.strip().endswith("罪") for part in split)
        is_list = is_list or all(plain(part).removesuffix("罪") in CHARGE_OF for part in split)
        parts += split if is_list and not is_known else [text]
    found = [CHARGE_OF.get(plain(part).removesuffix("罪")) for part in parts]
    return list(dict.fromkeys(charge for charge in found if charge))


def article_forms() -> dict[str, str]:
    forms: dict[str, str] = {}
    for article in CRIMES.values():
        number, _, paragraph = article.partition("-")
        base, _, inserted = number.partition(".")
        text = f"第{base}条" + (f"之{inserted}" if inserted else "")
        text += f"第{paragraph}款" if paragraph else ""
        forms |= {article: article, text: article, f"刑法{text}": article}
    return forms


ARTICLE_OF = article_forms()


def articles_in(texts: list[str], charges: list[str]) -> list[str]:
    with_charge = {CRIMES[charge] for charge in charges}
    found = []
    for text in texts:
        article = ARTICLE_OF.get(plain(text))
        if plain(text) in WITHOUT_PARAGRAPH and "152-2" in with_charge:
            article = "152-2"  # its only paragraph in training, with this charge
        found.append(article)
    return list(dict.fromkeys(article for article in found if article))


def penalty_of(texts: list[str]) -> str | None:
    numbers = {form: p for i, p in enumerate(PENALTIES) for form in (str(i), f"第{i}档")}
    named = {
        numbers.get(plain(text)) or {p: p for p in PENALTIES}.get(plain(text)) for text in texts
    }
    named -= {None}
    return named.pop() if len(named) == 1 else None


def slowly(text: str, names: Sequence[str]) -> Values:
    """Read a reply by the rules of the page; what it does not say has no entry."""
    chosen: dict[str, Pairs] = {}
    for value, is_whole in objects_in(without_thoughts(text)):
        for found in persons_in(value):
            written = {v for key, v in found if key == "name" and isinstance(v, str)}
            owners = [n for n in names if [plain(n)] == [plain(w) for w in written]]
            fields = fields_of(found)
            if len(owners) == 1 and fields:
                is_complete = is_whole and len(fields) == 3
                if is_complete or owners[0] not in chosen:
                    chosen[owners[0]] = found
    values: Values = {}
    for name, found in chosen.items():
        once = {
            field: texts[0]
            for field, texts in fields_of(found).items()
            if all(other == texts[0] for other in texts)
        }
        charges = charges_in(once.get("charges", []))
        values[name, "charges"] = charges
        values[name, "articles"] = articles_in(once.get("articles", []), charges)
        values[name, "penalty"] = penalty_of(once.get("penalty", []))
    return {place: value for place, value in values.items() if value}


# The comparison. ------------------------------------------------------------------------------


def fast(text: str, names: Sequence[str]) -> Values:
    decoded = TASK.ask.decode(text, Example(id=1, text="事实", names=tuple(names)), LABELS)
    return {
        (row["name"], field): row[field]
        for number, row in enumerate(decoded.answer["judgments"])
        for field in FIELDS
        if not decoded.is_guess(number, field)
    }


def test_the_second_reader_reads_what_was_written() -> None:
    """So that two readers that read nothing are not equal."""
    row = {"name": "张某", "charges": ["盗窃罪"], "articles": ["264"], "penalty": "死刑"}
    expected = {("张某", field): row[field] for field in FIELDS}
    other = dump({**row, "charges": ["诈骗罪"], "articles": ["266"], "penalty": "拘役"})
    for text in (dump(row), f"{other}更正：{dump(row)}", f"<THINK>{other}</think>{dump(row)}"):
        assert slowly(text, NAMES) == expected
        assert fast(text, NAMES) == expected


def test_both_readers_agree(request: pytest.FixtureRequest) -> None:
    draw = random.Random(0)
    answered = unanswered = 0
    for _ in range(10_000 if request.config.getoption("--torture") else 2_000):
        names = draw.sample(NAMES, draw.randint(1, 4))
        text = reply(draw, names)
        ours, theirs = fast(text, names), slowly(text, names)
        assert not [place for place in ours if ours[place] != theirs.get(place)], text
        answered += len(ours)
        unanswered += len(theirs) - len(ours)
    assert unanswered < answered / 100, "an answer that is there is read"
