"""Ten rows of each source, in the form in which it is published: what is read, what is left out."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from panjue.prompts.convert import Conversion, convert, left_out_path
from panjue.prompts.forms.record import NO_UNIT, SEVERAL
from panjue.prompts.forms.values import json_values
from panjue.prompts.plumbing.errors import NotSaid, UserError
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from tests.prompts.test_cli import Panjue
from tests.prompts.test_convert import converted, dumped, left_out, lines, written

Row = dict[str, Any]


def readable(done: Conversion, task: str = "judgment") -> list[Any]:
    """Return the answers that the task's reader finds in the file; no case has a note."""
    examples = list(Reader(load_task(task)).read(done.out))
    assert [note for example in examples for note in example.notes] == []
    return [example.answer for example in examples]


def persons(done: Conversion) -> list[list[tuple[Any, ...]]]:
    """Return name, charges, articles and the penalty that is not 0, of each person of each case."""
    readable(done)
    cases = []
    for row in written(done.out):
        made = []
        for one in row["outcomes"]:
            served = {k: v for k, v in one["penalty"].items() if v and not k.startswith("fine")}
            made.append((one["name"], one["charges"], one["articles"], served))
        cases.append(made)
    return cases


def cail(accusation: list[str], articles: list[int], months: int, **other: Any) -> Row:
    term = {"death_penalty": False, "imprisonment": months, "life_imprisonment": False}
    meta = {
        "relevant_articles": articles,
        "accusation": accusation,
        "punish_of_money": other.pop("money", 0),
        "criminals": other.pop("criminals", ["段某"]),
        "term_of_imprisonment": {**term, **other},
    }
    return {"fact": "公诉机关指控，被告人段某伤人。", "meta": meta}


CAIL2018 = [
    cail(["故意伤害"], [234], 12),
    cail(["[走私、贩卖、运输、制造]毒品"], [347], 180, money=5000),
    cail(["盗窃", "[掩饰、隐瞒][犯罪所得、犯罪所得收益]"], [264, 312], 24),
    cail(["故意杀人"], [232], 0, death_penalty=True),
    cail(["抢劫"], [263], 0, life_imprisonment=True),
    cail(["滥伐林木"], [345], 0, money=3000),
    cail(["盗窃"], [264], 4),
    cail(["危险驾驶"], [133], 8),
    cail(["盗窃"], [264], 12, criminals=["段某", "王某"]),
    cail(["走私"], [151], 36),
]
CAIL_LEFT = [
    "7: 1 to 6 months: 拘役 or 有期徒刑, which the source does not say",
    "8: an article of which the source drops 之一: '危险驾驶罪 133.1'",
    "9: several defendants, whose judgments the source does not tell apart",
    "10: an unknown charge: '走私'",
]


def test_cail2018(tmp_path: Path) -> None:
    done = converted(tmp_path, lines(CAIL2018))
    assert persons(done) == [
        [("段某", ["故意伤害罪"], ["234"], {"imprisonment": 12})],
        [("段某", ["走私、贩卖、运输、制造毒品罪"], ["347"], {"imprisonment": 180})],
        [("段某", ["盗窃罪", CONCEAL], ["264", "312"], {"imprisonment": 24})],
        [("段某", ["故意杀人罪"], ["232"], {"death_penalty": True})],
        [("段某", ["抢劫罪"], ["263"], {"life_imprisonment": True})],
        [("段某", ["滥伐林木罪"], ["345"], {})],
    ]
    assert left_out(done.out) == CAIL_LEFT


CONCEAL = "掩饰、隐瞒犯罪所得、犯罪所得收益罪"


def test_the_hub_s_copy_of_cail2018(tmp_path: Path) -> None:
    """Its rows have the fields of `meta` beside the facts."""
    rows = [
        {"fact": row["fact"], **row["meta"], **row["meta"]["term_of_imprisonment"]}
        for row in CAIL2018
    ]
    for row in rows:
        del row["term_of_imprisonment"]
    done = converted(tmp_path, lines(rows))
    assert (done.form.title, done.written) == ("CAIL2018", 6)
    assert left_out(done.out) == CAIL_LEFT


def criminal(accusations: list[str], laws: list[int], term: str) -> Row:
    return {"accusations": accusations, "laws": laws, "states": [3, 6], "term": term}


def ljp(*criminals: Row) -> Row:
    infos = {f"[被告{'ABC'[number]}]": info for number, info in enumerate(criminals)}
    fact = f"<LOC>区人民检察院指控：被告人{'、'.join(infos)}……"
    return {"fact": fact, "interpretation": "本院认为", "laws": [303], "criminals_info": infos}


