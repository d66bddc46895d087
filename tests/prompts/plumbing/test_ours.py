"""The one place that replaces and deletes asks first whose it is, whatever the content."""

import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import (
    atomic_folder,
    atomic_write,
    delete,
    replace,
    restore,
    write_json,
)
from panjue.prompts.plumbing.ours import (
    RECORD_KEYS,
    are_scores,
    has_record,
    is_base,
    lies_in_ours,
    refuse_claim,
)
from panjue.prompts.plumbing.records import AnswersRecord, RunRecord
from panjue.prompts.plumbing.run import REPLACED

FOREIGN = r"was not made by panjue, so it is kept; move it, or choose another "
RECORD = json.dumps(dict.fromkeys(RECORD_KEYS["manifest.json"]))


def written(path: Path) -> None:
    with atomic_write(path) as out:
        out.write("ours")


def made(path: Path) -> None:
    with atomic_folder(path) as folder:
        (folder / "ours").touch()


def replaced(path: Path) -> None:
    new = path.with_name("new")
    new.touch()
    replace(new, path)


WAYS: dict[str, Callable[[Path], object]] = {
    "write": written,
    "write JSON": lambda path: write_json(path, "ours"),
    "make": made,
    "replace": replaced,
    "delete": delete,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with our record."""
    ours = tmp_path / "ours"
    ours.mkdir()
    (ours / "manifest.json").write_text(RECORD, "utf-8")
    return ours


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("way", WAYS)
@given(content=st.binary(), name=st.sampled_from([*REPLACED, "x", ".x.12345678.tmp"]))
def test_what_is_somebody_elses_is_kept(
    way: str, content: bytes, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("foreign")
    inner = place / "folder" / name
    inner.parent.mkdir()
    for path in (place / "file", inner):
        path.write_bytes(content)
    before = contents(place)
    for path in (place / "file", place / "folder"):
        if way.startswith("write") and path.is_dir():
            continue  # another error
        with pytest.raises(UserError, match=FOREIGN):
            WAYS[way](path)
    assert contents(place).items() >= before.items()


@pytest.mark.parametrize("way", WAYS)
def test_ours_is_replaced_by_what_is_new_and_nothing_else_is_left(way: str, folder: Path) -> None:
    (folder / "file").write_text("old", "utf-8")
    WAYS[way](folder / "file")
    if way != "write JSON" and not way.startswith("write"):
        (folder / "model").mkdir()
        (folder / "model/old").touch()
        WAYS[way](folder / "model")
        assert not (folder / "model/old").exists()
    left = {"manifest.json", "file", "model"}
    assert {path.name for path in folder.iterdir()} <= left
    assert b"old" not in contents(folder).values()


def test_a_killed_process_leaves_nothing_for_long_in_our_folder(folder: Path) -> None:
    for name in (".merged.tmp", ".merged.12345678.tmp"):
        (folder / name).mkdir()
        (folder.parent / name).mkdir()
        (folder.parent / name / "model").touch()
    made(folder / "merged")
    made(folder.parent / "merged")
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "merged"]
    assert (folder.parent / ".merged.tmp/model").exists(), "may be somebody's"


CALLS = ("open", "os.chmod", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir")
"""Audit events of the system calls that change something."""


def killed_at(call: int, act: Callable[[], object]) -> bool:
    """Do something in a process that is killed at one of these calls; say whether it got there."""
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        return os.WIFSIGNALED(status)
    seen = count()

    def hook(event: str, _: object) -> None:
        if event in CALLS and next(seen) == call:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    act()
    os._exit(0)


def folder_of(path: Path, content: str) -> None:
    with atomic_folder(path) as new:
        for name in ("a", "b"):
            (new / name).write_text(content, "utf-8")


@pytest.mark.parametrize("is_link", [False, True])
def test_whenever_a_process_is_killed_the_old_folder_or_the_new_one_is_there(
    is_link: bool, tmp_path: Path
) -> None:
    found = set()
    for call in count():
        disk = tmp_path / f"{call}/disk"
        disk.mkdir(parents=True)
        (disk / "manifest.json").write_text(RECORD, "utf-8")
        place = disk / "adapter"
        if is_link:
            place = disk.with_name("link")
            place.symlink_to(disk / "adapter")
        folder_of(place, "old")
        if not killed_at(call, partial(folder_of, place, "new")):
            break
        restore(disk)
        [content] = {(place / name).read_text("utf-8") for name in ("a", "b")}
        found.add(content)
        folder_of(place, "newer")
        assert (place / "a").read_text("utf-8") == "newer"
        assert sorted(os.listdir(disk)) == ["adapter", "manifest.json"]
    assert found == {"old", "new"}


@pytest.mark.parametrize("way", ["write", "make", "replace"])
def test_a_link_is_followed(way: str, folder: Path, tmp_path: Path) -> None:
    link = folder / "merged"
    target = tmp_path / "large disk/merged"
    target.parent.mkdir()
    link.symlink_to(target)
    WAYS[way](link)
    assert link.readlink() == target
    assert target.exists()
    with pytest.raises(UserError, match=FOREIGN):  # it leads out of our folder
        WAYS[way](link)
    target.unlink() if target.is_file() else (target / "manifest.json").write_text(RECORD)
    WAYS[way](link)
    assert link.readlink() == target


def test_what_lies_in_a_folder_that_was_moved_by_a_link_is_ours(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "large disk/checkpoint-6").mkdir(parents=True)
    (folder / "checkpoints").symlink_to(tmp_path / "large disk")
    assert lies_in_ours(folder / "checkpoints/checkpoint-6")
    assert not lies_in_ours(folder / ".." / "large disk/checkpoint-6")


def test_an_empty_folder_is_no_loss(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    made(tmp_path / "model")
    assert (tmp_path / "model/ours").exists()


@given(st.sets(st.sampled_from(REPLACED)))
def test_no_folder_becomes_ours_with_what_is_not(
    tmp_path_factory: pytest.TempPathFactory, names: set[str]
) -> None:
    folder = tmp_path_factory.mktemp("claimed")
    for name in names:
        (folder / name).write_bytes(b"somebody's")
    if not names:
        refuse_claim(folder, REPLACED, "run=FOLDER")
        return
    with pytest.raises(UserError, match=FOREIGN + "run=FOLDER$"):
        refuse_claim(folder, REPLACED, "run=FOLDER")


def test_every_record_is_known_as_one(tmp_path: Path) -> None:
    for record in (RunRecord, AnswersRecord):
        fields = record.model_fields
        required = {name for name, field in fields.items() if field.is_required()}
        assert required >= RECORD_KEYS["manifest.json"]


@given(st.binary() | st.recursive(st.none() | st.text(), st.lists).map(json.dumps).map(str.encode))
def test_any_bytes_have_an_owner(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    place = tmp_path_factory.mktemp("any")
    for name in RECORD_KEYS:
        (place / name).write_bytes(content)
    assert not has_record(place)
    assert not is_base(place)
    assert not are_scores(place / "start.json")
