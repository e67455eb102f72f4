"""A panic of a library in Rust, and an exception that has no class, as an Exception that can be caught by its class.

pyo3 raises a panic as `pyo3_runtime.PanicException`, which is a BaseException: `except Exception` lets it pass, and the
thread, the task or the answer in which it was raised ends without a word. Each library has its own class of that name,
and none can be imported, so it is recognized by its name.

    with panics_as_errors:
        safe_open(path)

`tokenizers` also raises plain `Exception`, for example where a vocabulary has no token for unknown text. To catch that
class would catch every mistake of ours, too; `tokenizers_errors` takes no subclass of it.

    with tokenizers_errors:
        fast.encode(text)
"""

from __future__ import annotations

from contextlib import ContextDecorator
from types import TracebackType

from millstream_runtime.errors import FailureReason, RuntimeFailure

PANIC_MODULE, PANIC_NAME = "pyo3_runtime", "PanicException"


class RustPanic(RuntimeFailure):
    """A library in Rust panicked, or failed with a plain Exception. `__cause__` is what it raised.

    The message has none of the library's own text, which may quote what it was given, for example a prompt.
    """

    def __init__(self) -> None:
        super().__init__(FailureReason.RUNTIME_CRASHED, "A library in Rust failed on this input.")

    @property
    def detail(self) -> str:
        """The library's own text, for what is no prompt and no answer."""
        return str(self.__cause__)


class _PanicsAsErrors(ContextDecorator):
    """It keeps no state of a call, so that one object serves all threads."""

    def __init__(self, *, takes_plain_exceptions: bool) -> None:
        self._takes_plain_exceptions = takes_plain_exceptions

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        if is_panic(error) or (self._takes_plain_exceptions and type(error) is Exception):
            raise RustPanic from error


panics_as_errors = _PanicsAsErrors(takes_plain_exceptions=False)
tokenizers_errors = _PanicsAsErrors(takes_plain_exceptions=True)


def is_panic(error: BaseException) -> bool:
    """Whether it is a panic of Rust. All other exceptions, KeyboardInterrupt and CancelledError among them, are not."""
    kind = type(error)
    return kind.__name__ == PANIC_NAME and kind.__module__ == PANIC_MODULE
