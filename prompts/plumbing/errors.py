"""Exceptions with messages for the user."""

import difflib
import errno
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from unicodedata import category

SIGNAL_DEBOUNCE_S = 2.0
"""A second signal within this time counts as a copy: `make` and launchers forward a signal to
processes that have already received it."""


class UserError(Exception):
    """The run cannot continue, and the user can fix the cause.

    The message is one line with the thing, the place and the way out. The command line prints it
    and exits with code 2. Any other exception is our bug and keeps its traceback. Every function
    that reads a user's input may raise it, so docstrings mostly name only other exceptions.
    """


class Unreadable(UserError):
    """A file cannot be opened or has another form; the problem is not in a row."""


class NotSaid(UserError):
    """A row does not say for certain what its case needs, so that it is left out."""

    def __init__(self, kind: str, text: str = "") -> None:
        """Set the kind of reason, by which rows are counted, and the text that it is about."""
        super().__init__(f"{kind}: {text[:60]!r}" if text else kind)
        self.kind = kind


class Stopped(BaseException):
    """A signal has stopped the run. The message says how to resume.

    Like `KeyboardInterrupt`, it is no `Exception`, so that libraries do not catch it.
    """

    def __init__(self, message: str, signal: int) -> None:
        """Set the message, and the exit code that shells give for the signal."""
        super().__init__(message)
        self.exit_code = 128 + signal


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` with the nearest of `known`, or an empty text."""
    match = _nearest(word, tuple(known))
    return f"; did you mean {match!r}?" if match else ""


def no_such(value: object, known: Iterable[str]) -> str:
    """Return `there is no 'x'; did you mean 'y'? (there are y, z)` for a message."""
    names = list(known)
    hint = did_you_mean(value, names) if isinstance(value, str) else ""
    return f"there is no {value!r}{hint} (there are {', '.join(names)})"


@lru_cache(maxsize=1024)  # a wrong label may occur in every row of a file
def _nearest(word: str, known: tuple[str, ...]) -> str:
    return next(iter(difflib.get_close_matches(word, known, n=1, cutoff=0.6)), "")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of the error if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories of characters that a terminal does not show; it obeys some of them."""


def printable(text: object) -> str:
    r"""Return a text for the terminal with Python's escapes of characters that it does not show.

    Ids and names come from files. ESC, here written as `\x1b`, could clear the screen.
    """
    shown = []
    for character in str(text):
        is_seen = category(character) not in UNSEEN
        shown.append(character if is_seen else character.encode("unicode_escape").decode())
    return "".join(shown)


LIBRARY_ERRORS = (
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ImportError,
    OSError,
    OverflowError,
    re.error,
)
"""Exceptions of libraries about settings and files that they cannot use."""


@contextmanager
def of_library(section: str, way_out: str = "") -> Iterator[None]:
    """Raise UserError(`section: message`) for a library's error about settings or files."""
    try:
        yield
    except (*LIBRARY_ERRORS, RuntimeError) as error:
        # A missing logger, such as wandb, raises a RuntimeError, and so does CUDA.
        if isinstance(error, RuntimeError) and "to be installed" not in str(error):
            raise
        raise UserError(f"{section}: {first_line(error).rstrip('.')}{way_out}") from None


DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk, a used-up quota, and a limit on the size of files."""

DRIVE_ERRORS = (errno.EIO, errno.ESTALE)
"""Error numbers of a drive that fails, and of a network drive that has lost the file."""


@contextmanager
def in_one_line() -> Iterator[None]:
    """On an error that the user can fix, print one line and end the process with code 2."""
    code = 2
    try:
        yield
        return
    except UserError as error:
        problem = str(error)
    except OSError as error:
        hint = ""
        if error.errno in DISK_FULL_ERRORS:
            hint = "; free some space, then run the same command to resume"
        elif error.errno in DRIVE_ERRORS:
            hint = "; the drive has failed: when it works again, run the same command to resume"
        if not error.filename and not hint:
            raise
        place = f"{error.filename}: " if error.filename else ""
        problem = f"{place}{error.strerror}{hint}"
    except ModuleNotFoundError as error:
        if not error.name or error.name.startswith("panjue"):
            raise
        hint = "make install, or pip install 'panjue[cpu]' (with a GPU 'panjue[gpu]')"
        problem = f"{error.name} is not installed; {hint}"
    except Stopped as stopped:
        problem = str(stopped)
        code = stopped.exit_code
    with suppress(OSError):  # a Ctrl-C may have ended the `| tee` that reads our output
        print(printable(f"panjue: {problem}"), file=sys.stderr)
    sys.exit(code)