GAMBLING = (["开设赌场罪"], [303])
MULTILJP = [
    ljp(criminal(*GAMBLING, "有期徒刑六个月"), criminal(*GAMBLING, "拘役四个月，")),
    ljp(criminal(*GAMBLING, "有期徒刑一年三个月，并处罚金人民币五千元")),
    ljp(criminal(*GAMBLING, "有期徒刑三年，缓刑四年"), criminal(*GAMBLING, "管制一年")),
    ljp(criminal(["盗窃罪", "诈骗罪"], [264, 266], "有期徒刑十年零六个月")),
    ljp(criminal(["故意杀人罪"], [232], "死刑，缓期二年执行，")),
    ljp(criminal(["抢劫罪"], [263], "无期徒刑")),
    ljp(criminal(*GAMBLING, "单处罚金人民币五千元")),
    ljp(criminal(*GAMBLING, "")),
    ljp(criminal(["帮助信息网络犯罪活动罪"], [287], "有期徒刑八个月")),
    ljp(criminal(*GAMBLING, "有期徒刑一年"), criminal([], [303], "拘役四个月")),
]


def test_multiljp(tmp_path: Path) -> None:
    done = converted(tmp_path, lines(MULTILJP))
    served = [[person[3] for person in case] for case in persons(done)]
    assert served == [
        [{"imprisonment": 6}, {"detention": 4}],
        [{"imprisonment": 15}],
        [{"imprisonment": 36}, {"surveillance": 12}],
        [{"imprisonment": 126}],
        [{"death_penalty": True}],
        [{"life_imprisonment": True}],
        [{}],
    ]
    assert persons(done)[0][1][:3] == ("[被告B]", ["开设赌场罪"], ["303"])
    assert left_out(done.out) == [
        "8: a person without a penalty",
        "9: an article of which the source drops 之一: '帮助信息网络犯罪活动罪 287.2'",
        "10: a person without a crime",
    ]


JUSTICE = "index,date,verdict,defendant,accusation,defendant_accusation,fact,defendant_judgement,"
JUSTICE += "relevant_article,imprisonment\n"


def justice(*cells: str) -> str:
    index, name, charges, judged, articles, months = cells
    own = f'{index},2019-01-01,判决,{name},"{charges}","{charges}",第{index}案的事实,'
    return f'{own}"{judged}","{articles}",{months}\n'


def test_multijustice(tmp_path: Path) -> None:
    """A row is a defendant; charges and articles are lists of Python, months are floats."""
    rows = [
        justice(
            "1", "胡某", "['走私、贩卖、运输、制造毒品']", "有期徒刑三年", "[347.0, 356.0]", "36.0"
        ),
        justice(
            "2",
            "王某",
            "['盗窃', '诈骗']",
            "数罪并罚，决定执行有期徒刑二年",
            "[264.0, 266.0]",
            "24.0",
        ),
        justice("3", "甲某", "['非法拘禁']", "判处拘役五个月", "[238.0]", "5.0"),
        justice(
            "3", "乙某", "['非法拘禁']", "被告人乙某犯非法拘禁罪，判处管制一年", "[238.0]", "12.0"
        ),
        justice("4", "丙某", "['抢劫']", "", "[263.0]", "40.0"),
        justice("5", "丙某", "['抢劫']", "", "[263.0]", "5.0"),
        justice("6", "丁某", "['抢劫']", "有期徒刑三年", "[263.0]", "40.0"),
        justice("7", "戊某", "['抢劫']", "被告人己某犯抢劫罪，判处有期徒刑三年", "[263.0]", "36.0"),
        justice("8", "庚某", "['编的罪']", "有期徒刑三年", "[263.0]", "36.0"),
        justice("9", "辛某", "['抢劫']", "有期徒刑三年", "[]", "36.0"),
    ]
    done = converted(tmp_path, JUSTICE + "".join(rows))
    assert persons(done) == [
        [("胡某", ["走私、贩卖、运输、制造毒品罪"], ["347", "356"], {"imprisonment": 36})],
        [("王某", ["盗窃罪", "诈骗罪"], ["264", "266"], {"imprisonment": 24})],
        [
            ("甲某", ["非法拘禁罪"], ["238"], {"detention": 5}),
            ("乙某", ["非法拘禁罪"], ["238"], {"surveillance": 12}),
        ],
        [("丙某", ["抢劫罪"], ["263"], {"imprisonment": 40})],
    ]
    assert [reason.partition(": ")[2].partition(": '")[0] for reason in left_out(done.out)] == [
        "1 to 6 months: 拘役 or 有期徒刑, which the source does not say",
        "two penalties that differ",
        "the penalty of another person",
        "an unknown charge",
        "no article of a crime is named",
    ]


def judgment(
    verdict: str, cited: str = "《中华人民共和国刑法》第二百六十四条、第六十七条第三款之规定"
) -> Row:
    opinion = "某某区人民法院 刑事判决书 被告人…… 其行为触犯了《刑法》第二百六十六条。"
    whole = f"{opinion}依照{cited}，判决如下：{verdict}"
    return {
        "ajId": "a",
        "ajName": "盗窃一案",
        "ajjbqk": " 公诉机关指控……",
        "pjjg": verdict,
        "qw": whole,
    }


