"""Rows of other formats become cases, or are named with the reason why they do not."""

import csv
import json
import random
import re
import tracemalloc
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from panjue.prompts.example import Example
from panjue.prompts.formats import Conversion, convert
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import dump
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.prompts.tasks.judgment.convert import (
    NO_TERM,
    ONLY_A_CLASS,
    SHORT_TERM,
    charge_name,
)
from panjue.prompts.tasks.judgment.demo import cases
from panjue.prompts.tasks.judgment.read import sentence
from panjue.prompts.tasks.judgment.repair import PENALTIES

TASK = load_task("judgment")


def converted(path: Path) -> tuple[Conversion, list[str], list[dict[str, Any]]]:
    """Return the counts, what was reported, and the rows of the new file."""
    out, reported = path.with_name("out.jsonl"), list[str]()
    result = convert(TASK.data, path, out, reported.append)
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert len(rows) == result.converted
    assert len(rows) + len(reported) == result.rows
    assert len(list(Reader(TASK).read(out))) == len(rows)
    return result, reported, rows


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


def test_a_case_of_cail2018_by_hand(tmp_path: Path) -> None:
    result, reported, rows = converted(written(tmp_path / "cail.jsonl", cail()))
    outcome = {
        "name": "张某",
        "penalty": sentence(imprisonment=10, fine=1000),
        "charges": ["盗窃罪"],
        "articles": ["264"],
    }
    case = {"id": 1, "fact": "张某盗窃。", "defendants": ["张某"], "outcomes": [outcome]}
    assert (rows, reported, dict(result.notes)) == ([case], [], {})


@pytest.mark.parametrize(
    ("changes", "penalty", "notes"),
    [
        ({"months": 6}, {"imprisonment": 6}, {}),
        ({"months": 300}, {"imprisonment": 300}, {}),
        ({"months": 5}, {"detention": 5}, {SHORT_TERM: 1}),
        ({"months": 1}, {"detention": 1}, {SHORT_TERM: 1}),
        ({"months": 0}, {}, {NO_TERM: 1}),
        ({"months": 0, "life_imprisonment": True}, {"life_imprisonment": True}, {}),
        ({"months": 0, "death_penalty": True}, {"death_penalty": True}, {}),
    ],
)
def test_terms_of_cail2018(
    changes: dict[str, Any], penalty: dict[str, Any], notes: dict[str, int], tmp_path: Path
) -> None:
    result, _, [row] = converted(written(tmp_path / "cail.jsonl", cail(**changes)))
    assert row["outcomes"][0]["penalty"] == sentence(**penalty, fine=1000)
    assert result.notes == notes


@pytest.mark.parametrize(
    ("accusation", "charge"),
    [
        ("盗窃", "盗窃罪"),
        ("盗窃罪", "盗窃罪"),
        ("[走私、贩卖、运输、制造]毒品", "走私、贩卖、运输、制造毒品罪"),
        ("非法[持有、私藏][枪支、弹药]", "非法持有、私藏枪支、弹药罪"),
    ],
)
def test_charges_of_cail2018(accusation: str, charge: str) -> None:
    assert charge_name(accusation) == charge


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            cail(criminals=["张某", "李某"]),
            "'criminals' has 2 names, and 'accusation' is not by name; only a case of one "
            "defendant can be converted",
        ),
        (cail(criminals=7), "'criminals' has the wrong type: 7"),
        (cail(accusation=[None]), "'accusation' has the wrong type: [None]"),
        (cail(relevant_articles=[264.5]), "'relevant_articles' has the wrong type: [264.5]"),
        (cail(months=-2), "'imprisonment' must be months, 0 or more, found -2"),
        (cail(death_penalty="no"), "'death_penalty' must be true or false, found 'no'"),
        (cail(term_of_imprisonment=3), "'term_of_imprisonment' must be an object"),
        ({**cail(), "fact": " "}, "'fact' must be a text that is not empty"),
        ({"fact": "张某盗窃。", "meta": {}}, "the row has no 'criminals'"),
        (3, "expected a JSON object, found int"),
        (
            {"text": "张某盗窃。", "label": 3},
            "its fields are text, label; the formats that can be converted are CAIL2018 (fact, "
            "meta), CAIL2018 without meta (accusation, fact), Alpaca (instruction, output), "
            "ShareGPT (conversations), OpenAI messages (messages), as JSON lines, a JSON list or "
            "CSV",
        ),
        (
            {"instruction": "判决", "output": "{}"},
            "the question has no 案件事实：… 被告人名单：…, so that the facts cannot be told from "
            "the instruction",
        ),
        (
            {"instruction": "判决", "input": "张某盗窃。", "output": "盗窃罪"},
            "the answer has no JSON with the names and judgments of defendants",
        ),
        (
            {"instruction": "判决", "input": "张某盗窃。", "output": '{"name": "张某"}'},
            "the judgment of 张某 has no charges, articles, penalty",
        ),
        (
            {
                "instruction": "判决",
                "input": "张某盗窃。",
                "output": '{"name": "张某", "charges": [], "articles": [], "penalty": "重"}',
            },
            "the penalty of 张某, '重', is no class of ours",
        ),
        (
            {"conversations": [{"from": "human", "value": "…"}]},
            "a conversation must be a question and its answer, found 1 turns",
        ),
        ({"conversations": "…"}, "the conversation must be a list of objects"),
    ],
)
def test_what_cannot_be_converted_is_listed_with_place_and_reason(
    row: object, reason: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "mixed.jsonl", row, cail(), row)
    result, reported, rows = converted(path)
    assert reported == [f"{path}:{n}: not converted: {reason}" for n in (1, 3)]
    assert [row["id"] for row in rows] == [2]
    assert (result.rows, result.converted) == (3, 1)


