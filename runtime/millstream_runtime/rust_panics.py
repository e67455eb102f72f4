"""A panic of a library in Rust as an Exception.

pyo3 raises a panic as `pyo3_runtime.PanicException`, which is a BaseException: `except Exception` lets it pass, and the
thread, the task or the answer in which it was raised ends without a word. Each library has its own class of that name,
and none can be imported, so it is recognized by its name.

    with panics_as_errors:
        fast.encode(text)
"""

from __future__ import annotations

from contextlib import ContextDecorator
from types import TracebackType

from millstream_runtime.errors import FailureReason, RuntimeFailure

PANIC_MODULE, PANIC_NAME = "pyo3_runtime", "PanicException"


class RustPanic(RuntimeFailure):
    """A library in Rust panicked. `__cause__` is the panic itself.

    The message has none of the panic's own text, which may quote what the library was given, for example a prompt.
    """

    def __init__(self) -> None:
        super().__init__(FailureReason.RUNTIME_CRASHED, "A library in Rust failed on this input (a panic).")

    @property
    def detail(self) -> str:
        """The panic's own text, for what is no prompt and no answer."""
        return str(self.__cause__)


class _PanicsAsErrors(ContextDecorator):
    """It keeps no state, so that one object serves all threads."""

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and is_panic(error):
            raise RustPanic from error


panics_as_errors = _PanicsAsErrors()


def is_panic(error: BaseException) -> bool:
    """Whether it is a panic of Rust. All other exceptions, KeyboardInterrupt and CancelledError among them, are not."""
    kind = type(error)
    return kind.__name__ == PANIC_NAME and kind.__module__ == PANIC_MODULE