LECARD = [
    judgment(" 一、被告人程某某犯盗窃罪，判处有期徒刑十个月，并处罚金人民币一千元。"),
    judgment(
        "被告人程某某犯盗窃罪，判处拘役3个月；被告人李某犯盗窃罪，判处拘役四个月，缓刑六个月。"
    ),
    judgment(
        "被告人程某某犯盗窃罪，判处有期徒刑一年；犯诈骗罪，判处有期徒刑二年，决定执行有期徒刑二年六个月。",
        "《中华人民共和国刑法》第二百六十四条、第二百六十六条、第六十九条，《最高人民法院解释》第一条之规定",
    ),
    judgment(
        "被告人程某某犯帮助信息网络犯罪活动罪，单处罚金人民币五千元。",
        "《中华人民共和国刑法》第二百八十七条之二第一款之规定",
    ),
    judgment(
        "被告人程某某犯盗窃罪，判处有期徒刑一年；被告人李某犯诈骗罪，判处有期徒刑一年。",
        "《中华人民共和国刑法》第二百六十四条、第二百六十六条之规定",
    ),
    judgment("驳回上诉，维持原判。"),
    judgment("被告人程某某犯盗窃罪，判处有期徒刑一年；犯诈骗罪，判处有期徒刑二年。"),
    judgment("准许撤回起诉。"),
    judgment("被告人程某某无罪。"),
    judgment("被告人程某某犯盗窃罪，免予刑事处罚。", "《中华人民共和国刑事诉讼法》第二百条之规定"),
]


def test_lecard_is_a_folder_of_files(tmp_path: Path) -> None:
    for number, row in enumerate(LECARD):
        path = tmp_path / f"candidates/{number // 4}/{number}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dumped({**row, "writId": f"w{number}"}), "utf-8")
    done = convert(tmp_path / "candidates", tmp_path / "out.jsonl")
    assert done.form.title == "LeCaRD"
    assert persons(done) == [
        [("程某某", ["盗窃罪"], ["264"], {"imprisonment": 10})],
        [
            ("程某某", ["盗窃罪"], ["264"], {"detention": 3}),
            ("李某", ["盗窃罪"], ["264"], {"detention": 4}),
        ],
        [("程某某", ["盗窃罪", "诈骗罪"], ["264", "266"], {"imprisonment": 30})],
        [("程某某", ["帮助信息网络犯罪活动罪"], ["287.2-1"], {})],
    ]
    assert [row["id"] for row in written(done.out)] == ["w0", "w1", "w2", "w3"]
    assert done.left_out == {
        "articles of several persons together": 1,
        "an acquittal, an appeal, a proposal or an earlier conviction": 3,
        "several crimes and no 决定执行": 1,
        "no article of a crime is named": 1,
    }


REPLIES = {
    "被告人张某犯盗窃罪，判处有期徒刑3年。《刑法》第264条。": [({"imprisonment": 36}, ["264"])],
    "被告人张某犯盗窃罪，判处有期徒刑叁年。依照刑法第二百六十四条": [
        ({"imprisonment": 36}, ["264"])
    ],
    "被告人张某犯掩饰、隐瞒犯罪所得罪，判处拘役3个月，缓刑6个月。刑法第312条第1款": [
        ({"detention": 3}, ["312-1"])
    ],
    "被告人：张某\n罪名：开设赌场罪\n法条：第303条第二款\n刑期：三年六个月有期徒刑": [
        ({"imprisonment": 42}, ["303-2"])
    ],
    "<think>…</think>被告人张某、李某犯赌博罪，均判处管制一年。刑法第三百零三条第一款": [
        ({"surveillance": 12}, ["303-1"]),
        ({"surveillance": 12}, ["303-1"]),
    ],
    '[{"name": "张某", "charges": "盗窃、诈骗罪", "articles": [264, "266条"], "months": 7}]': [
        ({"imprisonment": 7}, ["264", "266"])
    ],
    "被告人张某犯盗窃罪，判处有期徒刑三年，并处罚金五千元。": "no article of a crime is named",
    "被告人张某犯盗窃罪，判处三年以上徒刑。刑法第264条": "a penalty that cannot be read",
    '[{"name": "张某", "charges": ["盗窃罪"], "articles": [264], "penalty": 8}]': NO_UNIT,
    "对不起，我不能回答。": "no person with a crime",
}
"""Reply -> penalty and articles of each person; or why it is left out."""

CHATS: dict[str, Any] = {
    "Alpaca": lambda reply: {
        "instruction": "判决",
        "input": "事实。",
        "output": reply,
        "history": [],
    },
    "ShareGPT": lambda reply: {
        "id": str(abs(hash(reply))),
        "conversations": [
            {"from": "system", "value": "你是法官"},
            {"from": "human", "value": "事实。"},
            {"from": "gpt", "value": reply},
        ],
    },
    "OpenAI's messages": lambda reply: {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "事实。"}]},
            {"role": "assistant", "content": reply},
        ]
    },
}


