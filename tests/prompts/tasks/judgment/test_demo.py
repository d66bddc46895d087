import json
import re
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.prompts.tasks.judgment.demo import write_demo

THREE, FIVE, SEVEN, TEN, FIFTEEN = 36, 60, 84, 120, 180  # years, in months
LIFE = 999
TO_THREE, TO_FIVE = (1, THREE), (1, FIVE)  # with detention of 1-6 months
PROPERTY = {"数额较大": TO_THREE, "数额巨大": (THREE, TEN), "数额特别巨大": (TEN, FIFTEEN)}
UP_TO_LIFE = {**PROPERTY, "数额特别巨大": (TEN, LIFE)}
LESS = {"数额较大": TO_THREE, "数额巨大": (THREE, SEVEN), "数额特别巨大": (THREE, SEVEN)}
PEOPLE = ("情节较轻", "情节严重", "情节特别严重")
LAW: dict[str, dict[str, tuple[int, int]]] = {
    "264": UP_TO_LIFE,
    "266": UP_TO_LIFE,
    "271-1": UP_TO_LIFE,
    "274": PROPERTY,
    "176": PROPERTY,
    "275": LESS,
    "312": LESS,
    "263": {"数额较大": (THREE, TEN), "数额巨大": (TEN, LIFE), "数额特别巨大": (TEN, LIFE)},
    "234": {"轻伤": TO_THREE, "轻伤，情节恶劣": TO_THREE, "人重伤": (THREE, TEN)},
    "293": {"轻微伤，情节恶劣": TO_FIVE, "轻伤，情节恶劣": TO_FIVE, "社会秩序": (FIVE, TEN)},
    "347": {
        "数量较少": TO_THREE,
        "数量较少，情节严重": (THREE, SEVEN),  # no invented case has it; others are reduced to it
        "数量较大": (SEVEN, FIFTEEN),
        "数量大": (FIFTEEN, LIFE),
    },
    "348": {"数量较大": TO_THREE, "情节严重": (THREE, SEVEN), "数量大": (SEVEN, LIFE)},
    "238": {"小时": TO_THREE, "被害人": TO_THREE, "坠楼重伤": (THREE, TEN)},
    "303-2": dict(zip(PEOPLE, (TO_FIVE, (FIVE, TEN), (FIVE, TEN)), strict=True)),
    "354": dict.fromkeys(PEOPLE, TO_THREE),
    "358-1": dict(zip(PEOPLE, ((FIVE, TEN), (TEN, LIFE), (TEN, LIFE)), strict=True)),
}
"""Article of the Criminal Law -> how its deeds end in the text -> the range of terms."""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("demo")
    write_demo(folder, {"train": 4000})
    return [json.loads(line) for line in (folder / "train.jsonl").read_text("utf-8").splitlines()]


def test_invented_cases_are_many_different_and_always_the_same(tmp_path: Path) -> None:
    write_demo(tmp_path, {"train": 400, "base": 300})
    written = (tmp_path / "train.jsonl").read_bytes() + (tmp_path / "base.jsonl").read_bytes()
    assert sha256(written).hexdigest()[:16] == "80f242f5299ce4b0"
    facts = [json.loads(line)["fact"] for line in written.splitlines()]
    assert len(set(facts)) == 700
    task = load_task("judgment")
    counts = task.ask.labels(Reader(task).read(tmp_path / "train.jsonl")).counts
    assert len(counts["charges"]) >= 12
    assert len(counts["penalty"]) >= 5


def ranges(fact: str, outcome: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """Yield the range of terms for each crime of a defendant; of an accessory from the next lower.

    Articles 27 and 63: a reduced term is in the next lower range, or below the lowest.
    """
    name = outcome["name"]
    own = [deed for deed in re.findall(r"被告人([^。]*)。", fact) if name in deed]
    for deed, article in zip(own, outcome["articles"], strict=True):
        law = LAW[article]
        level = max((end for end in law if deed.endswith(end)), key=len)
        least, most = law[level]
        if "共同" in deed and f"{name}系从犯" in fact:
            least = max((low for low, _ in law.values() if low < least), default=1)
        yield least, most


def months(outcome: dict[str, Any]) -> int:
    penalty = outcome["penalty"]
    if penalty["life_imprisonment"]:
        return LIFE
    return int(penalty["detention"] or penalty["imprisonment"])


def test_a_term_is_within_the_range_of_its_article(cases: list[dict[str, Any]]) -> None:
    for case in cases:
        for outcome in case["outcomes"]:
            allowed = list(ranges(case["fact"], outcome))
            # Of several crimes at least the gravest term is served, at most their sum (article 69).
            least = max(low for low, _ in allowed)
            most = max(high for _, high in allowed)
            assert least <= months(outcome) <= most, (case["fact"], outcome)


def test_a_term_follows_the_general_part_of_the_law(cases: list[dict[str, Any]]) -> None:
    for case in cases:
        fact = case["fact"]
        for outcome in case["outcomes"]:
            name, penalty = outcome["name"], outcome["penalty"]
            if penalty["detention"]:
                assert penalty["detention"] <= 6  # article 42
                assert f"{name}系从犯，系初犯" in fact
            if penalty["imprisonment"]:
                assert 6 <= penalty["imprisonment"] <= FIFTEEN  # article 45
        joint = re.findall(r"被告人([^。]*?)共同", fact)
        roles = [f"{name}系主犯" in fact for names in joint for name in names.split("、")]
        assert any(roles) or not joint, "accessories have a principal"


def test_nobodys_own_cases_are_written_over(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text("own", "utf-8")
    with pytest.raises(UserError, match=r"test.jsonl: exists already; choose another folder$"):
        write_demo(tmp_path, {"train": 4, "test": 2})
    assert (tmp_path / "test.jsonl").read_text("utf-8") == "own"
    assert not (tmp_path / "train.jsonl").exists()
