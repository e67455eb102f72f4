"""While a model is downloaded, its bytes are answered where the operator asks a pod for its report."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

from millstream_operator.probing.boot_report import read_boot_report
from millstream_operator.rendering.runtime_config import RUNTIME_PORT
from millstream_runtime.sources.progress import DownloadProgress
from millstream_runtime.sources.progress_server import PORT, serve_progress


def asked(port: int) -> tuple[int, object]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_the_bytes_that_arrived_are_answered() -> None:
    progress = DownloadProgress(lambda _: None)
    progress.expect(100)
    progress.keep(30)
    progress.add(12)
    server = serve_progress(progress, 0)
    assert server is not None
    try:
        status, body = asked(server.server_address[1])
        report = read_boot_report(body)
        assert (status, PORT) == (503, RUNTIME_PORT)
        assert report is not None
        assert (report.phase, report.done_bytes) == ("Downloading", 42)
        progress.add(8)
        later = read_boot_report(asked(server.server_address[1])[1])
        assert later is not None
        assert later.done_bytes == 50
        assert serve_progress(progress, server.server_address[1]) is None, "a port that is taken stops no download"
    finally:
        server.shutdown()
        server.server_close()
