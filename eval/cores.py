"""Work on the blocks of a large file with all cores, and take the results in the file's order."""

import multiprocessing
import os
import signal
import traceback
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.orphans import end_with_parent
from panjue.prompts.plumbing.progress import meter
from panjue.prompts.reader import ALONE, Reader, Share

LARGE = 2**26
"""Bytes of a file from which processes are worth their start: about 10,000 real cases."""

MOST = 16
"""The most processes: more would wait for the one that takes their results."""

T = TypeVar("T")


def is_large(path: Path) -> bool:
    """Say whether a file is worth several processes, and a progress line."""
    return path.is_file() and path.stat().st_size >= LARGE


@contextmanager
def told(path: Path, total: int) -> Iterator[Callable[[int], None]]:
    """Yield what shows how many of about `total` examples are done; nothing of a small file."""
    if not is_large(path):
        yield lambda _: None
        return
    with meter(Console(soft_wrap=True), total) as progress:

        def show(done: int) -> None:
            progress.total = max(progress.total, done)
            progress.to(done, f"{progress.rate:,.0f} cases/s")

        yield show


class End:
    """A process has no further block."""


def count_examples(reader: Reader, path: Path) -> int:
    """Read a whole file with all cores; return the number of its examples.

    Raises:
        UserError: As for `Reader.read`.
    """
    seen: set[str] = set()
    with closing(on_all_cores(partial(_ids, reader, path), reader, path)) as blocks:
        for ids in blocks:
            add_unique(seen, ids, path)
    return len(seen)


def _ids(reader: Reader, path: Path, share: Share) -> Iterator[list[str]]:
    for examples in reader.blocks(path, share):
        yield [str(example.id) for example in examples]


def add_unique(seen: set[str], ids: Iterable[str], path: Path) -> None:
    """Add ids of a file to those of other blocks.

    Raises:
        UserError: One is among them.
    """
    for key in ids:
        if key in seen:
            raise UserError(f"{path}: id {key} is used twice; see `panjue check`")
        seen.add(key)


def on_all_cores(
    work: Callable[[Share], Iterator[T]], reader: Reader, path: Path, *, alone: bool = False
) -> Generator[T, None, None]:
    """Yield what `work` yields for every block of the file `path`, in order.

    Args:
        work: Share of the file -> one result for each block in it; results are pickled.
        reader: What `work` reads with. If it skips bad rows, one process does all: the second row
            of an id is bad, wherever the first one is.
        path: A large file is shared out among processes.
        alone: Whether one process does all, since something does not survive a fork (a model, a
            database).

    Raises:
        UserError: `work` has raised it, or a process has died.
    """
    cores = min(len(os.sched_getaffinity(0)), MOST)
    if alone or reader.on_bad_row == "skip" or cores == 1 or not is_large(path):
        yield from work(ALONE)
        return
    # Forked: tasks and indexes are neither pickled nor made anew.
    context = multiprocessing.get_context("fork")
    processes, pipes = [], []
    try:
        for number in range(cores):
            pipe, end = context.Pipe(duplex=False)
            process = context.Process(target=_send, args=(work, Share(number, cores), end))
            with warnings.catch_warnings():  # Python 3.12 warns if there are threads
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            end.close()
            processes.append(process)
            pipes.append(pipe)
        yield from _in_turns(pipes)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _in_turns(pipes: list[Connection]) -> Iterator[Any]:
    """Yield one result of each process in turn, until one has no further block."""
    while True:
        for pipe in pipes:
            try:
                result = pipe.recv()
            except (EOFError, OSError):  # OSError: in the middle of a result
                raise UserError(
                    f"one of {len(pipes)} processes has ended; is memory short?"
                ) from None
            if isinstance(result, Exception):
                raise result
            if isinstance(result, End):
                return
            yield result


def _send(work: Callable[[Share], Iterator[Any]], share: Share, pipe: Connection) -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its children
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        for result in work(share):
            pipe.send(result)
        pipe.send(End())
    except UserError as error:
        pipe.send(error)
    except Exception:  # it may not be picklable, and its traceback is not
        pipe.send(RuntimeError(traceback.format_exc()))