@pytest.mark.parametrize("form", CHATS)
def test_replies_of_other_trainers(form: str, tmp_path: Path) -> None:
    done = converted(tmp_path, dumped([CHATS[form](reply) for reply in REPLIES]))
    assert done.form.title == form
    read = [[(one[3], one[2]) for one in case] for case in persons(done)]
    assert read == [said for said in REPLIES.values() if isinstance(said, list)]
    expected = [said for said in REPLIES.values() if isinstance(said, str)]
    assert [reason.split(": ")[1] for reason in left_out(done.out)] == expected


def test_an_instruction_that_becomes_part_of_all_facts_is_named(tmp_path: Path) -> None:
    def told(asked: str, rows: int) -> list[str]:
        chats = [
            {
                "conversations": [
                    {"from": "human", "value": f"{asked}{number}月，张某入户盗窃。"},
                    {"from": "gpt", "value": next(iter(REPLIES))},
                ]
            }
            for number in range(rows)
        ]
        done = converted(tmp_path, dumped(chats))
        assert [row["fact"] for row in written(done.out)] == [
            chat["conversations"][0]["value"] for chat in chats
        ]
        return [line for line in done.lines() if "question" in line]

    instruction = "请阅读以下案情，只用 JSON 回答。\n案情："
    [note] = told(instruction, 10)
    assert note == "note: all questions begin with '请阅读以下案情，只用 J'…, and so do the facts;"
    assert not told(instruction, 9)
    assert not told("经审理查明：", 10)


def test_a_dialogue_of_several_turns_is_left_out(tmp_path: Path) -> None:
    good = CHATS["ShareGPT"](next(iter(REPLIES)))
    long = {**good, "id": "2", "conversations": good["conversations"][1:] * 2}
    done = converted(tmp_path, lines([good, long]))
    assert left_out(done.out) == ["2: a dialogue of several turns"]


PERSONS = """编号,案情,被告人,罪名,法条,刑期
1,张某盗窃。,张某,盗窃罪,264,有期徒刑三年
1,张某盗窃。,李某,盗窃罪;诈骗罪,264;266,拘役3个月
2,王某偷窃。,王某,掩饰、隐瞒犯罪所得罪,第三百一十二条第一款,单处罚金2000元
3,赵某偷窃。,赵某,盗窃罪,264,36
4,钱某偷窃。,钱某;孙某,盗窃罪,264,有期徒刑一年
5,周某偷窃。,周某,,264,有期徒刑一年
6,吴某偷窃。,吴某,盗窃罪,264,
7,郑某偷窃。,郑某,盗窃罪,道路交通安全法第九十一条,有期徒刑一年
8,冯某偷窃。,冯某,盗窃罪,264,有期徒刑一年
9,陈某偷窃。,陈某,盗窃罪,264,有期徒刑一年,多一格
"""


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "gb18030", "utf-16"])
def test_tables_of_persons(encoding: str, tmp_path: Path) -> None:
    done = converted(tmp_path, PERSONS.replace(",", "\t").encode(encoding))
    assert [[one[1:] for one in case] for case in persons(done)] == [
        [
            (["盗窃罪"], ["264"], {"imprisonment": 36}),
            (["盗窃罪", "诈骗罪"], ["264", "266"], {"detention": 3}),
        ],
        [(["掩饰、隐瞒犯罪所得罪"], ["312-1"], {})],
    ]
    assert done.left_out == {
        NO_UNIT: 1,
        SEVERAL: 1,
        "a person without a crime": 1,
        "a person without a penalty": 1,
        "an article that cannot be read, or of another law": 1,
        "a row beside it cannot be read: a person may be missing": 1,
        "another number of cells than the header": 1,
    }
    assert (done.rows, done.written) == (10, 2)


MERGED = {
    "id and facts": (["编号,案情,被告人", "2,乙丙盗窃。,乙", ",,丙"], "an id"),
    "id": (["编号,案情,被告人", "2,乙丙盗窃。,乙", ",乙丙盗窃。,丙"], "an id"),
    "facts": (["案情,被告人", "乙丙盗窃。,乙", ",丙"], "facts"),
}


@pytest.mark.parametrize("cells", MERGED)
def test_below_merged_cells_nobody_is_missing_from_a_case(cells: str, tmp_path: Path) -> None:
    [header, *rows], missing = MERGED[cells]
    others = ["戊盗窃。,戊", "己盗窃。,己"]
    if "编号" in header:
        others = [f"{number},{row}" for number, row in enumerate(others, start=3)]
    done = converted(tmp_path, "\n".join([header, *rows, *others]))
    assert [row["defendants"] for row in written(done.out)] == [["己"]]
    reason = f"a row without {missing}; fill merged cells in"
    beside = "a row beside it cannot be read: a person may be missing"
    assert left_out(done.out) == [f"2: {beside}", f"3: {reason}", f"4: {beside}"]


def test_a_table_of_other_columns_is_told_ours(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"have 案件号, 情况; .*columns of a table are 编号"):
        converted(tmp_path, "案件号,情况\n1,甲盗窃。\n")