def test_a_file_of_which_nothing_can_be_converted_is_one_line(tmp_path: Path) -> None:
    path, out = written(tmp_path / "x.jsonl", cail(months=-1), cail(months=-2)), tmp_path / "out"
    with pytest.raises(UserError) as raised:
        convert(TASK.data, path, out, lambda _: pytest.fail("all is in the error"))
    reason = "'imprisonment' must be months, 0 or more, found -1"
    assert str(raised.value) == f"{path}: no row can be converted; the first, 1: {reason}"
    assert not out.exists()
    path.write_text("", "utf-8")
    with pytest.raises(UserError, match=r"x.jsonl: has no rows$"):
        convert(TASK.data, path, out, print)


def chats(example: Example) -> list[dict[str, Any]]:
    """Return an example as question and answer in every form that people train with."""
    [asked], reply = TASK.ask.prompt(example), TASK.ask.target(example)
    assert example.answer is not None
    submission = dump(TASK.data.write(example, example.answer))
    question, system = asked["content"], {"from": "system", "value": "你是法官。"}
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": reply}]
    messages = [asked, {"role": "assistant", "content": f"<think>盗窃？</think>{submission}"}]
    facts = {"from": "human", "value": example.text}
    return [
        {"instruction": question, "input": "", "output": reply},
        {"instruction": "判决：", "input": example.text, "output": f"```json\n{reply}\n```"},
        {"instruction": "判决：", "input": question, "output": submission, "history": []},
        {"conversations": turns},
        {"conversations": [system, facts, turns[1]]},
        {"system": "你是法官。", "conversations": [facts, turns[1]]},
        {"messages": messages},
    ]


def test_our_own_questions_and_answers_come_back_as_the_cases_they_were(tmp_path: Path) -> None:
    drawn = islice(cases(random.Random(0), 1, 5), 40)
    source = written(tmp_path / "cases.jsonl", *({"id": n, **c} for n, c in enumerate(drawn)))
    examples = list(Reader(TASK).read(source))
    rows = [row for example in examples for row in chats(example)]
    result, reported, _ = converted(written(tmp_path / "chats.jsonl", *rows))
    assert (reported, dict(result.notes)) == ([], {ONLY_A_CLASS: len(rows)})
    wanted = [(e.text, e.names, e.answer) for e in examples for _ in chats(e)]
    found = [(e.text, e.names, e.answer) for e in Reader(TASK).read(tmp_path / "out.jsonl")]
    assert found == wanted


