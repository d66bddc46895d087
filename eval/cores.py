"""Work on the blocks of a large file with all cores, and take the results in the file's order."""

import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from panjue.prompts.plumbing.errors import UserError
from panjue.prompts.plumbing.progress import meter
from panjue.prompts.reader import ALONE, Reader, Share, SkippedRows

LARGE = 2**26
"""Bytes of a file from which processes are worth their start: about 10,000 real cases."""

T = TypeVar("T")


@contextmanager
def told(path: Path, total: int) -> Iterator[Callable[[int], None]]:
    """Yield what shows how many of `total` examples of a file are done; nothing of a small file."""
    if not is_large(path):
        yield lambda _: None
        return
    with meter(Console(soft_wrap=True), total) as progress:
        yield lambda done: progress.to(done, f"{progress.rate:,.0f} cases/s")


class End:
    """A process has no further block."""


def is_large(path: Path) -> bool:
    """Say whether a file is worth several processes, and a progress line."""
    return path.is_file() and path.stat().st_size >= LARGE


def count_examples(reader: Reader, path: Path) -> int:
    """Read a whole file with all cores; return the number of its examples.

    Raises:
        UserError: As for `Reader.read`.
    """
    seen: set[str] = set()
    with closing(on_all_cores(partial(_ids, reader, path), path)) as blocks:
        for ids, skipped in blocks:
            add_unique(seen, ids, path)
            reader.skipped.rows.update(skipped)
    return len(seen)


def _ids(reader: Reader, path: Path, share: Share) -> Iterator[tuple[list[str], SkippedRows]]:
    for block in reader.blocks(path, share):
        yield [str(example.id) for example in block.examples], block.skipped


def add_unique(seen: set[str], ids: Iterable[str], path: Path) -> None:
    """Add ids of a file to those of other blocks.

    Raises:
        UserError: One is among them.
    """
    for key in ids:
        if key in seen:
            raise UserError(f"{path}: id {key} is used twice; see `panjue check`")
        seen.add(key)


def on_all_cores(work: Callable[[Share], Iterator[T]], path: Path) -> Generator[T, None, None]:
    """Yield what `work` yields for every block of the file `path`, in order.

    Args:
        work: Share of the file -> one result for each block in it; results are pickled.
        path: A large file is shared out among as many processes as there are cores.
    """
    cores = len(os.sched_getaffinity(0)) if is_large(path) else 1
    if cores == 1:
        yield from work(ALONE)
        return
    # Forked: tasks and indexes are neither pickled nor made anew. The children run none of the
    # libraries whose threads do not survive that.
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
    """Yield one result of each process in turn; the first one without a block has the last."""
    while True:
        for pipe in pipes:
            try:
                result = pipe.recv()
            except EOFError:
                raise UserError(
                    f"one of {len(pipes)} processes has ended; is memory short?"
                ) from None
            if isinstance(result, Exception):
                raise result
            if isinstance(result, End):
                return
            yield result


def _send(work: Callable[[Share], Iterator[Any]], share: Share, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its children
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        for result in work(share):
            pipe.send(result)
        pipe.send(End())
    except BrokenPipeError:  # the parent has ended
        return
    except Exception as error:
        pipe.send(error)
