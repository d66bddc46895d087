"""Folders of dialogues: `chat/chat_<id>.json` and, beside it, `emo/emo_<id>.json` (EmoCaustics)."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.files import (
    BOM,
    LARGEST_LINE,
    Record,
    check_text,
    parse,
    replace_folder,
)
from panjue.prompts.plumbing.submissions import SubmissionFormat, Write, indexed


def dialogues(folder: Path) -> Iterator[Record]:
    """Yield the dialogues of a folder by number, each as `id`, `chat`, `emo` and `emo_problem`.

    A chat that cannot be read is no row. Emotions that cannot are told in `emo_problem`: what the
    chat says is good all the same.

    Raises:
        UserError: The folder has no chats.
    """
    chats = (folder / "chat").glob("chat_*.json")
    for path in sorted(chats, key=lambda path: _number(_key(path))):
        name = path.name.encode("utf-8", "replace").decode("utf-8")
        yield f"chat/{name}", partial(_dialogue, folder, _key(path))
    if not is_folder_of_dialogues(folder):
        raise UserError(f"{folder}: is no folder with dialogues in it, chat/chat_<id>.json")


def is_folder_of_dialogues(folder: Path) -> bool:
    """Say whether there is a chat in a folder."""
    return next((folder / "chat").glob("chat_*.json"), None) is not None


def _key(path: Path) -> str:
    return path.stem.removeprefix("chat_")


def _number(key: str) -> tuple[int, str]:
    return (int(key) if key.isdecimal() else 0), key


def _dialogue(folder: Path, key: str) -> dict[str, Any]:
    check_text(key)
    chat = _document(folder / "chat" / f"chat_{key}.json", list)
    place = folder / "emo" / f"emo_{key}.json"
    try:
        emo, problem = (_document(place, dict) if place.exists() else None), ""
    except UserError as error:
        emo, problem = None, f"emo/{place.name}: {error}"
    return {"id": key, "chat": chat, "emo": emo, "emo_problem": problem}


def _document(path: Path, kind: type[dict[str, Any]] | type[list[Any]]) -> Any:
    try:
        if path.stat().st_size > LARGEST_LINE:
            raise UserError(f"larger than {LARGEST_LINE >> 20} MiB; no dialogue is")
        return parse(path.read_bytes().removeprefix(BOM), kind)
    except OSError as error:
        raise UserError(str(error.strerror)) from None


def _handed_in(folder: Path) -> Iterator[Record]:
    for place, load in dialogues(folder):
        yield place, partial(_whole, load)


def _whole(load: Any) -> dict[str, Any]:
    row: dict[str, Any] = load()
    problem = row.pop("emo_problem")
    if problem:
        raise UserError(problem)
    return row


@contextmanager
def _writing(place: Path) -> Iterator[Write]:
    temporary = place.with_name(f".{place.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    for name in ("chat", "emo"):
        (temporary / name).mkdir(parents=True)

    def write(row: Mapping[str, Any]) -> None:
        for name in ("chat", "emo"):
            text = json.dumps(row[name], ensure_ascii=False, indent=2)
            (temporary / name / f"{name}_{row['id']}.json").write_text(text + "\n", "utf-8")

    yield write
    replace_folder(temporary, place)


DIALOGUES = SubmissionFormat(
    "submission", _handed_in, _writing, partial(indexed, _handed_in), is_folder_of_dialogues
)
