"""A command opens a folder once: manifests, adapter and test file are read no more than they must.

An audit hook counts how often each file is opened.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from panjue.prompts.plumbing import ours

Panjue = Callable[..., CompletedProcess[str]]

opened: Counter[str] = Counter()
is_counting = False


def count(event: str, arguments: tuple[Any, ...]) -> None:
    """Count the files that are opened to be read; a hook stays for the life of the process."""
    if is_counting and event == "open":
        path, mode, _ = arguments
        is_read = mode is None or "r" in mode
        if isinstance(path, str) and is_read:
            opened[path] += 1


sys.addaudithook(count)


@contextmanager
def counting() -> Iterator[Counter[str]]:
    global is_counting  # noqa: PLW0603  # the hook cannot be removed, only told to stop
    opened.clear()
    ours._bytes_of.cache_clear()  # as in a process that has just begun
    is_counting = True
    try:
        yield opened
    finally:
        is_counting = False


@pytest.mark.parametrize("command", ["decode", "score", "generate"])
def test_what_a_command_works_with_is_read_once(
    command: str, answered: Path, workshop: Path, panjue: Panjue
) -> None:
    test = workshop / "demo/test.jsonl"
    folder = answered / "answers/test"
    words: dict[str, list[Any]] = {
        "decode": [folder],
        "score": [test, folder],
        "generate": [answered, test, "answer=model"],
    }
    with counting() as reads:
        done = panjue(command, *words[command])
    assert done.returncode == 0, done.stderr
    manifests = {path: times for path, times in reads.items() if path.endswith("/manifest.json")}
    assert manifests[str(folder / "manifest.json")] == 1
    assert manifests[str(answered / "adapter/manifest.json")] == 1
    assert max(manifests.values()) == 1, manifests
    assert reads[str(answered / "adapter/adapter_model.safetensors")] == 1
    assert reads[str(test)] <= 2
