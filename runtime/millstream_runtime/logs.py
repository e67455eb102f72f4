"""Structured logs: one line per event, `key=value` or JSON, never with a prompt or an answer.

2026-01-31T12:00:00.123Z INFO boot_phase phase=LoadingWeights seconds=0.41
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import Any, TextIO

from millstream_runtime.processes.unblocked_stderr import take_dropped_writes

LEVEL_VARIABLE = "MILLSTREAM_LOG_LEVEL"
FORMAT_VARIABLE = "MILLSTREAM_LOG_FORMAT"
# Libraries that send to addresses of the environment. Their messages quote these, headers and what a server answered,
# all of which may be secret, so only their place in the code is logged.
SENDING_LIBRARIES = ("opentelemetry", "requests", "urllib3")
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class EventLogger:
    """`log.info("event_name", key=value, …)` on top of the standard library's logging."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, **fields: object) -> None:
        self._logger.debug(event, extra={"fields": fields})

    def info(self, event: str, **fields: object) -> None:
        self._logger.info(event, extra={"fields": fields})

    def warning(self, event: str, **fields: object) -> None:
        self._logger.warning(event, extra={"fields": fields})

    def error(self, event: str, **fields: object) -> None:
        self._logger.error(event, extra={"fields": fields})


log = EventLogger("millstream")


class _Formatter(logging.Formatter):
    def __init__(self, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        record = _without_addresses(record)
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        fields: dict[str, Any] = dict(getattr(record, "fields", {}))
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        if self._as_json:
            line = {"time": moment, "level": record.levelname, "event": record.getMessage(), **fields}
            return json.dumps(line, ensure_ascii=False, default=str)
        shown = "".join(f" {key}={_quoted(value)}" for key, value in fields.items())
        return f"{moment} {record.levelname} {record.getMessage()}{shown}"


class _Handler(logging.StreamHandler[TextIO]):
    """Says how many lines were dropped while standard error was not read, once it is read again."""

    def emit(self, record: logging.LogRecord) -> None:
        if count := take_dropped_writes(self.stream):
            fields = {"msg": "log_lines_dropped", "fields": {"count": count, "message": "Standard error was not read."}}
            lost = {"name": record.name, "levelno": logging.WARNING, "levelname": "WARNING"}
            super().emit(logging.makeLogRecord({**lost, **fields}))
        super().emit(record)


def _without_addresses(record: logging.LogRecord) -> logging.LogRecord:
    """The record; of a library that sends, its place in the code, and the type of its exception."""
    if record.name.partition(".")[0] not in SENDING_LIBRARIES:
        return record
    fields: dict[str, object] = {"library": record.name, "at": f"{record.filename}:{record.lineno}"}
    if record.exc_info and record.exc_info[0] is not None:
        fields["error"] = record.exc_info[0].__name__
    kept = {name: getattr(record, name) for name in ("name", "levelno", "levelname", "created", "msecs")}
    return logging.makeLogRecord({**kept, "msg": "library_warning", "fields": fields})


def configure_logging(default_level: str = "info") -> None:
    """Send the log to stderr. MILLSTREAM_LOG_LEVEL: debug, info, warning, error; MILLSTREAM_LOG_FORMAT: json."""
    level = os.environ.get(LEVEL_VARIABLE, default_level).lower()
    handler = _Handler(sys.stderr)
    handler.setFormatter(_Formatter(os.environ.get(FORMAT_VARIABLE, "").lower() == "json"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)  # libraries log only warnings
    logging.getLogger("millstream").setLevel(_LEVELS.get(level, logging.INFO))


def set_log_level(level: str) -> None:
    """Set the level of Millstream's own log; libraries keep logging only warnings."""
    logging.getLogger("millstream").setLevel(_LEVELS[level])


def log_level() -> str:
    """The level of Millstream's own log."""
    number = logging.getLogger("millstream").getEffectiveLevel()
    return next((name for name, level in _LEVELS.items() if level >= number), "error")


def _quoted(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value)
    return (
        text if text and not any(character in text for character in ' "=\n') else json.dumps(text, ensure_ascii=False)
    )
