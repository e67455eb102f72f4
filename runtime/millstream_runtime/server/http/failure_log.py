"""One log line for each request that ends with a 5xx: its id and the cause, which the client is not shown.

An exception's message may quote a prompt, so of an unknown exception only its type and the lines of code are logged,
and uvicorn's own line, which has the message, is dropped.
"""

from __future__ import annotations

import logging
import traceback

from millstream_runtime.errors import RuntimeFailure
from millstream_runtime.logs import log
from millstream_runtime.rust_panics import RustPanic
from millstream_runtime.server.http.api_errors import ApiError

EXPECTED_CODES = ("model_loading", "draining")  # of every start and every end of a server


def log_failure(request_id: str, error: Exception) -> None:
    """Log why a request failed, if that is a 5xx: an ApiError of another status is not logged."""
    if not isinstance(error, ApiError):
        fields = {"request_id": request_id, "status": 500, "code": "internal_error", "cause": cause_of(error)}
        log.error("request_failed", **fields, traceback="".join(traceback.format_tb(error.__traceback__)))
        return
    if error.status < 500:
        return
    write = log.info if error.code in EXPECTED_CODES else log.error if error.status == 500 else log.warning
    cause = cause_of(error.__cause__) if error.__cause__ is not None else error.message
    write("request_failed", request_id=request_id, status=error.status, code=error.code, cause=cause)


def keep_messages_out_of_the_log() -> None:
    """Drop uvicorn's line for an exception of the application, which `log_failure` has logged."""
    logging.getLogger("uvicorn.error").addFilter(_has_no_exception)


def _has_no_exception(record: logging.LogRecord) -> bool:
    return record.exc_info is None


def cause_of(error: BaseException) -> str:
    """A sentence of ours as it is; else the type of the exception and the line that raised it."""
    if isinstance(error, RustPanic) and error.__cause__ is not None:
        return cause_of(error.__cause__)
    if isinstance(error, RuntimeFailure):
        return error.message
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return type(error).__name__ + where
