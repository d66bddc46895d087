import errno
import os
import re
import stat
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import (
    BOM,
    atomic_write,
    difference,
    dump,
    parse_json,
    parse_row,
    read_lines,
    read_object,
    sha256,
    stream,
    write_json,
)
from panjue.prompts.plumbing.ours import RECORD_KEYS
from panjue.prompts.plumbing.rows import Rows

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    TEXT | st.integers() | st.booleans() | st.none(),
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=10,
)


@given(st.dictionaries(TEXT, VALUES))
def test_a_dumped_row_is_one_line_and_comes_back(row: dict[str, object]) -> None:
    line = dump(row)
    assert "\n" not in line
    assert "\r" not in line
    assert parse_row(line.encode()) == row


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    write_json(
        tmp_path / "manifest.json", dict.fromkeys(RECORD_KEYS["manifest.json"])
    )  # it is ours
    path = tmp_path / "new" / "out.txt"
    with atomic_write(path) as first, atomic_write(path) as second:  # two may write at once
        first.write("判决\n")
        second.write("second")
        assert not path.exists()
    with suppress(KeyError), atomic_write(path) as out:
        out.write("half")
        raise KeyError("stop")
    assert path.read_bytes() == "判决\n".encode()
    assert os.listdir(path.parent) == ["out.txt"]


@pytest.mark.parametrize(
    ("before", "kept"),
    [
        (b"", b""),
        (b'{"id":1}\n', b'{"id":1}\n'),
        (b'{"id":1}\n{"id":2}', b'{"id":1}\n'),
        ('{"id":1}\n{"text":"判'.encode()[:-1], b'{"id":1}\n'),
        (b'{"id":1}', b""),
    ],
)
def test_stream_drops_a_torn_last_line_and_goes_on(
    tmp_path: Path, before: bytes, kept: bytes
) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    if before:
        path.parent.mkdir()
        path.write_bytes(before)
    with stream(path) as out:
        out.write('{"id":"判"}\n')
    assert path.read_bytes() == kept + '{"id":"判"}\n'.encode()


@given(st.lists(st.integers() | TEXT, unique_by=str))
def test_rows_come_back_by_id_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, ids: list[int | str]
) -> None:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    lines = [dump({"id": key, "of": [key]}) for key in ids]
    path.write_text("\n\n".join(lines), "utf-8", newline="\n")
    rows = Rows(path)
    assert len(rows) == len(ids)
    assert rows.ids() == {str(key) for key in ids}
    assert rows.duplicates == []
    for key in reversed(ids):
        assert rows.get(key) == {"id": key, "of": [key]}


def test_the_first_row_of_an_id_counts_and_later_ones_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id":1,"n":1}\n\n{"id":"1","n":2}\n{"id":2}\n{"id":1,"n":3}\n', "utf-8")
    rows = Rows(path)
    assert rows.get(1) == {"id": 1, "n": 1}
    assert rows.duplicates == [(3, "1"), (5, "1")]
    assert len(rows) == 2
    assert rows.get(3) is None


def test_hash_of_a_folder_sees_names_and_contents(tmp_path: Path) -> None:
    def make(name: str, files: dict[str, str]) -> str:
        for file, text in files.items():
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_text(text, "utf-8")
        return sha256(tmp_path / name)

    first = make("a", {"x": "1", "sub/y": "2"})
    assert make("b", {"sub/y": "2", "x": "1"}) == first
    assert len({first, make("c", {"x": "2", "sub/y": "2"}), make("d", {"x": "1", "z": "2"})}) == 3
    # The digest of the text "1" itself, from `printf 1 | sha256sum`.
    assert sha256(tmp_path / "a/x").startswith("6b86b273ff34fce1")


def test_the_place_of_a_fault_in_a_line_is_a_character_of_it(tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_bytes(b'{"id": 1}\n{"id": 2\n{"id": 3}\n')
    with pytest.raises(UserError) as error:
        list(read_lines(path))
    assert str(error.value).startswith(f"{path}:2: not JSON: Expecting ',' delimiter: column ")
    with pytest.raises(UserError, match="line 2 column 1"):
        parse_json(b"[1,\n}")


def test_a_byte_order_mark_is_named() -> None:
    with pytest.raises(UserError, match=r"^starts with a byte order mark; save it"):
        parse_row(BOM + b'{"id": 1}\n')


def test_a_key_given_twice_is_a_fault_in_a_row_and_none_in_a_library_s_file(tmp_path: Path) -> None:
    """Some models' config.json name a key twice, and transformers reads them."""
    twice = '{"id":1,"a":{"b":1,"b":2}}'
    with pytest.raises(UserError, match=r"^not JSON: the key 'b' is given twice"):
        parse_row(twice.encode())
    (tmp_path / "config.json").write_text(twice, "utf-8")
    assert read_object(tmp_path / "config.json") == {"id": 1, "a": {"b": 2}}


@pytest.mark.parametrize("depth", [900, 990, 100_000])
def test_a_deep_row_with_an_escape_is_read_or_refused_in_a_line(depth: int) -> None:
    raw = b'{"a": "\\u4e00", "b": ' + b"[" * depth + b"]" * depth + b"}\n"
    try:
        result = parse_row(raw)["a"]
    except UserError as error:
        result = str(error)
    assert re.search("^一$|nested too deeply|maximum recursion depth", result)


@pytest.mark.parametrize(
    ("of_folder", "code", "is_error"),
    [
        (True, errno.EINVAL, False),
        (True, errno.ENOTSUP, False),
        (True, errno.EIO, True),
        (False, errno.EINVAL, True),
    ],
)
def test_a_folder_that_cannot_be_synced_is_no_error(
    of_folder: bool, code: int, is_error: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        if of_folder == stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=os.strerror(code)) if is_error else nullcontext():
        write_json(tmp_path / "a.json", code)


def test_files_that_differ_are_named_by_their_paths() -> None:
    old = {"train": "a.jsonl", "train_sha256": "1", "dev": None, "dev_sha256": None, "seed": 1}
    new = {"train": "b.jsonl", "train_sha256": "2", "dev": "d", "dev_sha256": "3", "seed": 1}
    assert difference(old, new) == "train: a.jsonl -> b.jsonl; dev: None -> d"
    assert difference(old, {**old, "train_sha256": "2"}) == "train: a.jsonl was changed"
    assert difference(old, {**old, "train": "moved.jsonl"}) == ""
    assert difference({"labels_sha256": "1"}, {"labels_sha256": "2"}) == "labels_sha256: 1 -> 2"
