"""The exceptions a user is meant to read."""

import difflib
import errno
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

SIGNAL_DEBOUNCE_S = 2.0
"""Within this time a signal is the first once more: `make` and launchers pass on what all got."""


class UserError(Exception):
    """The run cannot go on, and the person at the keyboard can fix it.

    Its message is one line: the thing, the place, the way out. The command line prints it and
    exits with code 2; any other exception is our bug and keeps its traceback.
    """


class Unreadable(UserError):
    """A file cannot be opened at all: what it holds is not in question."""


class Stopped(BaseException):
    """A signal has ended the work, which can be gone on with; the message says how.

    Like `KeyboardInterrupt`, it is nothing that a library may catch on the way.
    """

    def __init__(self, message: str, signal: int) -> None:
        """Say what is saved; the command's exit code tells the signal, as shells do."""
        super().__init__(message)
        self.exit_code = 128 + signal


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the nearest of `known`, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a full disk, a spent quota and a limit on files say."""


@contextmanager
def in_one_line() -> Iterator[None]:
    """End the process with one line and exit code 2 where a user can mend what went wrong."""
    try:
        yield
    except UserError as error:
        print(f"panjue: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if not error.filename and error.errno not in NO_ROOM:
            raise
        place = f"{error.filename}: " if error.filename else ""
        more = "; make room, then the same command goes on" if error.errno in NO_ROOM else ""
        print(f"panjue: {place}{error.strerror}{more}", file=sys.stderr)
        sys.exit(2)
    except ModuleNotFoundError as error:
        if not error.name or error.name.startswith("panjue"):
            raise
        told = "make install, or pip install 'panjue[cpu]' (with a GPU 'panjue[gpu]')"
        print(f"panjue: {error.name} is not installed; {told}", file=sys.stderr)
        sys.exit(2)
    except Stopped as stopped:
        with suppress(OSError):  # a Ctrl-C ends `| tee` too
            print(f"panjue: {stopped}", file=sys.stderr)
        sys.exit(stopped.exit_code)
