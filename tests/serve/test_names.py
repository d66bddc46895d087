import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.serve.names import MAX_DEFENDANTS, find_defendants


@pytest.mark.parametrize(
    ("fact", "names"),
    [
        ("被告人张某甲、李某乙共同盗窃。", ["张某甲", "李某乙"]),
        ("被告人张某甲盗窃。后被告人李某在逃跑时被抓获。被告人张某甲自首。", ["张某甲", "李某"]),
        ("被告人王建国和赵敏商议后，王建国动手，赵敏望风。", ["王建国", "赵敏"]),
        ("被告人吴某A伙同被告人吴某B打人。", ["吴某A", "吴某B"]),
        ("被告人刘某1、陈某2（均另案处理）与被告人周某行窃。", ["周某"]),
        ("被告人孙某、钱某（另案处理）行窃。", ["孙某"]),
        ("被告人陶某军、陶某海，均系渔民。", ["陶某军", "陶某海"]),
        ("被告人欧阳某某供述其行窃。", ["欧阳某某"]),
        ("被告人郑某XX、李XX开设赌场。", ["郑某XX", "李XX"]),
        ("犯罪嫌疑人张三到案。", ["张三"]),
        ("被告人玉素甫·买买提明伙同他人行窃。", ["玉素甫·买买提明"]),
        ("被告人古丽•于素甫明知是赃物仍收购。", ["古丽•于素甫"]),
        (
            "被告人艾力・某某、伊万・伊万诺维奇・彼得在逃。",
            ["艾力・某某", "伊万・伊万诺维奇・彼得"],
        ),
        (
            "被告人张○○、李〇某、王ｘｘ、赵＊＊、钱×军打人。",
            ["张○○", "李〇某", "王ｘｘ", "赵＊＊", "钱×军"],
        ),
        ("被告人：李某盗窃。被告人:王某望风。", ["李某", "王某"]),
        ("被告人李某（甲）伙同李某(乙)、被告人李某（丙）（另案处理）行窃。", ["李某（甲）"]),
        ("被告人李某（甲）、李某（乙）、孙某（女）行窃。", ["李某（甲）", "李某（乙）", "孙某"]),
        ("被告人韦某陆伙同被告人韦某柒行窃。", ["韦某陆", "韦某柒"]),
        ("被告人张某陆续行窃，被告人张某陆续退赃。", ["张某"]),
        ("被告人陈某明、陈某利，陈某明自首。", ["陈某明", "陈某利"]),
        ("被告人孙某（已判刑）、钱某（在逃）、赵某行窃。", ["赵某"]),
        ("被告人孙某、钱某、赵某（后二人另案处理）行窃。", ["孙某"]),
        ("被告人张三盗窃，被告人李某位于现场。二被告人将王某打伤。", ["张三", "李某"]),
        ("某日天气晴朗，有人被盗。", []),
        ("被告人的亲属赔偿了损失，被告人供述稳定。", []),
        ("", []),
    ],
)
def test_names_are_found(fact: str, names: list[str]) -> None:
    assert find_defendants(fact) == names


@given(st.text(st.sampled_from("被告人张某甲乙、和（另案）王建A1，。·•○×： "), max_size=60))
def test_any_text_gives_names_that_stand_in_it_once_each(fact: str) -> None:
    found = find_defendants(fact)
    assert len(set(found)) == len(found)
    assert all(name.strip() and name in fact for name in found)
    assert found == sorted(found, key=fact.find)


def test_text_full_of_names_comes_to_an_end() -> None:
    assert len(find_defendants("被告人张三、" * 20_000)) == 1
    assert len(find_defendants("，被告人张三" * 14_500)) == 1
    assert len(find_defendants("".join(f"被告人张{chr(0x4E00 + i)}。" for i in range(9000)))) <= 200
    many = "、".join(f"张某{chr(0x4E00 + i)}" for i in range(20_000))
    assert len(find_defendants(f"被告人{many}。")) <= 2 * MAX_DEFENDANTS


PERSON = re.compile(r"[\u4e00-\u9fff]某(?:某|[A-Z甲乙丙丁戊己庚辛壬癸]|[0-9]{1,2})?")
FIRST = ("玉素甫", "吐尔逊", "艾合买提", "热孜万", "巴哈提", "帕提古丽", "买买提", "木沙", "艾力")
LAST = ("买买提明", "依明", "克力木", "阿不力孜", "买买提", "艾则孜", "于素甫", "塔依尔", "努尔")
DOTTED = [f"{first}·{last}" for last in LAST for first in FIRST]
GIVEN = "林军海华强平龙辉杰峰陆伍柒斌涛超鹏飞亮刚勇兵波娟芳丽霞燕玲红梅英兰凤云雪"
STEMS = "甲乙丙丁戊己庚辛壬癸"

FORMS: dict[str, Callable[[str, int, int], str]] = {
    "玉素甫·买买提": lambda _, __, n: DOTTED[n % 81],
    "玉素甫•买买提": lambda _, __, n: DOTTED[n % 81].replace("·", "•"),
    "张○○甲": lambda surname, i, _: f"{surname}○○{STEMS[i % 10]}",
    "张〇某甲": lambda surname, i, _: f"{surname}〇某{STEMS[i % 10]}",
    "张ｘｘ甲": lambda surname, i, _: f"{surname}ｘｘ{STEMS[i % 10]}",
    "张＊＊甲": lambda surname, i, _: f"{surname}＊＊{STEMS[i % 10]}",
    "张某（甲）": lambda surname, i, _: f"{surname}某（{STEMS[i % 10]}）",
    "张某林": lambda surname, i, n: f"{surname}某{GIVEN[(n + i) % 36]}",
    "张林": lambda surname, i, n: f"{surname}{GIVEN[(n + i) % 36]}",
    "张海林": lambda surname, i, n: f"{surname}{GIVEN[n % 36]}{GIVEN[(7 * i + n // 2) % 36]}",
}
"""Form of a name -> surname, number among those of the surname, number in the case -> a name."""


def renamed(fact: str, form: str) -> tuple[str, dict[str, str]]:
    """Return facts with all persons named in another form, and the new name of each."""
    of_surname: dict[str, int] = Counter()
    new: dict[str, str] = {}
    for person in sorted(set(PERSON.findall(fact))):
        new[person] = FORMS[form](person[0], of_surname[person[0]], len(new))
        of_surname[person[0]] += 1
    return PERSON.sub(lambda person: new[person[0]], fact), new


@pytest.mark.parametrize("form", ["as it is", "被告人：张某", *FORMS])
def test_how_well_it_does_on_real_cases(form: str, shared: Path) -> None:
    both = found = wanted = 0
    for example in Reader(load_task("judgment")).read(shared / "drdz/dev.jsonl"):
        fact, names = example.text, set(example.names)
        if form in FORMS:
            fact, new = renamed(fact, form)
            if len(set(new.values())) < len(new) or not names <= new.keys():
                continue
            names = {new[name] for name in names}
        elif form == "被告人：张某":
            fact = fact.replace("被告人", "被告人：")
        given = set(find_defendants(fact))
        both += len(given & names)
        found += len(given)
        wanted += len(names)
    assert wanted > 600
    assert both / found > 0.9
    assert both / wanted > 0.9
