"""`panjue convert`: what a file says for certain becomes cases; the rest is counted and listed."""

import csv
import gzip
import io
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from panjue.prompts.convert import FORMS_OF_TASK, Conversion, convert, left_out_path
from panjue.prompts.forms import sources, values
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.reader import Reader
from panjue.prompts.task import load_task
from panjue.prompts.tasks.judgment.charges import (
    charge_of,
    charges_in,
)
from panjue.prompts.tasks.judgment.penalties import penalty_class, sentence
from panjue.prompts.tasks.judgment.terms import money_of, penalty_of
from tests.prompts.court_sentences import alpaca, article, sentences

TASK = load_task("judgment")
FAST = settings(
    deadline=None,
    max_examples=15,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

Row = dict[str, Any]


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def lines(rows: list[Any]) -> str:
    return "".join(f"{dumped(row)}\n" for row in rows)


def written(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def left_out(out: Path) -> list[str]:
    return [f"{row['place']}: {row['reason']}" for row in written(left_out_path(out))]


def converted(
    folder: Path, content: str | bytes, name: str = "given", **options: Any
) -> Conversion:
    """Convert a file of this content to `out.jsonl` in the folder, over what is there."""
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return convert(path, folder / "out.jsonl", **options)


# Cases that every form can say: what a person is called, convicted of, sentenced to.

CHARGES = [
    *("盗窃罪", "诈骗罪", "开设赌场罪", "贩卖毒品罪", "掩饰、隐瞒犯罪所得罪", "交通肇事罪"),
    *("组织、领导、参加黑社会性质组织罪", "运送他人偷越国（边）境罪", "非法持有、私藏枪支、弹药罪"),
]
ARTICLES = ["264", "266", "303-2", "347-4", "312-1", "133.1-1", "287.2", "294-1"]
NAMES = ["张某", "李某某", "王某甲", "赵某1", "欧阳某", "阿卜杜·热依木", "Peter Chan", "陈和平"]

penalties = st.one_of(
    st.integers(6, 300).map(lambda months: sentence(imprisonment=months)),
    st.integers(1, 12).map(lambda months: sentence(detention=months)),
    st.integers(3, 36).map(lambda months: sentence(surveillance=months)),
    st.just(sentence(life_imprisonment=True)),
    st.just(sentence(death_penalty=True)),
    st.just(sentence()),
)


@st.composite
def cases(draw: st.DrawFn, articles: list[str] = ARTICLES) -> list[Row]:
    """Return cases in the official form, with ids that a table can have too."""
    made = []
    for number in range(draw(st.integers(1, 4))):
        names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True))
        outcomes = [
            {
                "name": name,
                "penalty": draw(penalties),
                "charges": draw(
                    st.lists(st.sampled_from(CHARGES), min_size=1, max_size=3, unique=True)
                ),
                "articles": draw(
                    st.lists(st.sampled_from(articles), min_size=1, max_size=3, unique=True)
                ),
            }
            for name in names
        ]
        fact = f"第{number}案：被告人{'、'.join(names)}，“作案”\t三次；<b>&amp;\n另查明……"
        made.append({"id": number, "fact": fact, "defendants": names, "outcomes": outcomes})
    return made


def pretty(rows: list[Row]) -> str:
    return "\n".join(json.dumps(row, ensure_ascii=False, indent=2) for row in rows)


def in_cells(rows: list[Row], **dialect: Any) -> str:
    """Return a table of our columns, lists in them as JSON or as Python writes them."""
    out = io.StringIO()
    table = csv.writer(out, **dialect)
    table.writerow(rows[0])
    for number, row in enumerate(rows):
        write: Callable[[Any], str] = repr if number % 2 else dumped
        table.writerow([v if isinstance(v, str | int) else write(v) for v in row.values()])
    return out.getvalue()


def by_person(rows: list[Row], **dialect: Any) -> str:
    out = io.StringIO()
    table = csv.writer(out, **dialect)
    table.writerow(["编号", "案情", "被告人", "罪名", "法条", "刑期"])
    for row in rows:
        for one in row["outcomes"]:
            labels = (
                ";".join(one["charges"]),
                "、".join(one["articles"]),
                in_words(one["penalty"]),
            )
            table.writerow([row["id"], row["fact"], one["name"], *labels])
    return out.getvalue()