def test_rows_of_a_case_need_not_follow_each_other(tmp_path: Path) -> None:
    table = "id,fact,name\n1,甲乙盗窃。,甲\n2,丙盗窃。,丙\n1,甲乙盗窃。,乙\n"
    table += "3,另一案。,丁\n3,不同。,戊\n"
    done = converted(tmp_path, table)
    assert [(row["id"], row["defendants"]) for row in written(done.out)] == [
        (2, ["丙"]),
        (1, ["甲", "乙"]),
    ]
    assert left_out(done.out) == ["5: rows of one id with different facts"]


FACT = "被告人张某，男，与王某等三人及买买提·吐尔逊贩卖甲基苯丙胺，张和平、李　某在场。"
NOT_ALL = "several persons in one field, and not all of them in the facts"
WITHOUT_JUDGMENT = [
    (["张某", "王某"], ["张某", "王某"]),
    (["赵某"], ["赵某"]),  # a list is taken as it is; `sft` and `check` say who is not in the facts
    ("张某", ["张某"]),
    ("赵某", ["赵某"]),
    ("张和平", ["张和平"]),
    ("张某、王某", ["张某", "王某"]),
    (" 张某; 李某 ", ["张某", "李某"]),
    ("买买提•吐尔逊、李某", ["买买提•吐尔逊", "李某"]),
    ('["张某", "王某"]', ["张某", "王某"]),
    *[(text, f"{SEVERAL}: '{text}'") for text in ("张某、王某等三人", "张某等")],
    *[(text, f"{SEVERAL}: '{text}'") for text in ("张某,男", "张某，男，汉族", "、张某")],
    *[(text, f"{SEVERAL}: '{text}'") for text in ("张某和王某", "张某/王某")],
    ("张某、赵某", f"{NOT_ALL}: '赵某'"),
    ("甲、张某", f"{NOT_ALL}: '甲'"),
    (["张某", "王某、张某"], f"{SEVERAL}: '王某、张某'"),
    ([], "no person is named"),
    ("[]", "no person is named"),
    ([1], "no person is named: '1'"),
]


@pytest.mark.parametrize(("said", "expected"), WITHOUT_JUDGMENT)
def test_a_case_without_a_judgment_may_have_all_its_persons_in_one_row(
    said: Any, expected: list[str] | str, tmp_path: Path
) -> None:
    rows = [
        {"编号": 1, "案情": FACT, "被告人": said},
        {"编号": 2, "案情": "甲盗窃。", "被告人": "甲"},
    ]
    done = converted(tmp_path, lines(rows))
    others = [{"id": 2, "fact": "甲盗窃。", "defendants": ["甲"]}]
    if isinstance(expected, str):
        assert written(done.out) == others
        assert left_out(done.out) == [f"1: {expected}"]
    else:
        assert written(done.out) == [{"id": 1, "fact": FACT, "defendants": expected}, *others]


def test_empty_columns_of_the_judgment_are_to_be_removed(tmp_path: Path) -> None:
    rows = ["张某,,", "李某,盗窃罪,", "王某,盗窃罪,264"]
    table = "".join(f"{name},甲盗窃。,{row},拘役2个月\n" for name, row in enumerate(rows[1:]))
    table = f"编号,案情,被告人,罪名,法条,刑期\n9,甲盗窃。,{rows[0]},\n{table}"
    done = converted(tmp_path, table)
    assert done.written == 1
    assert list(done.left_out) == [
        "empty columns of the judgment; remove them if there are no answers",
        "no article of a crime is named",
    ]


def test_of_several_rows_of_a_case_each_has_one_person(tmp_path: Path) -> None:
    everybody = ["张某", "王某"]
    row = {"id": 1, "fact": FACT, "name": everybody}
    done = converted(tmp_path, lines([row, row, {"id": 2, "fact": FACT, "name": "张某"}]))
    assert [case["defendants"] for case in written(done.out)] == [["张某"]]
    assert left_out(done.out) == [f"1: {SEVERAL}: {str(everybody)!r}"]


def studio(number: int, result: list[Row], **other: Any) -> Row:
    return {
        "id": number,
        "data": {"text": f"第{number}案。"},
        "annotations": [{"result": result, **other}],
    }


def control(name: str, **value: Any) -> Row:
    return {"from_name": name, "to_name": "text", "type": "choices", "value": value}


def chosen(term: str) -> list[Row]:
    return [
        control("被告人", text=["张某"]),
        control("罪名", choices=["盗窃罪", "诈骗罪"]),
        control("法条", choices=["264", "266"]),
        control("刑期", text=[term]),
    ]