def test_an_answer_may_be_official_outcomes(tmp_path: Path) -> None:
    penalty = sentence(imprisonment=7)
    outcome = {"name": "甲", "penalty": penalty, "charges": ["盗窃罪"], "articles": ["264"]}
    row = {"instruction": "判决", "input": "甲盗窃。", "output": dump({"outcomes": [outcome]})}
    result, _, [case] = converted(written(tmp_path / "x.jsonl", row))
    assert case == {"id": 1, "fact": "甲盗窃。", "defendants": ["甲"], "outcomes": [outcome]}
    assert not result.notes


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a case of CAIL2018 without the nested objects."""
    meta = dict(row["meta"])
    return {"fact": row["fact"], **meta.pop("term_of_imprisonment"), **meta}


def test_csv_lists_and_flat_fields_are_read_alike(tmp_path: Path) -> None:
    drugs = cail(accusation=["[走私、贩卖]毒品", "盗窃"], relevant_articles=[347, 264])
    nested = [cail(), drugs, cail(months=0, life_imprisonment=True)]
    _, _, wanted = converted(written(tmp_path / "cail.jsonl", *nested))
    texts = {"accusation": "[走私、贩卖]毒品;盗窃", "relevant_articles": "347；264"}
    one = {"criminals": "张某", "accusation": "盗窃", "relevant_articles": "264"}
    by_hand = [{**flat(nested[0]), **one}, {**flat(drugs), **texts}, flat(nested[2])]
    for rows in (list(map(flat, nested)), nested, by_hand):
        (tmp_path / "list.json").write_text(json.dumps(rows, indent=1), "utf-8")
        with (tmp_path / "table.csv").open("w", encoding="utf-8-sig", newline="") as file:
            table = csv.DictWriter(file, rows[0])
            table.writeheader()
            table.writerows(rows)  # lists and objects as Python writes them, like pandas
        for name in ("list.json", "table.csv"):
            _, reported, found = converted(tmp_path / name)
            assert (found, reported) == (wanted, []), name


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("甲\\ud800"),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)
KEYS = re.findall(
    r"\w+",
    "fact meta criminals accusation relevant_articles term_of_imprisonment death_penalty "
    "life_imprisonment imprisonment punish_of_money instruction input output conversations "
    "messages system from value role content name charges articles penalty",
)
OBJECTS = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=8)
INNER = OBJECTS | st.lists(OBJECTS, max_size=3)
ROWS = st.dictionaries(st.sampled_from(KEYS), VALUES | INNER | INNER.map(dump), max_size=8)


@settings(max_examples=100)
@given(ROWS)
def test_any_row_is_converted_or_named(
    tmp_path_factory: pytest.TempPathFactory, row: dict[str, Any]
) -> None:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in (cail(), row)), "utf-8")
    converted(path)


@pytest.mark.parametrize("key", ["criminals", "accusation", "relevant_articles", "imprisonment"])
@settings(max_examples=40)
@given(value=VALUES)
def test_any_value_of_cail2018_is_converted_or_named(
    tmp_path_factory: pytest.TempPathFactory, key: str, value: Any
) -> None:
    path, row = tmp_path_factory.mktemp("rows") / "rows.jsonl", cail()
    path.write_text(
        "".join(json.dumps(r) + "\n" for r in [row, {**flat(row), key: value}]), "utf-8"
    )
    converted(path)


def test_half_a_character_within_an_answer_is_named(tmp_path: Path) -> None:
    answer = '{"name": "\\ud800", "charges": [], "articles": [], "penalty": 3}'
    row = {"instruction": "判决", "input": "事实", "output": answer}
    _, [fault], _ = converted(written(tmp_path / "x.jsonl", cail(), row))
    assert fault.endswith("a lone \\ud800-\\udfff escape is only half a character")


def test_a_broken_csv_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cail.csv"
    head = "fact,criminals,accusation,relevant_articles,imprisonment,death_penalty,"
    rows = ["life_imprisonment", "甲盗窃。,甲,盗窃,264,7,FALSE,false", "甲盗窃。,甲", ""]
    path.write_text(head + "\n".join(rows), "utf-8")
    _, reported, _ = converted(path)
    reason = "it has more or fewer cells than the header"
    assert reported == [f"{path}:row 2: not converted: {reason}"]
    path.write_bytes((head + "\n".join(rows)).encode("gb18030"))
    with pytest.raises(UserError, match=r"cail.csv: not UTF-8; save the file as UTF-8$"):
        converted(path)


def test_one_row_at_a_time_is_in_memory(tmp_path: Path) -> None:
    row = dump({**cail(), "fact": "张某盗窃。" * 400}) + "\n"
    path = tmp_path / "cail.jsonl"
    path.write_text(row * 1000, "utf-8")
    tracemalloc.start()
    result = convert(TASK.data, path, tmp_path / "out.jsonl", print)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert result.converted == 1000
    assert peak < path.stat().st_size / 5


def test_every_penalty_of_ours_is_read(tmp_path: Path) -> None:
    judged = [
        {"name": f"甲{n}", "charges": ["盗窃罪"], "articles": ["264"], "penalty": penalty}
        for n, penalty in enumerate(PENALTIES)
    ]
    row = {"instruction": "判决", "input": "事实", "output": dump({"judgments": judged})}
    converted(written(tmp_path / "x.jsonl", row))
    [example] = Reader(TASK).read(tmp_path / "out.jsonl")
    assert example.answer == {"judgments": judged}