def in_words(penalty: Row) -> str:
    if penalty["death_penalty"]:
        return "死刑"
    if penalty["life_imprisonment"]:
        return "无期徒刑"
    for key, kind in (
        ("imprisonment", "有期徒刑"),
        ("detention", "拘役"),
        ("surveillance", "管制"),
    ):
        if months := penalty[key]:
            years, rest = divmod(months, 12)
            return kind + (f"{years}年" if years else "") + (f"{rest}个月" if rest else "")
    return "免予刑事处罚"


def in_prose(row: Row) -> str:
    """Return a judgment in words, with each person's articles in their own sentence."""
    parts = []
    for one in row["outcomes"]:
        cited = "、".join(article(number, NoChance()) for number in one["articles"])
        parts.append(
            f"被告人{one['name']}犯{'、'.join(one['charges'])}，依照《中华人民共和国刑法》{cited}之规定，"
            f"判处{in_words(one['penalty'])}。"
        )
    return "\n".join(parts)


class NoChance(Random):
    def random(self) -> float:
        return 0.0


def in_json(row: Row) -> str:
    return dumped({"judgments": row["outcomes"]})


def asked(row: Row, reply: str) -> list[Row]:
    said = {"system": "你是法官。", "user": row["fact"], "assistant": reply}
    return [{"role": who, "content": text} for who, text in said.items()]


def parquet(rows: list[Row]) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    out = io.BytesIO()
    write_table(pyarrow.Table.from_pylist(rows), out)
    return out.getvalue()


LAYOUTS: dict[str, Callable[[list[Row]], str | bytes]] = {
    "lines": lines,
    "lines with a mark": lambda rows: "\ufeff" + lines(rows),
    "CRLF and remarks": lambda rows: "// cases\r\n" + lines(rows).replace("\n", "\r\n"),
    "a list": dumped,
    "a list over many lines": lambda rows: json.dumps(rows, ensure_ascii=False, indent=1),
    "objects over many lines": pretty,
    "escaped": lambda rows: "\n".join(map(json.dumps, rows)),
    "joined": lambda rows: "".join(map(dumped, rows)),
    "joined lists": lambda rows: "".join(dumped([row]) for row in rows),
    "joined with marks": lambda rows: "\n".join("\ufeff" + dumped(row) for row in rows),
    "in an object": lambda rows: dumped({"version": "1", "data": rows}),
    "JSONP": lambda rows: f"var data = {dumped(rows)};",
    "a callback": lambda rows: f"callback({dumped(rows)});",
    "Python": lambda rows: "\n".join(map(repr, rows)),
    "gzip": lambda rows: gzip.compress(lines(rows).encode()),
    "GB18030": lambda rows: lines(rows).encode("gb18030"),
    "UTF-16": lambda rows: lines(rows).encode("utf-16"),
    "UTF-16 without a mark": lambda rows: lines(rows).encode("utf-16-le"),
    "CSV": in_cells,
    "Excel's CSV UTF-8": lambda rows: in_cells(rows).encode("utf-8-sig"),
    "Excel's CSV": lambda rows: in_cells(rows).encode("gb18030"),
    "Excel's Unicode text": lambda rows: in_cells(rows, delimiter="\t").encode("utf-16"),
    "semicolons": lambda rows: "sep=;\n" + in_cells(rows, delimiter=";"),
    "Parquet": parquet,
}
"""Ways in which a file has the rows of our own form."""

SAID: dict[str, Callable[[list[Row]], str | bytes]] = {
    "Alpaca": lambda rows: dumped(
        [{"instruction": "判决", "input": row["fact"], "output": in_json(row)} for row in rows]
    ),
    "Alpaca without input": lambda rows: lines(
        [{"instruction": row["fact"], "input": "", "output": in_prose(row)} for row in rows]
    ),
    "ShareGPT": lambda rows: dumped(
        [
            {
                "conversations": [
                    {"from": "human", "value": row["fact"]},
                    {"from": "gpt", "value": in_prose(row)},
                ]
            }
            for row in rows
        ]
    ),
    "messages": lambda rows: lines([{"messages": asked(row, in_prose(row))} for row in rows]),
    "messages, JSON in a fence": lambda rows: lines(
        [{"messages": asked(row, f"```json\n{in_json(row)}\n```")} for row in rows]
    ),
    "prompt and completion": lambda rows: lines(
        [{"prompt": row["fact"], "completion": in_prose(row)} for row in rows]
    ),
    "query and response": lambda rows: lines(
        [{"query": row["fact"], "response": in_json(row)} for row in rows]
    ),
    "Label Studio": lambda rows: dumped(
        [
            {
                "id": row["id"],
                "data": {"text": row["fact"]},
                "annotations": [
                    {
                        "was_cancelled": False,
                        "result": [
                            {
                                "from_name": "verdict",
                                "to_name": "text",
                                "type": "textarea",
                                "value": {"text": [in_prose(row)]},
                            }
                        ],
                    }
                ],
            }
            for row in rows
        ]
    ),
    "persons": by_person,
    "persons, Excel's CSV": lambda rows: by_person(rows).encode("gb18030"),
    "persons, Excel's Unicode text": lambda rows: by_person(rows, delimiter="\t").encode("utf-16"),
}
"""Ways in which a file says what our form has, in another one."""


