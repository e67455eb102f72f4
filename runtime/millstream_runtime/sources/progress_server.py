"""Answer `/ready` while a model is downloaded or made, as the runtime does while it loads: 503 and what is done.

    {"ready": false, "phase": "Downloading", "progress": {"done_bytes": 3221225472, "total_bytes": 8053063680}}

The operator reads it: a pod whose bytes move is not past its deadline, and the status says how far a Job is. The work
never fails because of it.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from millstream_runtime.sources.progress import DownloadProgress

PHASE = "Downloading"
PORT = 8000  # of a pod's `/ready`, as the operator knows it
REQUEST_SECONDS = 5.0


class _Server(ThreadingHTTPServer):
    daemon_threads = True


class _DualStackServer(_Server):
    address_family = socket.AF_INET6

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


def serve_progress(progress: DownloadProgress, port: int) -> ThreadingHTTPServer | None:
    """Answer with the bytes of a download; see `serve_report`."""

    def report() -> Mapping[str, object]:
        done = {"done_bytes": progress.done_bytes, "total_bytes": progress.expected_bytes}
        return {"ready": False, "phase": PHASE, "progress": done}

    return serve_report(report, port)


def serve_report(report: Callable[[], Mapping[str, object]], port: int) -> ThreadingHTTPServer | None:
    """Answer on the port in the background, until the process ends; None where the port cannot be used.

    `report` gives the body of each answer; threads of their own call it.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_SECONDS

        def do_GET(self) -> None:
            body = json.dumps(report()).encode()
            self.send_response(503 if self.path == "/ready" else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name in the base class
            """Say nothing: stderr is for the progress that a person reads."""

    for kind, host in ((_DualStackServer, "::"), (_Server, "0.0.0.0")):  # noqa: S104 - in a pod, behind its policy
        try:
            server = kind((host, port), Handler)
        except OSError:
            continue
        threading.Thread(target=server.serve_forever, name="progress", daemon=True).start()
        return server
    return None
