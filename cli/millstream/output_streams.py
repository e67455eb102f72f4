"""Standard output and error as a user's shell gives them: closed, full, a pipe that ends early, no UTF-8.

A character that the terminal's encoding lacks is written as a similar one. A stream that is closed is replaced by
/dev/null, because Python has None in its place, and the files that are opened next would get its number.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import select
import sys
from typing import TextIO

from millstream_runtime.errors import FailureReason, RuntimeFailure

SIMILAR = "millstream-similar"
SIMILAR_CHARACTERS = {
    "×": "x",
    "·": "|",
    "−": "-",
    "–": "-",
    "÷": "/",
    "≤": "<=",
    "≥": ">=",
    "…": "...",
    "→": "->",
    "✓": "*",
    "“": '"',
    "”": '"',
    "█": "#",
    "░": ".",
}
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def prepare_output_streams() -> None:
    """Replace closed streams, and let no character of the output raise."""
    codecs.register_error(SIMILAR, _similar)
    _occupy_standard_descriptors()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123 - for the whole process
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=SIMILAR)


def _occupy_standard_descriptors() -> None:
    """Open /dev/null where 0, 1 or 2 is closed, for child processes too: their warnings would go into a socket."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest number that is free: this one


def is_utf_8() -> bool:
    """Return whether standard output takes every character."""
    return (sys.stdout.encoding or "").lower().startswith("utf")


def reader_is_gone() -> bool:
    """Return whether standard output or standard error is a pipe that nothing reads any more."""
    for descriptor in (1, 2):
        poll = select.poll()
        poll.register(descriptor, 0)
        if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
            return True
    return False


def can_redraw(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that can write a line again; TERM=dumb says that it cannot."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def columns_of(stream: TextIO) -> int | None:
    """Return the width of the terminal that a stream is; None where it is none, or does not say."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):  # no terminal; a stream without a descriptor raises an OSError too
        return None


def one_row(text: str, stream: TextIO) -> str:
    """Return the text, cut to one row of the terminal: of a line that wraps only the last row is cleared."""
    columns = columns_of(stream)
    return text if columns is None or len(text) < columns else f"{text[: max(0, columns - 2)]}…"


def drop_output() -> None:
    """Send to /dev/null what is left in the buffer: Python would try to write it again when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def output_failure(error: OSError) -> RuntimeFailure | None:
    """Return the failure of a standard output that cannot be written; None for an error of anything else."""
    if error.filename is not None or error.errno not in UNWRITABLE:
        return None
    return RuntimeFailure(FailureReason.DISK_FULL, f"Standard output cannot be written: {error.strerror}.")


def _similar(error: UnicodeError) -> tuple[str, int]:
    """Replace what an encoding lacks; what has no similar character is escaped, as Python does on stderr."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    shown = (SIMILAR_CHARACTERS.get(one) or one.encode("ascii", "backslashreplace").decode() for one in lacking)
    return "".join(shown), error.end
