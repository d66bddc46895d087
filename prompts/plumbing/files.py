"""Robust files: JSON lines, atomic writes, append-only streams that can resume, and locks."""

import errno
import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fcntl import LOCK_NB, LOCK_SH, flock
from glob import escape
from pathlib import Path
from typing import IO, Any, BinaryIO
from uuid import uuid4

from filelock import FileLock, Timeout

from panjue.prompts.plumbing.errors import Unreadable, UserError
from panjue.prompts.plumbing.ours import (
    IsOurs,
    followed,
    lies_in_ours,
    record_bytes,
    refuse_foreign,
)

Json = Any
"""A value that `json` can read: object, list, text, number, true, false or None."""

FileRow = tuple[int | str, Callable[[], dict[str, Json]]]
"""Place of a row in its file, and a function that returns the row or raises UserError."""

BOM = b"\xef\xbb\xbf"


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (line number, bytes) of a JSONL file; skip empty lines and `//` comments.

    The official example file starts with two such comments. A byte order mark is accepted.
    """
    with _naming(path), open_bytes(path) as file:
        for number, line in enumerate(file, start=1):
            raw = line.removeprefix(BOM) if number == 1 else line
            if raw.strip() and not raw.lstrip().startswith(b"//"):
                yield number, raw


def open_bytes(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror}") from None


def refuse_pipe(path: Path) -> None:
    if path.is_fifo():
        raise Unreadable(f"{path}: is a pipe, but is read more than once; give a file")


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Json]]]:
    """Yield (line number, object) of a JSONL file, as `lines` does."""
    for number, raw in lines(path):
        with located(f"{path}:{number}"):
            row = parse_row(raw)
        yield number, row


@contextmanager
def located(place: str) -> Iterator[None]:
    """Put the place before the message of a `UserError` in the block."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{place}: {error}") from None


def parse_row(raw: bytes) -> dict[str, Json]:
    """Return the JSON object in a line; refuse a key that is given twice."""
    try:
        value = parse_json(raw.rstrip(), EACH_KEY_ONCE)
    except UserError as error:
        torn = "" if raw.endswith(b"\n") else "; the last line is not ended: is the file cut off?"
        raise UserError(f"{error}{torn}") from None
    if rb"\u" in raw:  # only an escape can give half of a character
        check_text(value)
    return as_object(value)


PLAIN = json.JSONDecoder()


def parse_json(raw: bytes, decoder: json.JSONDecoder = PLAIN) -> Json:
    """Return the value of UTF-8 bytes. Making a decoder for each row would take a third longer."""
    try:
        return decoder.decode(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 at byte {error.start}; save the file as UTF-8") from None
    except (ValueError, RecursionError) as error:
        if raw.startswith(BOM):
            raise UserError("starts with a byte order mark; save it as UTF-8 without BOM") from None
        problem = str(error).replace("line 1 column", "column")  # a row's place has its line
        raise UserError(f"not JSON: {problem}") from None


def each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object with these pairs; ValueError: a key is given twice."""
    value = dict(pairs)
    if len(value) < len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {key!r} is given twice")
    return value


EACH_KEY_ONCE = json.JSONDecoder(object_pairs_hook=each_key_once)


def as_object(value: Json) -> dict[str, Json]:
    if not isinstance(value, dict):
        raise UserError(f"expected a JSON object, found {type(value).__name__}")
    return value


def check_text(value: Json) -> None:
    r"""Refuse strings that UTF-8 cannot write: the JSON escape `\ud83d` is half of a character."""
    try:
        dump(value).encode("utf-8")
    except UnicodeEncodeError:
        raise UserError("a lone \\ud800-\\udfff escape is only half a character") from None
    except RecursionError:
        raise UserError("it is nested too deeply") from None


def dump(value: Json) -> str:
    """Return `value` as compact JSON on one line with unescaped Chinese."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def quoted(value: Json) -> str:
    """Return a value as JSON for a message: its first 40 characters."""
    return dump(value)[:40]


@contextmanager
def atomic_write(path: Path, is_ours: IsOurs = lies_in_ours) -> Iterator[IO[str]]:
    """Open a text file that gets its name only if the block ends without an error.

    A file of this name is replaced. It is refused if panjue did not make it, as `is_ours` says.
    """
    if path.is_dir():
        raise UserError(f"{path}: is a folder; name a file")
    refuse_foreign(path, is_ours)
    temporary = _temporary(path)
    temporary.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _naming(path), temporary.open("w", encoding="utf-8", newline="\n") as out:
            yield out
        replace(temporary, path, is_ours)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path, is_ours: IsOurs = lies_in_ours) -> Iterator[Path]:
    """Yield an empty folder, which becomes `path` only if the block ends without an error.

    Its files get the permissions of the folder, since safetensors writes files for their owner
    alone. If a process was killed here before, its temporary folder is deleted, and the folder that
    it was replacing is restored; so the caller must hold a lock. `is_ours` says whether panjue made
    what is at `path`; anything else is refused.
    """
    place = followed(path)  # the target of a link
    restore(place.parent, escape(place.name))  # no sign of the name is a wildcard
    refuse_foreign(path, is_ours)
    leftovers = f".{escape(place.name)}.*tmp"  # version 0.4 had shorter names: .NAME.tmp
    for stale in place.parent.glob(leftovers):
        if lies_in_ours(stale):  # in a folder with a record of panjue
            _remove(stale)
    temporary = _temporary(path)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        mode = temporary.stat().st_mode & 0o666
        for inner in temporary.rglob("*"):
            if inner.is_file():
                inner.chmod(mode)
        replace(temporary, path, is_ours)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _temporary(path: Path, ending: str = "tmp") -> Path:
    """Return a new name beside a file or folder, since several processes may write it at once."""
    place = followed(path)
    return place.with_name(f".{place.name}.{uuid4().hex[:8]}.{ending}")


