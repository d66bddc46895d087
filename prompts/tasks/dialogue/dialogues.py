"""Folders of dialogues (EmoCaustics).

Cases are `chat/chat_<id>.json` and `emo/emo_<id>.json`. Files of a submission have the names that
the organisers' scripts read; in panjue 0.4 they had the names of cases.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import (
    BOM,
    EACH_KEY_ONCE,
    FileRow,
    atomic_folder,
    check_text,
    located,
    parse_json,
)
from panjue.prompts.plumbing.submissions import SubmissionFormat, WriteRow

CHAT_NAME = re.compile(r"(?s)(?:output_)?chat_(.+)\.json")
EMO_NAME = re.compile(r"(?s)(?:output_emotions|emo)_(?!\d+_steps\.)(.+?)(?:(?<=\d)_events)?\.json")
"""Pattern of names. A baseline of the organisers writes `_events`, and `_steps`, which nothing
reads."""


def dialogues(folder: Path) -> Iterator[FileRow]:
    """Yield the file name of each dialogue, by number, and a function that reads its row.

    The row has `id`, `chat`, `emo` and `emo_problem`. An unreadable chat is a bad row. Unreadable
    emotions are reported in `emo_problem`, and the chat stays valid.
    """
    keys = [path.stem.removeprefix("chat_") for path in (folder / "chat").glob("chat_*.json")]
    if not keys:
        raise UserError(f"{folder}: has no dialogues, chat/chat_<id>.json")
    for key in sorted(keys, key=_by_number):
        yield f"chat/chat_{key}.json", partial(_dialogue, folder, key)


def _by_number(key: str) -> tuple[int, str]:
    """Return the sort key of an id: 2 comes before 10, and ids that are no numbers come first."""
    return (int(key) if key.isdecimal() else 0), key


def _dialogue(folder: Path, key: str) -> dict[str, Any]:
    """Read the chat of an id, and its emotions, which a test dialogue lacks."""
    check_text(key)  # a name that is not UTF-8 cannot be an id
    chat = _document(folder / "chat" / f"chat_{key}.json", list)
    emo = None
    problem = ""
    path = folder / "emo" / f"emo_{key}.json"
    if path.exists():
        try:
            emo = _document(path, dict)
        except UserError as error:
            problem = f"emo/{path.name}: {error}"
    return {"id": key, "chat": chat, "emo": emo, "emo_problem": problem}


def _document(path: Path, kind: type[dict[str, Any]] | type[list[Any]]) -> Any:
    """Return the JSON object or list in a file; the caller names the file in errors."""
    try:
        raw = path.read_bytes().removeprefix(BOM)
    except OSError as error:
        raise UserError(str(error.strerror)) from None
    value = parse_json(raw, EACH_KEY_ONCE)
    if rb"\u" in raw:  # only an escape can write half a character, such as \ud800
        check_text(value)
    if not isinstance(value, kind):
        raise UserError(f"expected a JSON {kind.__name__}, found {type(value).__name__}")
    return value


def _read_submission(folder: Path) -> Iterator[FileRow]:
    """Yield the first file of each answer, by number, and a function that reads its row.

    The row has `id`, `chat`, `emo`, and the `names` of its files. `chat` or `emo` is None if it has
    no file.
    """
    chats = _files_by_id(folder / "chat", CHAT_NAME)
    emos = _files_by_id(folder / "emo", EMO_NAME)
    for key in sorted({**chats, **emos}, key=_by_number):
        own_chats = chats.get(key, [])
        own_emos = emos.get(key, [])
        place = [*own_chats, *own_emos][0].relative_to(folder)
        yield str(place), partial(_answer, key, own_chats, own_emos)


def is_folder_of_answers(folder: Path) -> bool:
    """Say whether a folder may have answers, by the names of its files.

    It may also have cases: CHAT_NAME and EMO_NAME match their names, too, which answers had in 0.4.
    """
    chats = _files_by_id(folder / "chat", CHAT_NAME)
    return bool(chats or _files_by_id(folder / "emo", EMO_NAME))


def _files_by_id(folder: Path, name: re.Pattern[str]) -> dict[str, list[Path]]:
    """Return id -> files in a folder; `chat_1.json` of 0.4 may lie beside `output_chat_1.json`."""
    files: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if found := name.fullmatch(path.name):
            files[found[1]].append(path)
    return files


def _answer(key: str, chats: Sequence[Path], emos: Sequence[Path]) -> dict[str, Any]:
    """Read the answer to a dialogue from its chat and its emotions; refuse two files of a kind."""
    check_text(key)  # a name that is not UTF-8 cannot be an id
    for paths in (chats, emos):
        if len(paths) > 1:
            names = " and ".join(path.name for path in paths)
            raise UserError(f"{names} answer the same dialogue; delete all but one")
    chat = _document(chats[0], list) if chats else None
    emo = None
    if emos:
        with located(f"emo/{emos[0].name}"):
            emo = _document(emos[0], dict)
    return {"id": key, "chat": chat, "emo": emo, "names": [path.name for path in (*chats, *emos)]}


@contextmanager
def _writing(path: Path) -> Iterator[WriteRow]:
    """Give a function that writes the two files of an answer, which are in `path` at the end."""

    def write(row: Mapping[str, Any]) -> None:
        files = {
            f"chat/output_chat_{row['id']}.json": row["chat"],
            f"emo/output_emotions_{row['id']}.json": row["emo"],
        }
        for name, value in files.items():
            if value is not None:  # gold may have no readable emotions
                text = json.dumps(value, ensure_ascii=False, indent=2)
                (folder / name).write_text(text + "\n", "utf-8")

    with atomic_folder(path) as folder:
        for name in ("chat", "emo"):
            (folder / name).mkdir()
        yield write


DIALOGUES = SubmissionFormat("submission", _read_submission, _writing, is_folder_of_answers)