@FAST
@given(cases())
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_of_our_form_comes_back_as_it_was(
    layout: str, tmp_path: Path, rows: list[Row]
) -> None:
    done = converted(tmp_path, LAYOUTS[layout](rows))
    assert written(done.out) == rows
    assert (done.rows, done.written, done.left_out) == (len(rows), len(rows), {})


@FAST
@given(cases())
@pytest.mark.parametrize("form", SAID)
def test_what_another_form_says_comes_back_in_ours(
    form: str, tmp_path: Path, rows: list[Row]
) -> None:
    done = converted(tmp_path, SAID[form](rows))
    assert not done.left_out, left_out(done.out)
    made = written(done.out)
    assert made == rows
    assert [list(row) for row in made] == [["id", "fact", "defendants", "outcomes"]] * len(rows)
    examples = list(Reader(TASK).read(done.out))
    assert [example.names for example in examples] == [tuple(row["defendants"]) for row in rows]


# Nothing is lost, nothing ends in a traceback, memory is flat.

BROKEN = [
    '{"id": 7, "fact"',
    "[1, 2]",
    "7",
    '{"id": 8}',
    '{"a": 1, "a": 2}',
    "x",
    '{"fact": "\\ud800"}',
]


@FAST
@given(st.lists(st.one_of(st.sampled_from(BROKEN), cases().map(lambda made: made[0])), min_size=1))
def test_every_row_is_written_or_left_out(tmp_path: Path, rows: list[str | Row]) -> None:
    good = {"fact": "张某盗窃。", "defendants": ["张某"]}
    given_rows: list[str] = [dumped({**good, "id": "first"})]
    for number, row in enumerate(rows):
        given_rows.append(row if isinstance(row, str) else dumped({**row, "id": number}))
    done = converted(tmp_path, "\n".join(given_rows))
    n_broken = sum(isinstance(row, str) for row in rows)
    assert (done.rows, done.left_out.total()) == (len(given_rows), n_broken)
    assert done.written == len(given_rows) - n_broken
    if n_broken:
        assert len(left_out(done.out)) == n_broken


KEYS = st.sampled_from(
    [
        *(
            "id",
            "fact",
            "defendants",
            "outcomes",
            "name",
            "charges",
            "articles",
            "penalty",
            "months",
        ),
        *("instruction", "input", "output", "conversations", "messages", "role", "content"),
        *("from", "value", "meta", "accusation", "criminals", "relevant_articles"),
        *(
            "term_of_imprisonment",
            "imprisonment",
            "criminals_info",
            "laws",
            "term",
            "ajjbqk",
            "pjjg",
        ),
        *("qw", "defendant", "defendant_accusation", "relevant_article", "defendant_judgement"),
        *("data", "annotations", "result", "from_name", "context", "question", "answers", "qas"),
        *("context_text", "query_text", "paragraphs", "prompt", "completion", "index", "text"),
    ]
)
WORDS = st.one_of(
    st.text(max_size=8),
    st.text(
        alphabet="被告人张某犯盗窃罪判处有期徒刑三年个月，。第二百六十四条《刑法》之一款、1",
        max_size=40,
    ),
)
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(-5, 500), st.floats(), WORDS)
VALUES: st.SearchStrategy[Any] = st.deferred(
    lambda: LEAVES | st.lists(VALUES, max_size=3) | st.dictionaries(KEYS, VALUES, max_size=4)
)


