"""Folders of dialogues with `chat/chat_<id>.json` and `emo/emo_<id>.json` (EmoCaustics)."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from panjue.prompts.plumbing.decode import each_key_once
from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import (
    BOM,
    FileRow,
    check_text,
    parse_json,
    replace_folder,
)
from panjue.prompts.plumbing.submissions import SubmissionFormat, WriteRow


def dialogues(folder: Path) -> Iterator[FileRow]:
    """Yield the dialogues of a folder by number, each as `id`, `chat`, `emo` and `emo_problem`.

    An unreadable chat is a bad row. Unreadable emotions are reported in `emo_problem`: the chat is
    still valid.
    """
    if not is_folder_of_dialogues(folder):
        raise UserError(f"{folder}: has no dialogues, chat/chat_<id>.json")
    keys = [path.stem.removeprefix("chat_") for path in (folder / "chat").glob("chat_*.json")]
    for key in sorted(keys, key=_number_first):
        yield f"chat/chat_{key}.json", partial(_dialogue, folder, key)


def is_folder_of_dialogues(folder: Path) -> bool:
    return any((folder / "chat").glob("chat_*.json"))


def _number_first(key: str) -> tuple[int, str]:
    """Return what to sort an id by, so that 2 comes before 10; an id that is no number is first."""
    return (int(key) if key.isdecimal() else 0), key


def _dialogue(folder: Path, key: str) -> dict[str, Any]:
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
    """Return the JSON object or list of a file; the caller names the file in errors."""
    try:
        raw = path.read_bytes().removeprefix(BOM)
    except OSError as error:
        raise UserError(str(error.strerror)) from None
    value = parse_json(raw, each_key_once)
    if rb"\u" in raw:  # any other text is UTF-8
        check_text(value)
    if not isinstance(value, kind):
        raise UserError(f"expected a JSON {kind.__name__}, found {type(value).__name__}")
    return value


def _read_submission(folder: Path) -> Iterator[FileRow]:
    for place, load in dialogues(folder):
        yield place, partial(_with_emotions, load)


def _with_emotions(load: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a dialogue whose emotions are readable, as those of a submission must be."""
    row = load()
    problem = row.pop("emo_problem")
    if problem:
        raise UserError(problem)
    return row


@contextmanager
def _writing(path: Path) -> Iterator[WriteRow]:
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    for name in ("chat", "emo"):
        (temporary / name).mkdir(parents=True)

    def write(row: Mapping[str, Any]) -> None:
        for name in ("chat", "emo"):
            text = json.dumps(row[name], ensure_ascii=False, indent=2)
            place = temporary / name / f"{name}_{row['id']}.json"
            place.write_text(text + "\n", "utf-8")

    try:
        yield write
        replace_folder(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


DIALOGUES = SubmissionFormat("submission", _read_submission, _writing, is_folder_of_dialogues)