def test_label_studio(tmp_path: Path) -> None:
    verdict = "被告人张某犯盗窃罪，判处有期徒刑一年。刑法第264条"
    twice = studio(4, chosen("拘役一个月"))
    twice["annotations"] *= 2
    unlike = studio(5, chosen("拘役一个月"))
    unlike["annotations"] += studio(5, chosen("拘役二个月"))["annotations"]
    known, unlike_data = (studio(number, chosen("拘役一个月")) for number in (11, 12))
    known["data"]["刑期"] = "拘役一个月"
    unlike_data["data"]["刑期"] = "拘役二个月"
    rows = [
        studio(1, chosen("有期徒刑三年")),
        studio(2, [control("判决书", text=[verdict])]),
        {**studio(3, chosen("拘役一个月")), "predictions": [], "meta": {}},
        twice,
        unlike,
        {"id": 6, "data": {"text": "未标注"}, "annotations": []},
        studio(7, chosen("拘役一个月"), was_cancelled=True),
        studio(8, [control("label", start=0, end=2, text="张某", labels=["人"])]),
        studio(9, chosen("三年")),
        {"id": 10, "data": {"image": "x.png"}, "annotations": [{"result": chosen("拘役一个月")}]},
        known,
        unlike_data,
    ]
    done = converted(tmp_path, dumped(rows))
    assert [row["id"] for row in written(done.out)] == [1, 2, 3, 4, 11]
    assert persons(done)[0] == [
        ("张某", ["盗窃罪", "诈骗罪"], ["264", "266"], {"imprisonment": 36})
    ]
    assert [reason.split(": ")[1] for reason in left_out(done.out)] == [
        "annotations that differ",
        "a task without an annotation",
        "a task without an annotation",
        "spans, which name no person's judgment",
        "a penalty that cannot be read",
        "no facts, or no person and no judgment in words",
        "two columns of one meaning differ",
    ]


TEXT = "被告人张某于2015年盗窃三次。"


def test_cmrc2018(tmp_path: Path) -> None:
    questions = [
        {"query_id": f"DEV_0_{n}", "query_text": f"问题{n}？", "answers": ["张某", "被告人张某"]}
        for n in range(8)
    ]
    questions.append({"query_id": "DEV_0_8", "query_text": "谁？", "answers": ["李某"]})
    questions.append({"query_id": "DEV_0_0", "query_text": "谁？", "answers": ["张某"]})
    document = {"context_id": "DEV_0", "context_text": TEXT, "title": "盗窃", "qas": questions}
    done = converted(tmp_path, dumped([document]), task="reading")
    assert readable(done, "reading") == [{"type": "span", "answer": "张某"}] * 8
    assert left_out(done.out) == [
        "row 1: an answer that is not in the text: '李某'",
        "row 1: an id that was there before: 'DEV_0_0'",
    ]
    [document] = json.loads(done.out.read_text("utf-8"))["data"]  # one text, all its questions
    assert len(document["paragraphs"][0]["qas"]) == 8


def test_flat_rows_of_squad(tmp_path: Path) -> None:
    def row(number: int, **other: Any) -> Row:
        return {"id": str(number), "title": "", "context": TEXT, "question": "谁？", **other}

    rows = [row(n, answers={"text": ["张某"], "answer_start": [3]}) for n in range(5)]
    rows += [
        row(5, answers={"text": [], "answer_start": []}),
        row(6, answers=[{"text": "三次", "answer_start": 11}]),
        row(7),
        row(8, answers={"text": ["赵某"], "answer_start": [0]}),
        row(9, answers=[[{"text": "张某"}, {"text": "三次"}]]),
    ]
    done = converted(tmp_path, lines(rows), task="reading")
    span = [{"type": "span", "answer": "张某"}] * 5
    rest = [{"type": "unknown", "answer": ""}, {"type": "span", "answer": "三次"}, None]
    assert readable(done, "reading") == [*span, *rest]
    assert done.left_out == {
        "an answer that is not in the text": 1,
        "several spans, or answers that cannot be read": 1,
    }


@pytest.mark.parametrize(
    "number", [3, 3.0, 1234567, 1234567.5, 1234567890123456.0, 110101199003072316]
)
def test_an_answer_of_squad_may_be_a_number(tmp_path: Path, number: float) -> None:
    text = f"{number}".removesuffix(".0")
    row = {"id": "1", "context": f"盗窃{text}元", "question": "多少？", "answers": [number]}
    done = converted(tmp_path, lines([row]), task="reading")
    assert readable(done, "reading") == [{"type": "span", "answer": text}]


def test_documents_of_reading_come_back_as_they_were(tmp_path: Path) -> None:
    sample = Path(load_task.__code__.co_filename).parent / "tasks/reading/sample.json"
    before = list(Reader(load_task("reading")).read(sample))
    done = converted(tmp_path, sample.read_bytes(), task="reading")
    assert list(Reader(load_task("reading")).read(done.out)) == before


CASES_27 = Path(__file__).parents[3] / "shared/cases/27_files_that_are_not_named"


