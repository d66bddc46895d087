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
        ("某日天气晴朗，有人被盗。", []),
        ("被告人的亲属赔偿了损失，被告人供述稳定。", []),
        ("", []),
    ],
)
def test_names_are_found(fact: str, names: list[str]) -> None:
    assert find_defendants(fact) == names


@given(st.text(st.sampled_from("被告人张某甲乙、和（另案）王建A1，。· "), max_size=60))
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


def test_how_well_it_does_on_real_cases(shared: Path) -> None:
    both = found = wanted = 0
    for example in Reader(load_task("judgment")).read(shared / "drdz/dev.jsonl"):
        names = set(find_defendants(example.text))
        both += len(names & set(example.names))
        found += len(names)
        wanted += len(example.names)
    assert both / found > 0.9
    assert both / wanted > 0.9
