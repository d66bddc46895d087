"""The forms of submissions: what is written is read again, and every flaw is told."""

import gzip
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.submissions import JSON_LINES, JSON_LIST, SubmissionFormat
from panjue.prompts.tasks.cloze.table import RET_TABLE
from panjue.prompts.tasks.dialogue.dialogues import DIALOGUES

FORMS = {"lines": JSON_LINES, "list": JSON_LIST, "table": RET_TABLE}
TEXT = st.text(st.characters(codec="utf-8"))
IDS = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1)


def write(form: SubmissionFormat, path: Path, rows: list[dict[str, Any]]) -> None:
    with form.writing(path) as write_row:
        for row in rows:
            write_row(row)


@pytest.mark.parametrize(
    ("data", "named"),
    [(gzip.compress(b'{"id": 1}'), "is packed"), (b' [\n{"id": 1}]', "is one JSON list")],
    ids=["packed", "list"],
)
def test_a_submission_of_another_form_is_named(data: bytes, named: str, tmp_path: Path) -> None:
    path = tmp_path / "submission.jsonl"
    path.write_bytes(data)
    for place in (path, tmp_path):
        with pytest.raises(UserError, match=f"submission.jsonl: {named}"):
            JSON_LINES.find(place)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@given(lists=st.dictionaries(IDS, st.lists(TEXT)))
def test_what_is_written_is_read_again(
    form: SubmissionFormat, lists: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("form")
    rows = [{"id": key, "ret": ret} for key, ret in lists.items()]
    write(form, folder / form.name, rows)
    assert [load() for _, load in form.read(folder / form.name)] == rows
    index = form.index(folder / form.name)
    assert index.ids() == {form.same(key) for key in lists}
    for row in reversed(rows):  # of ids that are the same the first counts
        first = next(one for one in rows if form.same(one["id"]) == form.same(row["id"]))
        assert index.get(row["id"]) == first


def test_an_error_leaves_nothing_behind(tmp_path: Path) -> None:
    for form in (*FORMS.values(), DIALOGUES):
        with pytest.raises(KeyError), form.writing(tmp_path / form.name):
            raise KeyError
    assert not list(tmp_path.iterdir())


def test_the_bytes_by_hand(tmp_path: Path) -> None:
    rows = [{"id": "1", "ret": ["罪", 'a "b", c']}, {"id": "2", "ret": []}]
    for form in FORMS.values():
        write(form, tmp_path / form.name, rows)
    assert (tmp_path / "submission.jsonl").read_text("utf-8") == (
        '{"id":"1","ret":["罪","a \\"b\\", c"]}\n{"id":"2","ret":[]}\n'
    )
    assert (tmp_path / "submission.json").read_text("utf-8") == (
        '[\n{"id":"1","ret":["罪","a \\"b\\", c"]},\n{"id":"2","ret":[]}\n]\n'
    )
    assert (tmp_path / "submission.csv").read_bytes() == (
        b'id,ret\n1,"[""\xe7\xbd\xaa"",""a \\""b\\"", c""]"\n2,[]\n'
    )


BROKEN = [
    ("list", b'{"id": 1}', ": is no JSON list"),
    ("list", b"\xef\xbb\xbf[]", ": starts with a byte order mark; save"),
    ("list", b'[{"id": 1}, {"id"', ": not JSON"),
    ("list", b'[{"id": 1}, 7]', ":row 2: expected a JSON object, found int"),
    ("list", '[{"id": "罪"}]'.encode("gbk"), ":row 1: not UTF-8; save the file as UTF-8"),
    ("list", b'[{"id": 1}, {"ret": 1}]', ":row 2: the row has no 'id'"),
    ("list", b'[{"id": "\\ud800"}]', ":row 1: .* only half a character"),
    ("table", b"", ":1: the header has no id and ret but ''"),
    ("table", b"id,ret\n1,[],2\n", ":2: 3 columns instead of 2"),
    ("table", b"id,ret\n1,[]\n2,peru\n", ":3: 'ret' is not JSON"),
    ("table", b'id,ret\n1,"[]', ":2: not CSV: unexpected end"),
    ("table", b"id,ret\n1,[]\n\xff,[]\n", ":3: not UTF-8; save the file as UTF-8"),
    ("table", b'id,ret\n1,"[""\\ud800""]"\n', ":2: .* only half a character"),
]


@pytest.mark.parametrize(("form", "content", "complaint"), BROKEN)
def test_a_flaw_is_told_with_its_place(
    form: str, content: bytes, complaint: str, tmp_path: Path
) -> None:
    path = tmp_path / "handed-in"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"handed-in{complaint}"):
        FORMS[form].index(path)
