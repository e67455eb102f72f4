"""Answer `/ready` while a model is downloaded, as the runtime does while it loads: 503 with the phase and the bytes.

    {"ready": false, "phase": "Downloading", "progress": {"done_bytes": 3221225472, "total_bytes": 8053063680}}

The operator reads it, so that a pod whose bytes move is not past its deadline. A download never fails because of it.
"""

from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from millstream_runtime.sources.progress import DownloadProgress

PHASE = "Downloading"
REQUEST_SECONDS = 5.0


class _Server(ThreadingHTTPServer):
    daemon_threads = True


class _DualStackServer(_Server):
    address_family = socket.AF_INET6

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


def serve_progress(progress: DownloadProgress, port: int) -> ThreadingHTTPServer | None:
    """Answer on the port in the background, until the process ends; None where the port cannot be used."""

    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_SECONDS

        def do_GET(self) -> None:
            body = json.dumps(
                {
                    "ready": False,
                    "phase": PHASE,
                    "progress": {"done_bytes": progress.done_bytes, "total_bytes": progress.expected_bytes},
                }
            ).encode()
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