def replace(temporary: Path, path: Path, is_ours: IsOurs = lies_in_ours) -> None:
    """Move a finished file or folder to `path`, over one that panjue made; follow links.

    This is the only function that replaces. `temporary` is on the same disk as the target of
    `path`. The system replaces a file by a file in one step. A folder is renamed first to make
    room. If the process is killed before the new folder has the name, `restore` gives the name back
    to the old one.
    """
    refuse_foreign(path, is_ours)
    place = followed(path)
    sync(temporary)
    # One step is enough unless the place has a folder, or a file that a folder replaces.
    if not (place.is_dir() or (temporary.is_dir() and place.exists())):
        temporary.replace(place)
        sync_one(place.parent)
        return
    old = _temporary(path, "old")
    place.rename(old)
    temporary.rename(place)
    sync_one(place.parent)  # first, so that one of the two is left after a power failure
    _remove(old)


def restore(folder: Path, names: str = "*") -> None:
    """Undo a killed `replace` in a folder, for the names that match a glob pattern.

    If the new file or folder has the name, delete the old one; otherwise give it the name back. The
    caller holds a lock, because another process may be between these steps.
    """
    for old in folder.glob(f".{names}.????????.old"):
        name, _, _ = old.name.removeprefix(".").rsplit(".", 2)
        place = old.with_name(name)
        if not lies_in_ours(old):
            continue
        if place.exists():
            _remove(old)
        else:
            old.rename(place)


def delete(path: Path, is_ours: IsOurs = lies_in_ours) -> None:
    """Delete a file or folder that panjue made, if it exists; delete only the link if it is one."""
    refuse_foreign(path, is_ours)
    _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file, or everything in a folder, is on the disk."""
    if path.is_dir():
        for inner in path.iterdir():
            sync(inner)
    sync_one(path)


def sync_one(path: Path) -> None:
    """Wait until a file is on the disk; of a folder, only the list of its names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with _naming(path):
            os.fsync(descriptor)
    except OSError as error:
        # Some file systems (CIFS, VirtualBox, some FUSE) cannot sync a folder.
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(descriptor)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the name of the file to an error in the block; the error of a full disk has none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_json(path: Path, value: Json, is_ours: IsOurs = lies_in_ours) -> None:
    """Write `value` as an indented JSON file, atomically."""
    with atomic_write(path, is_ours) as out:
        out.write(json_text(value))


def json_text(value: Json) -> str:
    """Return the text that `write_json` would write."""
    return json.dumps(value, ensure_ascii=False, indent=2) + "\n"


def read_json(path: Path) -> Json:
    """Return the value in a JSON file. An error of the disk or of the content names the file."""
    with _naming(path), open_bytes(path) as file, located(str(path)):
        return parse_json(file.read())


def read_object(path: Path) -> dict[str, Json]:
    value = read_json(path)
    with located(str(path)):
        return as_object(value)


def read_record(path: Path) -> dict[str, Json]:
    """Return the object of a record. Its file is read only once as long as it does not change."""
    try:
        raw = record_bytes(path)
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror}") from None
    with located(str(path)):
        return as_object(parse_json(raw))


