"""`--diff` against an API server that answers HTTP: what would change, and whether pods restart."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from millstream.cli import main
from tests.support.tiny_model import write_tiny_model

NODE = {
    "kind": "Node",
    "metadata": {"name": "a", "labels": {"nvidia.com/gpu.product": "NVIDIA-L4"}},
    "status": {"allocatable": {"nvidia.com/gpu": "1"}},
}


def manifest(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "millstream.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "mine", "namespace": "team"},
        "spec": {"model": {"source": {"local": {"path": "tiny"}}}, **spec},
    }


class ApiServer:
    """Two paths of an API server, over plain HTTP."""

    def __init__(self, folder: Path) -> None:
        self.stored: dict[str, Any] | None = None
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = server.found(self.path)
                body = json.dumps(found if found is not None else {"kind": "Status", "code": 404}).encode()
                self.send_response(200 if found is not None else 404)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.write_text(
            yaml.safe_dump(
                {
                    "current-context": "c",
                    "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{self.http.server_port}"}}],
                    "users": [{"name": "u", "user": {"token": "t"}}],
                    "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                }
            )
        )

    def found(self, path: str) -> Any:
        if path == "/api/v1/nodes":
            return {"kind": "NodeList", "items": [NODE]}
        if path == "/apis/millstream.dev/v1alpha1/namespaces/team/llmdeployments/mine":
            return self.stored
        return None


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    monkeypatch.setenv("MILLSTREAM_TERMINATION_LOG", str(tmp_path / "none"))
    monkeypatch.setenv("MILLSTREAM_MODELS_DIR", str(tmp_path / "models"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    write_tiny_model(tmp_path / "models" / "tiny")
    api = ApiServer(tmp_path)
    thread = threading.Thread(target=api.http.serve_forever, daemon=True)
    thread.start()
    yield api
    api.http.shutdown()
    api.http.server_close()
    thread.join()


def said(server: ApiServer, wanted: dict[str, Any], capsys: pytest.CaptureFixture[str], exit_code: int = 0) -> str:
    file = server.kubeconfig.with_name("wanted.yaml")
    file.write_text(yaml.safe_dump(wanted))
    assert main(["plan", str(file), "--kubeconfig", str(server.kubeconfig), "--diff"]) == exit_code
    return capsys.readouterr().out


def test_an_object_that_is_new(server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert "does not exist yet; applying creates it" in said(server, manifest(), capsys)


def test_nothing_changes(server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.stored = manifest(replicas=1)
    assert "Nothing changes." in said(server, manifest(), capsys)


def test_scaling_restarts_no_pod(server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.stored = manifest(service={"port": 80})
    text = said(server, manifest(service={"port": 81}), capsys)
    assert "spec.service.port" in text
    assert "80 -> 81" in text
    assert "No pod restarts." in text


def test_another_engine_limit_rolls_out_anew(server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    engine = {"maxModelLen": 64, "maxNumBatchedTokens": 2048, "maxNumSeqs": 64, "gpuMemoryUtilizationPercent": 90}
    server.stored = manifest(engine={"maxModelLen": 64}) | {"status": {"plan": {"engine": engine}}}
    text = said(server, manifest(engine={"maxModelLen": 64, "maxNumSeqs": 32}), capsys)
    assert "spec.engine.maxNumSeqs  absent -> 32" in text
    assert "plan.engine.maxNumSeqs  64 -> 32" in text
    assert "prefixCaching" not in text, "what an older operator did not write down is no change"
    assert "planned again and rolled out" in text


def test_what_cannot_run_changes_no_pod(server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.stored = manifest()
    text = said(server, manifest(speculation={"method": "EAGLE"}), capsys, exit_code=2)
    assert "Applying changes no pod." in text
    assert "speculation=EAGLE" in text