@pytest.mark.skipif(not CASES_27.is_dir(), reason="no ../shared/cases")
@pytest.mark.parametrize(
    ("name", "task", "count"),
    [
        ("pretty.json", "judgment", 1),
        ("two_on_a_line.jsonl", "judgment", 2),
        ("jsonp.txt", "judgment", 1),
        ("hf_squad.jsonl", "reading", 1),
        ("cmrc2018_raw.json", "reading", 1),
        ("cail2021_multi.json", "reading", 0),
        ("label_studio.json", "judgment", 0),
    ],
)
def test_files_of_the_reports(name: str, task: str, count: int, tmp_path: Path) -> None:
    if not count:
        with pytest.raises(UserError, match="none of its 1 rows says all that a case needs"):
            convert(CASES_27 / name, tmp_path / "out", task)
        return
    assert convert(CASES_27 / name, tmp_path / "out", task).written == count


# What the user types, sees, and finds on disk.


def test_the_command_says_what_was_written_and_left_out(tmp_path: Path, panjue: Panjue) -> None:
    path, out = tmp_path / "data.json", tmp_path / "train.jsonl"
    path.write_text(dumped([CHATS["Alpaca"](reply) for reply in REPLIES]), "utf-8")
    done = panjue("convert", path, out)
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        f"{path}: Alpaca (JSON, UTF-8), 10 rows",
        f"written: {out}, 6 cases",
        f"left out: 4, listed in {out}.left-out.jsonl",
        "  1  no article of a crime is named",
        "  1  a penalty that cannot be read",
        f"  1  {NO_UNIT}",
        "  1  no person with a crime",
    ]
    assert written(left_out_path(out))[0] == {
        "file": str(path),
        "place": "row 7",
        "reason": "no article of a crime is named",
    }


BIG5 = "被告人張三犯竊盜罪，處有期徒刑三年。".encode("big5") * 9


def test_check_reads_the_cases(tmp_path: Path, panjue: Panjue) -> None:
    task = load_task("judgment")
    done = converted(tmp_path, dumped([CHATS["Alpaca"](reply) for reply in REPLIES]))
    with task.data.submission.writing(tmp_path / "submission.jsonl") as write:
        for example in Reader(task).read(done.out):
            write(task.gold(example))
    checked = panjue("check", tmp_path / "submission.jsonl", "--cases", done.out)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert checked.stdout.endswith(": clean\n")


BOTH = {"instruction": "判决", "output": "甲", "conversations": []}


def test_a_row_of_two_forms_is_not_guessed(tmp_path: Path, panjue: Panjue) -> None:
    path = tmp_path / "both.jsonl"
    path.write_text(dumped(BOTH), "utf-8")
    done = panjue("convert", path, tmp_path / "out")
    told = "is Alpaca and ShareGPT at once; say which: --form alpaca or --form sharegpt"
    assert (done.returncode, done.stderr) == (2, f"panjue: {path}:1: {told}\n")
    reply = next(iter(REPLIES))
    path.write_text(dumped({**BOTH, "output": reply}), "utf-8")
    assert panjue("convert", path, tmp_path / "out", "--form", "alpaca").returncode == 0


@pytest.mark.parametrize(
    ("content", "options", "told"),
    [
        (
            '{"x": 1}',
            {},
            "is of no form that is known for judgment: its rows have x; known are panjue,",
        ),
        (
            dumped({"context": "张某盗窃。", "question": "谁？", "answers": {}}),
            {},
            "label-studio, table; with --task reading it is rows of SQuAD",
        ),
        (
            dumped({"data": [{"title": "a", "paragraphs": []}]}),
            {},
            "label-studio, table; with --task reading it is panjue's own form of reading",
        ),
        (
            dumped({"fact": "张某盗窃。", "defendants": ["张某"]}),
            {"task": "reading"},
            "known are panjue, cmrc2018, squad; with --task judgment it is panjue's own form",
        ),
        (
            dumped({"instruction": "张某盗窃。", "output": ""}),
            {},
            "line 1: an empty reply, which names nobody (cases without answers: prompts/DATA.md)",
        ),
        ("", {}, "is empty"),
        ("刑罚", {}, "no row of it can be read as JSON, UTF-8"),
        (b"PK\x03\x04xlsx", {}, "is a ZIP file or an Excel workbook; give JSON, CSV, Parquet"),
        (b"\x1f\x8b\x08\x00", {}, "the gzip is broken"),
        (b"PAR1 no", {}, "is no Parquet that can be read"),
        (
            BIG5,
            {},
            "is neither UTF-8, UTF-16 nor GB18030; save it as UTF-8",
        ),
        ('{"fact": "a", "name": "b"}', {"form": "sharegtp"}, "did you mean 'sharegpt'?"),
        (b'\xff\xfe{\x00"', {}, "is no whole utf-16: truncated data"),
        ("a,a\n1,2\n", {}, "two columns are called 'a'"),
        ("{}", {"task": "dialogue"}, "the cases of dialogue are folders"),
        (
            dumped({**BOTH, "x": 1}),
            {"form": "alpaca", "in_years": True},
            "--years is for panjue's own",
        ),
    ],
)
def test_what_cannot_be_converted_is_one_line(
    content: str | bytes, options: Any, told: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as error:
        converted(tmp_path, content, **options)
    assert told in str(error.value)
    assert not (tmp_path / "out.jsonl").exists()


OWN = {"id": 1, "fact": "张某盗窃。", "defendants": ["张某"]}


def test_without_pyarrow_the_way_out_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match="to read Parquet, pip install pyarrow"):
        converted(tmp_path, b"PAR1" + bytes(99))


