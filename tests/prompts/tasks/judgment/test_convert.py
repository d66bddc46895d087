"""Cases of CAIL2018 become ours, or are named with the reason why they do not."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump, read_json
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.prompts.tasks.judgment.convert import (
    CONTRADICTION,
    NO_TERM,
    SHORT_TERM,
    convert,
)
from panjue.prompts.tasks.judgment.inserted import ARTICLES
from panjue.prompts.tasks.judgment.penalties import sentence

TASK = load_task("judgment")


def converted(path: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """Return what was reported before the last line, and the rows of the new file."""
    out, reported = path.with_name("out.jsonl"), list[str]()
    is_whole = convert(path, out, reported.append)
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    others = sum("not converted" in line for line in reported)
    assert is_whole == (not others)
    assert reported.pop() == f"written: {out}, {len(rows)} of {len(rows) + others} rows"
    assert len(list(Reader(TASK).read(out))) == len(rows)
    return reported, rows


def written(path: Path, *rows: object) -> Path:
    path.write_text("".join(dump(row) + "\n" for row in rows), "utf-8")
    return path


def cail(months: float = 10, **changes: Any) -> dict[str, Any]:
    term = {"death_penalty": False, "life_imprisonment": False, "imprisonment": months}
    term |= {key: changes.pop(key) for key in term if key in changes}
    meta = {
        "criminals": ["张某"],
        "accusation": ["盗窃"],
        "relevant_articles": [264],
        "term_of_imprisonment": term,
        "punish_of_money": 1000,
    }
    return {"fact": "张某盗窃。", "meta": {**meta, **changes}}


NO_ITEM = "which is no name, charge or article"
NO_ITEMS: dict[str, tuple[Any, ...]] = {
    "criminals": ("张某 李某", "张某、李某", "['张某' '李某']", "张某\n李某", "", None, []),
    "accusation": ("盗窃 诈骗", "'盗窃' '诈骗'", "盗窃,诈骗", "", None, 264, True, "nan"),
    "relevant_articles": (264.5, "264,266", "", True, "盗窃", -264, None),
}


def test_a_case_of_cail2018_by_hand(tmp_path: Path) -> None:
    reported, rows = converted(written(tmp_path / "cail.jsonl", cail()))
    outcome = {
        "name": "张某",
        "penalty": sentence(imprisonment=10, fine=1000),
        "charges": ["盗窃罪"],
        "articles": ["264"],
    }
    spaced = cail(accusation=[" 盗窃罪"], relevant_articles=["264 "])
    assert converted(written(tmp_path / "spaced.jsonl", spaced))[1] == rows
    case = {"id": 1, "fact": "张某盗窃。", "defendants": ["张某"], "outcomes": [outcome]}
    assert (rows, reported) == ([case], [])


@pytest.mark.parametrize(
    ("changes", "penalty", "notes"),
    [
        ({"months": 6}, {"imprisonment": 6}, []),
        ({"months": 300}, {"imprisonment": 300}, []),
        ({"months": 5}, {"detention": 5}, [SHORT_TERM]),
        ({"months": 1}, {"detention": 1}, [SHORT_TERM]),
        ({"months": 0}, {}, [NO_TERM]),
        ({"months": 0, "life_imprisonment": True}, {"life_imprisonment": True}, []),
        ({"months": 0, "death_penalty": True}, {"death_penalty": True}, []),
        ({"months": 9, "death_penalty": True}, {"death_penalty": True}, [CONTRADICTION]),
    ],
)
def test_terms_of_cail2018(
    changes: dict[str, Any], penalty: dict[str, Any], notes: list[str], tmp_path: Path
) -> None:
    reported, [row] = converted(written(tmp_path / "cail.jsonl", cail(**changes)))
    assert row["outcomes"][0]["penalty"] == sentence(**penalty, fine=1000)
    assert reported == [f"1 rows, the first is {tmp_path}/cail.jsonl:1: {note}" for note in notes]


@pytest.mark.parametrize(
    ("charges", "articles", "expected"),
    [
        (["危险驾驶"], [133], ["133.1"]),
        (["交通肇事"], [133], ["133"]),
        (["危险驾驶", "交通肇事"], [133], ["133", "133.1"]),
        (["危险驾驶", "妨害公务"], [277, 133], ["277", "133.1"]),
        (["帮助信息网络犯罪活动"], [287], ["287.2"]),
        (["非法获取公民个人信息"], [253], ["253.1"]),
        (["妨害信用卡管理", "窃取、收买、非法提供信用卡信息"], [177], ["177.1"]),
        (["受贿", "利用影响力受贿"], [385, 388], ["385", "388", "388.1"]),
        (["隐匿、故意销毁会计凭证、会计账簿、财务会计报告"], [162], ["162.1"]),
        (["危险驾驶"], ["133.1"], ["133.1"]),
    ],
)
def test_an_inserted_article_is_written_for_its_charge(
    charges: list[str], articles: list[int], expected: list[str], tmp_path: Path
) -> None:
    row = cail(accusation=charges, relevant_articles=articles)
    reported, [case] = converted(written(tmp_path / "cail.jsonl", row))
    assert case["outcomes"][0]["articles"] == expected
    assert reported == []


def test_a_charge_without_its_article_is_noted_with_its_place(tmp_path: Path) -> None:
    charges = ["危险驾驶", "隐匿、故意销毁会计凭证、会计账簿、财务会计报告"]
    path = written(tmp_path / "cail.jsonl", cail(), cail(accusation=charges))
    reported, [_, case] = converted(path)
    assert case["outcomes"][0]["articles"] == ["264"]
    articles = {f"{charges[0]}罪": "133.1", f"{charges[1]}罪": "162.1"}
    assert reported == [
        f"1 rows, the first is {path}:2: {charge} is article {article}, not among the articles"
        for charge, article in articles.items()
    ]


def test_the_table_of_inserted_articles_agrees_with_the_law(shared: Path) -> None:
    known = read_json(shared / "criminal_law/charge2articles_cmdl321.json")
    articles = read_json(shared / "criminal_law/articles_paragraphs.json")
    inserted = {article for article in articles if "." in article and int(article[:-2]) > 101}
    assert {article for article in ARTICLES.values() if "." in article} == inserted
    bases = {article.split(".")[0] for article in inserted}
    for charge, ids in known.items():
        numbers = {number.split("-")[0] for number in ids}
        of_table = ARTICLES.get(charge.replace("账", "帐"))
        if of_table is None:
            assert not numbers & (inserted | bases), charge
        elif charge not in ("行贿罪", "受贿罪"):  # by two articles
            assert of_table in numbers, charge


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            cail(criminals=["张某", "李某"]),
            "'criminals' has 2 names, and 'accusation' is not by name; only a case of one "
            "defendant can be converted",
        ),
        (cail(criminals="张某"), "'criminals' must be a list, found \"张某\""),
        *(
            (cail(**dict[str, Any]({key: [value]})), f"{key!r} has {dump(value)}, {NO_ITEM}")
            for key, values in NO_ITEMS.items()
            for value in values
        ),
        (cail(months=-2), "'imprisonment' must be months, 0 or more, found -2"),
        (cail(death_penalty="no"), "'death_penalty' must be true or false, found 'no'"),
        *(
            (
                cail(punish_of_money=value),
                f"'punish_of_money' must be yuan, 0 or more, found {value!r}",
            )
            for value in ("abc", -5, True, "", [3])
        ),
        (cail(term_of_imprisonment=3), "'term_of_imprisonment' must be an object"),
        ({**cail(), "fact": " "}, "'fact' must be a text that is not empty"),
        ({"fact": "张某盗窃。", "meta": {}}, "the row has no 'term_of_imprisonment'"),
        (3, "expected a JSON object, found int"),
        (
            {"instruction": "判决", "output": "{}"},
            "its fields are instruction, output; only CAIL2018 (fact, meta) can be converted",
        ),
    ],
)
def test_a_row_that_cannot_be_converted_is_listed_with_place_and_reason(
    row: object, reason: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "mixed.jsonl", row, cail(), row)
    reported, rows = converted(path)
    assert reported == [f"{path}:{n}: not converted: {reason}" for n in (1, 3)]
    assert [row["id"] for row in rows] == [2]


def test_a_file_without_rows_to_convert_is_one_line_and_writes_nothing(tmp_path: Path) -> None:
    for path in (written(tmp_path / "x.jsonl", cail(months=-1)), written(tmp_path / "y.jsonl")):
        with pytest.raises(UserError, match=rf"{path}: has no rows that can be converted$"):
            convert(path, tmp_path / "out", print)
        assert not (tmp_path / "out").exists()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("甲\\ud800"),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)


@pytest.mark.parametrize(
    "key",
    [
        "criminals",
        "accusation",
        "relevant_articles",
        "punish_of_money",
        "imprisonment",
        "term_of_imprisonment",
    ],
)
@settings(max_examples=40)
@given(value=VALUES)
def test_any_value_is_converted_or_named(
    tmp_path_factory: pytest.TempPathFactory, key: str, value: Any
) -> None:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    row = cail(months=value) if key == "imprisonment" else cail(**{key: value})
    path.write_text("".join(json.dumps(r) + "\n" for r in [cail(), row]), "utf-8")
    converted(path)