@contextmanager
def stream(path: Path) -> Iterator[IO[str]]:
    """Open an append-only JSONL stream; first drop the incomplete last line of a killed process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as old:
        end = old.seek(0, os.SEEK_END)
        while end > 0:
            old.seek(end - 1)
            if old.read(1) == b"\n":
                break
            end -= 1
        old.truncate(end)
    with _naming(path), path.open("a", encoding="utf-8", newline="\n") as out:
        yield out


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, or of the files of a folder with their relative names."""
    if path.is_dir():
        files = [inner for inner in sorted(path.rglob("*")) if inner.is_file()]
        listed = "\n".join(f"{sha256(file)} {file.relative_to(path)}" for file in files)
        return hashlib.sha256(listed.encode()).hexdigest()
    with path.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def difference(old: Mapping[str, Json], new: Mapping[str, Json]) -> str:
    """Return the entries that differ between two manifests, with both values, in one line.

    Nested entries are listed one by one: `trainer.max_steps: 10 -> 20`. The path of a file, in
    `train`, may differ if the hash in `train_sha256` is equal, because files may be moved. Another
    hash is listed under the path: `train: a.jsonl -> b.jsonl`, or `train: a.jsonl was changed`.
    """
    before = dict(flat(old))
    after = dict(flat(new))
    keys = before | after
    changes = []
    for key in keys:
        was = before.get(key)
        now = after.get(key)
        key_of_path = key.removesuffix("_sha256")
        has_hash = f"{key}_sha256" in keys  # of `train`: `train_sha256` decides, see below
        if was == now or has_hash:
            continue
        if key_of_path != key and key_of_path in keys:  # `train_sha256` is listed as `train`
            was = before.get(key_of_path)
            now = after.get(key_of_path)
            changed = "was changed" if was == now else f"-> {now}"
            changes.append(f"{key_of_path}: {was} {changed}")
        else:
            changes.append(f"{key}: {_short(was)} -> {_short(now)}")
    return "; ".join(changes)


def flat(mapping: Mapping[str, Json], prefix: str = "") -> Iterator[tuple[str, Json]]:
    """Yield the entries of a mapping, and of inner ones: `{"a": {"b": 1}}` -> `("a.b", 1)`."""
    for key, value in mapping.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _short(value: Json) -> str:
    text = value if isinstance(value, str) else dump(value)
    if len(text) <= 40:
        return text
    return f"{text[:12]}…{text[-12:]}"


@contextmanager
def shared_lock(folder: Path) -> Iterator[None]:
    """Keep others from taking the `exclusive_lock` of a folder while the block reads there.

    Others may read, too. If another process holds the lock, wait for it and say so.
    """
    with (folder / ".lock").open("ab") as file:
        try:
            flock(file, LOCK_SH | LOCK_NB)
        except BlockingIOError:
            say_waiting(folder)
            flock(file, LOCK_SH)
        except OSError:
            pass  # a network file system without locks: then there is none
        yield


def say_waiting(folder: Path) -> None:
    print(f"waiting for another process of panjue at work in {folder}", flush=True)


LOCK_TIMEOUT_S = 1.0
"""A killed process, or a worker that it just forked, may hold the lock for about this time."""


@contextmanager
def exclusive_lock(
    folder: Path, name: str = ".lock", *, wait: bool = False, other: str = ""
) -> Iterator[None]:
    """Keep other processes of panjue from writing into a folder while the block runs.

    The kernel releases the lock when the process ends in any way. A thread may nest such blocks. If
    the lock has made the folder and the block leaves it empty, the folder is deleted.

    `name` is the file of the lock; locks of other names in the same folder are independent. If
    another process has the lock, wait for it with `wait`, or else raise UserError. The error
    suggests another value of the setting `other`, such as `run=FOLDER`.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.resolve() / name, fallback_to_soft=False, is_singleton=True)
    try:
        lock.acquire(timeout=LOCK_TIMEOUT_S)
    except Timeout:
        if not wait:
            way_out = f"wait for it, stop it, or choose another {other}" if other else "wait for it"
            problem = "another process is at work there"
            raise UserError(f"{folder}: {problem}; {way_out}") from None
        say_waiting(folder)
        lock.acquire()
    except OSError as error:
        if error.filename:  # of opening the file; an error of locking has no name
            raise
        # A network file system without locks: then there is none.
    try:
        yield
    finally:
        if is_new and folder.is_dir() and all(path.name == name for path in folder.iterdir()):
            shutil.rmtree(folder)
        lock.release()
