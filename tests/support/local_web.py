"""A web server in a thread of the test: the base of the local hub and the local registry, with faults on request."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar


@dataclass
class Fault:
    """What happens to the next `times` requests whose path holds `path`."""

    path: str
    times: int = 1
    status: int = 0  # answer this
    headers: dict[str, str] = field(default_factory=dict)
    cut_after_bytes: int | None = None  # close the connection after so many bytes of the body
    garble: bool = False  # flip the first byte of the body
    ignore_range: bool = False
    hold: threading.Event | None = None  # send half of the body, then wait for this


class LocalWeb(ThreadingHTTPServer):
    """Counts requests and the bytes of bodies by path; subclasses say what is where in `respond`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.faults: list[Fault] = []
        self.requests: Counter[str] = Counter()
        self.body_bytes: Counter[str] = Counter()
        self.authorizations: dict[str, set[str]] = {}
        self.sent_half = threading.Event()
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def respond(self, request: _Handler) -> None:
        raise NotImplementedError

    def note(self, request: _Handler) -> Fault:
        with self._lock:
            path = request.path.partition("?")[0]
            self.requests[f"{request.command} {path}"] += 1
            self.authorizations.setdefault(path, set()).add(request.headers.get("Authorization", ""))
            for fault in self.faults:
                if fault.times and fault.path in request.path and request.command == "GET":
                    fault.times -= 1
                    return fault
            return Fault("")

    def count(self, path: str, sent_bytes: int) -> None:
        with self._lock:
            self.body_bytes[path.partition("?")[0]] += sent_bytes

    def gets(self, part: str) -> int:
        """GET requests whose path holds `part`."""
        return sum(n for line, n in self.requests.items() if line.startswith("GET ") and part in line)

    def sent(self, part: str) -> int:
        """Bytes of bodies under paths that hold `part`."""
        return sum(n for path, n in self.body_bytes.items() if part in path)


class _Handler(BaseHTTPRequestHandler):
    server: LocalWeb
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self.fault = self.server.note(self)
        if self.fault.status:
            return self.answer(self.fault.status, b"no", **self.fault.headers)
        return self.server.respond(self)

    def do_HEAD(self) -> None:
        self.do_GET()

    def answer(self, status: int, body: bytes = b"", **headers: Any) -> None:
        """A whole answer; header names with _ for -."""
        self.send_response(status)
        for key, value in {"Content_Length": len(body), **headers}.items():
            self.send_header(key.replace("_", "-"), str(value))
        self.end_headers()
        if self.command == "GET":
            self._send(body)

    def answer_content(self, content: bytes, **headers: Any) -> None:
        """A file: whole, or the range that is asked for."""
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not found or self.fault.ignore_range:
            return self.answer(200, content, **headers)
        start, end = int(found[1]), min(int(found[2] or len(content) - 1), len(content) - 1)
        if start >= len(content):
            return self.answer(416)
        content_range = f"bytes {start}-{end}/{len(content)}"
        return self.answer(206, content[start : end + 1], Content_Range=content_range, **headers)

    def _send(self, body: bytes) -> None:
        fault = self.fault
        if fault.garble:
            body = bytes([body[0] ^ 255]) + body[1:]
        if fault.cut_after_bytes is not None:
            body, self.close_connection = body[: fault.cut_after_bytes], True
        if fault.hold is not None:
            self._write(body[: len(body) // 2])
            self.server.sent_half.set()
            fault.hold.wait(120)
            body = body[len(body) // 2 :]
        self._write(body)

    def _write(self, body: bytes) -> None:
        for start in range(0, len(body), 1 << 16):
            part = body[start : start + (1 << 16)]
            try:
                self.wfile.write(part)
            except OSError:
                self.close_connection = True
                return
            self.server.count(self.path, len(part))


Handler = _Handler
WebT = TypeVar("WebT", bound=LocalWeb)


@contextmanager
def running(make: Callable[[], WebT]) -> Iterator[WebT]:
    """The server while the block runs."""
    server = make()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