def test_only_what_convert_made_is_written_over(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    for name in (out, left_out_path(out)):
        name.write_text("somebody's", "utf-8")
        with pytest.raises(UserError, match="was not made by panjue, so it is kept"):
            converted(tmp_path, dumped(OWN))
        assert name.read_text("utf-8") == "somebody's"
        name.unlink()
    converted(tmp_path, dumped(OWN))
    converted(tmp_path, lines([{**OWN, "id": 2}, {}]), form="panjue")
    assert [row["id"] for row in written(out)] == [2]
    assert len(left_out(out)) == 1
    converted(tmp_path, dumped({**OWN, "id": 2}))
    assert not left_out_path(out).exists()
    with out.open("a", encoding="utf-8") as file:  # the user adds a case
        file.write(dumped({**OWN, "id": 3}))
    with pytest.raises(UserError, match="was not made by panjue"):
        converted(tmp_path, dumped(OWN))
    with pytest.raises(UserError, match="was not made by panjue"):
        convert(out, out)


def test_nothing_is_written_over_by_a_file_without_cases(tmp_path: Path) -> None:
    before = converted(tmp_path, dumped(OWN)).out.read_bytes()
    with pytest.raises(UserError, match=r"none of its 1 rows .* 1: not a case of the task"):
        converted(tmp_path, dumped({**OWN, "fact": ""}))
    assert (tmp_path / "out.jsonl").read_bytes() == before
    converted(tmp_path, dumped(OWN))  # it is still ours


def test_terms_in_years_become_months(tmp_path: Path) -> None:
    penalty = {"surveillance": 0, "detention": 0, "imprisonment": 3.5}
    flags = {"death_penalty": False, "life_imprisonment": False}
    outcome = {
        "name": "张某",
        "penalty": {**penalty, **flags},
        "charges": ["盗窃罪"],
        "articles": ["264"],
    }
    odd = {**outcome, "penalty": {**penalty, **flags, "imprisonment": 3.3}}
    rows = [{**OWN, "outcomes": [outcome]}, {**OWN, "id": 2, "outcomes": [odd]}]
    done = converted(tmp_path, lines(rows), in_years=True)
    assert persons(done) == [[("张某", ["盗窃罪"], ["264"], {"imprisonment": 42})]]
    assert left_out(done.out) == ["2: a term that is no whole number of months: '3.3'"]


def test_a_row_that_is_null_is_counted(tmp_path: Path) -> None:
    done = converted(tmp_path, f"null\n{dumped(OWN)}\nnull")
    assert (done.rows, done.written) == (3, 1)
    assert left_out(done.out) == ["1: not a JSON object: 'None'", "3: not a JSON object: 'None'"]


def test_what_is_lost_of_a_list_on_one_line_is_said(tmp_path: Path) -> None:
    row = dumped({**OWN, "id": 2})
    done = converted(tmp_path, f"[{dumped(OWN)}, {{bad}}, {row}]\n[\n{row},\n{{bad}}\n]")
    assert [one["id"] for one in written(done.out)] == [1, 2]
    assert done.rows == 4
    assert [reason.split(": ")[:2] for reason in left_out(done.out)] == [
        ["row 2", "not JSON, with the rest of its line"],
        ["row 4", "not JSON, with the rest of its line"],
    ]


def parts_of(text: str, size: int) -> Callable[[int], str]:
    """Return a function that reads a text in parts of `size`, whatever size it is asked for."""
    file = io.StringIO(text)
    return lambda _: file.read(size)


def test_a_bad_row_costs_no_other_wherever_a_chunk_of_the_text_ends() -> None:
    text = """[
  {"id": 1},
  {"id": 2, "text": "it goes on", bad,
    "more": 1
  },
  {"id": 3},
    {"id": 4}, {bad},
    {"id": 5}
]
"""
    for size in range(1, len(text) + 1):
        rows = [value for _, value in json_values(parts_of(text, size))]
        assert [row["id"] for row in rows if isinstance(row, dict)] == [1, 3, 4, 5], size
        assert sum(isinstance(row, NotSaid) for row in rows) == 2, size


def test_bytes_that_are_no_utf8_cost_their_row_alone(tmp_path: Path) -> None:
    rows = [{**OWN, "id": number} for number in range(50)]
    content = lines(rows).encode()
    done = converted(tmp_path, content.replace("盗".encode(), b"\xff\xfe", 1))
    assert (done.written, left_out(done.out)) == (49, ["1: not UTF-8"])