def attempt(folder: Path, content: str | bytes, **options: Any) -> None:
    """Convert what may be anything: an error is one line, and a result is whole."""
    try:
        done = converted(folder, content, **options)
    except UserError:
        return
    examples = Reader(load_task(options.get("task", "judgment"))).read(done.out)
    assert done.written == len(list(examples))


@settings(FAST, max_examples=40)
@given(
    st.one_of(st.binary(), st.text().map(str.encode), st.text().map(lambda t: t.encode("utf-16")))
)
def test_any_bytes_give_one_line_or_a_file(tmp_path: Path, content: bytes) -> None:
    attempt(tmp_path, content)
    attempt(tmp_path, b"id,fact\n" + content)
    attempt(tmp_path, gzip.compress(content))
    attempt(tmp_path, b"\x1f\x8b" + content)
    attempt(tmp_path, b"PAR1" + content)


@settings(FAST, max_examples=40)
@given(st.lists(st.dictionaries(KEYS, VALUES, max_size=8), min_size=1, max_size=3))
def test_any_rows_give_one_line_or_a_file(tmp_path: Path, rows: list[Row]) -> None:
    attempt(tmp_path, dumped(rows))
    attempt(tmp_path, dumped(rows), task="reading")
    attempt(tmp_path, dumped(rows), task="severity")


MINIMAL: dict[str, Row] = {
    "panjue": {"fact": "", "defendants": []},
    "alpaca": {"instruction": "甲", "output": ""},
    "sharegpt": {"conversations": []},
    "messages": {"messages": []},
    "prompt-completion": {"prompt": "甲", "completion": ""},
    "query-response": {"query": "甲", "response": ""},
    "cail2018": {"fact": "甲", "meta": {"accusation": []}},
    "multiljp": {"fact": "甲", "criminals_info": {}},
    "multijustice": {"fact": "甲", "defendant_accusation": "", "relevant_article": ""},
    "lecard": {"ajjbqk": "甲", "pjjg": ""},
    "label-studio": {"data": {}, "annotations": []},
    "table": {"fact": "甲", "name": "乙"},
    "cmrc2018": {"context_text": "甲", "qas": []},
    "squad": {"context": "甲", "question": "乙"},
}


@settings(FAST, max_examples=20)
@given(st.dictionaries(KEYS, VALUES, max_size=8))
@pytest.mark.parametrize("form", MINIMAL)
def test_any_row_of_a_form_gives_one_line_or_a_file(form: str, tmp_path: Path, row: Row) -> None:
    task = "reading" if form in FORMS_OF_TASK["reading"] else "judgment"
    attempt(tmp_path, dumped({**MINIMAL[form], **row}), task=task, form=form)


@settings(FAST, max_examples=500)
@given(WORDS)
def test_words_are_read_or_refused(text: str) -> None:
    for read in (penalty_of, money_of, charge_of, charges_in):
        read(text)
    cut = penalty_of(text)
    assert cut is None or 0 <= penalty_class(cut) <= 14


@pytest.mark.parametrize("form", ["lines", "a list over many lines", "CSV"])
def test_memory_is_flat_in_the_number_of_rows(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(values, "CHUNK", 2**14)
    monkeypatch.setattr(sources, "DECODED_AT_ONCE", 2**14)
    peaks = []
    sizes = []
    for count in (200, 200, 2000):  # the first call imports
        rows = [{"id": n, "fact": "张某盗窃。" * 99, "defendants": ["张某"]} for n in range(count)]
        path = tmp_path / f"{count}"
        path.write_text(str(LAYOUTS[form](rows)), "utf-8")
        tracemalloc.start()
        convert(path, tmp_path / f"{count}.jsonl")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        sizes.append(path.stat().st_size)
    assert peaks[2] - peaks[1] < (sizes[2] - sizes[1]) / 5  # ids are kept, to find repeated ones


# The 500 sentences.


def test_no_label_of_500_sentences_is_wrong(tmp_path: Path) -> None:
    made = sentences()
    assert len(made) == 500
    done = converted(tmp_path, lines(list(alpaca(made))))
    certain = [sentence for sentence in made if sentence.outcomes is not None]
    for row in written(done.out):
        outcomes = [dict(one) for one in row["outcomes"]]
        for one in outcomes:
            one["penalty"] = {k: v for k, v in one["penalty"].items() if not k.startswith("fine")}
        assert outcomes == made[row["id"]].outcomes, made[row["id"]].text
    assert done.written + done.left_out.total() == 500
    assert done.written > 0.98 * len(certain)
