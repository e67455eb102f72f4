"""No value of a variable reaches what a reader of an LLMDeployment sees: it may come from a Secret.

Each variable, header and part of a URL gets a marker. Then the commands of the pods run with them against servers on
the loopback that answer with what they were sent, and everything that comes out is searched for the marker: standard
output and error, the termination message, and what the operator makes of that message in status, Events and log.
"""

from __future__ import annotations

import base64
import io
import json
import logging
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from millstream import cli, source_arguments
from millstream_operator.metrics import OperatorMetrics
from millstream_runtime import logs
from millstream_runtime.server.operations.traces import RequestTraces
from millstream_runtime.sources.client import RetryPolicy
from tests.support.fake_operator import FakeOperator, world
from tests.support.hostile_tokenizers import write_model
from tests.support.inspected_models import hub as hub_model
from tests.support.llmdeployments import manifest
from tests.support.local_web import Handler, LocalWeb, running
from tests.support.server_thread import serving

MARKER = "s3cretmarker"
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "no_proxy", "all_proxy")
# All that may be set for pods and that a process of ours or a library of it reads.
VARIABLES = (
    *("HF_ENDPOINT", "HF_TOKEN", "PLAIN_HTTP_REGISTRIES", *PROXIES),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_HEADERS"),
    *("MILLSTREAM_LOG_LEVEL", "MILLSTREAM_LOG_FORMAT", "TZ", "LANG", "LC_ALL"),
)


class EchoServer(LocalWeb):
    """A hub, a registry or a proxy that repeats what it was sent wherever an answer has room for it."""

    def __init__(self) -> None:
        super().__init__()
        self.how = "404"

    def respond(self, request: Handler) -> None:
        sent = f"{request.path} {request.headers.get('Authorization')} {request.headers.get('Host')} {MARKER}"
        word = MARKER if MARKER in sent else "nothing"
        if self.how == "not HTTP":
            request.wfile.write(f"{sent}\r\n\r\n".encode())
            request.close_connection = True
        elif self.how.startswith("redirect"):
            target = self.how.partition(" ")[2].replace("MARKER", word)
            request.answer(302, Location=target)
        elif self.how == "realm":
            request.answer(401, WWW_Authenticate=f'Bearer realm="http://127.0.0.1:9/{word}",service="{word}"')
        elif self.how == "range":
            request.answer(206, b"{}", Content_Range=f"bytes {word}")
        elif self.how == "listing":
            request.answer(200, json.dumps({"sha": sent, "siblings": [{"rfilename": 1}]}).encode())
        elif self.how == "long":
            request.answer(200, sent.encode(), Content_Length=10_000)
            request.close_connection = True
        else:
            request.answer(int(self.how), sent.encode(), X_Error_Code=word, X_Error_Message=sent, Retry_After=word)


ANSWERS = (
    *("404", "401", "403", "500", "listing", "range", "long", "not HTTP", "realm"),
    *("redirect ftp://MARKER/x", "redirect http://[MARKER", "redirect http://127.0.0.1:9/MARKER?a=MARKER"),
    *(
        "redirect http://MARKER:MARKER@127.0.0.1:9/",
        "redirect http://MARKER.test:9/",
        "redirect https://127.0.0.1:9/MARKER",
    ),
    "redirect http://127.0.0.1:MARKER/",
)
# PORT: of a server that repeats what it is sent; 9: of none.
ENDPOINTS = {
    "host": "http://MARKER.test:PORT",
    "host that does not answer": "http://MARKER.test:9",
    "path": "http://127.0.0.1:PORT/MARKER",
    "TLS": "https://MARKER.test:PORT",
    "TLS, path": "https://127.0.0.1:PORT/MARKER",
    "user": "http://MARKER@127.0.0.1:PORT",
    "password": "http://user:MARKER@127.0.0.1:PORT",
    "password with a slash": "http://user:a/MARKER@127.0.0.1:PORT",
    "query": "http://127.0.0.1:PORT/?token=MARKER",
    "fragment": "http://127.0.0.1:PORT/#MARKER",
    "port": "http://127.0.0.1:MARKER",
    "port that is too large": "http://MARKER.test:123456",
    "scheme": "MARKER://127.0.0.1",
    "no scheme": "MARKER.test",
    "only that": "MARKER",
    "bracket": "http://[MARKER",
    "no IPv6 address": "http://[MARKER]",
    "characters that are not a host's": "http://MARKER\u2100.test",
    "a label that is too long": "http://MARKER" + "a" * 80 + ".test",
    "a space": "http://127.0.0.1:PORT/MARKER x",
    "a line feed": "http://127.0.0.1:PORT/MARKER\nx",
    "a backslash": "http://MARKER\\@127.0.0.1",
    "a variable that was not replaced": "http://$(MARKER)",
}
PROXY_ADDRESSES = {
    "host": "http://MARKER.test:9",
    "login, refused": "http://MARKER:MARKER@127.0.0.1:PORT",
    "login, not there": "http://MARKER:MARKER@127.0.0.1:9",
    "no scheme": "MARKER.test:9",
    "scheme": "socks5://MARKER.test:9",
    "port": "http://127.0.0.1:MARKER",
    "bracket": "http://[MARKER",
    "no host": "http:MARKER",
    "no host, two slashes": "http:///MARKER",
    "only that": "MARKER",
}


@pytest.fixture
def echo() -> Iterator[EchoServer]:
    with running(EchoServer) as server:
        yield server


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """None of the variables; every name that ends with .test is this machine's, and no other name is asked for."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    resolve = socket.getaddrinfo

    def on_loopback(host: Any, *arguments: Any, **named: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else str(host)
        if name == "127.0.0.1" or name.endswith(".test"):
            return resolve("127.0.0.1", *arguments, **named)
        raise socket.gaierror(socket.EAI_NONAME, f"Name or service not known: {name}")

    monkeypatch.setattr(socket, "getaddrinfo", on_loopback)
    return monkeypatch


class Pod:
    """Runs the commands of a pod in this process; `seen` is everything that they wrote."""

    def __init__(self, folder: Path, capture: pytest.CaptureFixture[str], environment: pytest.MonkeyPatch) -> None:
        self.folder, self._capture, self._environment = folder, capture, environment
        self._log = folder / "termination-log"

    def run(self, *arguments: str, **variables: str) -> str:
        """One failure, in all that it wrote; `variables` hold in this run alone."""
        self._log.write_text("")
        self._capture.readouterr()
        with self._environment.context() as patched, handlers_of_signals_kept():
            patched.setenv("MILLSTREAM_TERMINATION_LOG", str(self._log))
            for name, value in variables.items():
                patched.setenv(name, value)
            assert cli.main([*arguments, "--retries=2"]) != 0
        written = self._capture.readouterr()
        assert self.message["message"], "a sentence says why"
        assert "Traceback" not in written.err
        return written.out + written.err + self._log.read_text()

    @property
    def message(self) -> dict[str, str]:
        found: dict[str, str] = json.loads(self._log.read_text())
        return found

    def commands(self) -> tuple[tuple[str, ...], ...]:
        source = ("--hugging-face=org/tiny",)
        return ("inspect", *source), ("fetch", *source, f"--into={self.folder / 'model'}")


@contextmanager
def handlers_of_signals_kept() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def pod(tmp_path: Path, capsys: pytest.CaptureFixture[str], environment: pytest.MonkeyPatch) -> Pod:
    environment.setattr(source_arguments, "RetryPolicy", partial(RetryPolicy, sleep=lambda _: None))
    return Pod(tmp_path, capsys, environment)


def planted(text: str, server: LocalWeb) -> str:
    return text.replace("MARKER", MARKER).replace("PORT", str(server.server_port))


def has_marker(text: str) -> bool:
    """Also in base64, as a login is sent."""
    parts = [base64.b64encode((" " * shift + MARKER).encode()).decode()[4:12] for shift in range(3)]
    return MARKER in text or any(part in text for part in parts)


async def shown_by_the_operator(failure: dict[str, str], caplog: pytest.LogCaptureFixture) -> str:
    """Status, Events and log of an LLMDeployment whose inspection failed so, and the operator's metrics."""
    names = [name for name in VARIABLES if name in ("HF_ENDPOINT", *PROXIES) or name.startswith(("SSL_", "OTEL_EX"))]
    env = [{"name": name, "value": f"http://$(OTEL_SERVICE_NAME)@{MARKER}"} for name in names]
    secret = {"name": "OTEL_SERVICE_NAME", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "url"}}}
    runtime = {"name": "runtime", "env": [secret, *env]}
    stored = manifest(model=hub_model(), podTemplate={"spec": {"containers": [runtime]}})
    operator = FakeOperator(world(stored))
    with caplog.at_level(logging.DEBUG):
        await operator.turn()
        operator.cluster.run_jobs(json.dumps(failure), 1)
        await operator.turn()
    assert operator.condition("Ready")["message"].startswith(failure["message"][:40])
    events = operator.cluster.events
    assert events, "the failure is an Event"
    metrics = OperatorMetrics().exposition().decode()
    return json.dumps([operator.status(), events], default=str) + caplog.text + metrics


@pytest.mark.parametrize("name", ENDPOINTS)
async def test_the_address_of_a_hub_is_named_by_its_variable(
    name: str, pod: Pod, echo: EchoServer, caplog: pytest.LogCaptureFixture
) -> None:
    for command in pod.commands():
        seen = pod.run(*command, HF_ENDPOINT=planted(ENDPOINTS[name], echo))
        assert not has_marker(seen), seen
        assert "HF_ENDPOINT" in pod.message["message"]
    shown = await shown_by_the_operator(pod.message, caplog)
    assert not has_marker(shown), shown


@pytest.mark.parametrize("how", ANSWERS)
async def test_what_a_hub_repeats_of_token_and_address_is_not_shown(
    how: str, pod: Pod, echo: EchoServer, caplog: pytest.LogCaptureFixture
) -> None:
    echo.how = how
    for command in pod.commands():
        seen = pod.run(*command, HF_ENDPOINT=f"http://{MARKER}.test:{echo.server_port}/{MARKER}", HF_TOKEN=MARKER)
        assert not has_marker(seen), seen
    assert MARKER in str(echo.authorizations), "the token was sent"
    shown = await shown_by_the_operator(pod.message, caplog)
    assert not has_marker(shown), shown


@pytest.mark.parametrize("how", ANSWERS)
def test_what_a_registry_repeats_of_a_login_is_not_shown(how: str, pod: Pod, echo: EchoServer) -> None:
    host = f"127.0.0.1:{echo.server_port}"
    login = {"auths": {host: {"username": MARKER, "password": MARKER}}}
    (pod.folder / "config.json").write_text(json.dumps(login))
    echo.how = how
    source = (f"--image={host}/org/tiny:1", f"--docker-config={pod.folder / 'config.json'}")
    seen = pod.run("inspect", *source)
    assert not has_marker(seen), seen
    assert host in pod.message["message"], "the reference is text of the spec"


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("name", PROXY_ADDRESSES)
def test_the_address_of_a_proxy_and_what_it_repeats_are_not_shown(
    name: str, scheme: str, pod: Pod, echo: EchoServer
) -> None:
    proxy = planted(PROXY_ADDRESSES[name], echo)
    for variable in (f"{scheme.upper()}_PROXY", f"{scheme}_proxy"):
        seen = pod.run(*pod.commands()[0], HF_ENDPOINT=f"{scheme}://hub.test", **{variable: proxy})
        assert not has_marker(seen), seen
        assert "HTTPS_PROXY" in pod.message["message"] or "HTTP 404" in pod.message["message"]


def test_the_answer_of_a_proxy_that_refuses_a_tunnel_is_its_number_alone(pod: Pod) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=refuse_tunnels, args=(listener, 2), daemon=True).start()
        proxy = f"http://{MARKER}:{MARKER}@127.0.0.1:{listener.getsockname()[1]}"
        seen = pod.run(*pod.commands()[0], HF_ENDPOINT="https://hub.test", HTTPS_PROXY=proxy)
    assert not has_marker(seen), seen
    assert "the proxy answered HTTP 407" in pod.message["message"]


def refuse_tunnels(listener: socket.socket, times: int) -> None:
    for _ in range(times):
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(f"HTTP/1.1 407 {MARKER}\r\nX: {MARKER}\r\nContent-Length: 0\r\n\r\n".encode())


@pytest.mark.parametrize(
    "name", ["SSL_CERT_FILE", "SSL_CERT_DIR", "PLAIN_HTTP_REGISTRIES", "NO_PROXY", *VARIABLES[-5:]]
)
def test_other_variables_are_not_shown(name: str, pod: Pod, echo: EchoServer) -> None:
    for endpoint in (f"http://127.0.0.1:{echo.server_port}", f"https://127.0.0.1:{echo.server_port}"):
        assert not has_marker(pod.run(*pod.commands()[0], HF_ENDPOINT=endpoint, **{name: MARKER}))


def test_a_token_that_is_none_is_not_shown(pod: Pod, echo: EchoServer) -> None:
    (pod.folder / "token").write_text(f"{MARKER} {MARKER}")
    endpoint = f"http://127.0.0.1:{echo.server_port}"
    assert not has_marker(pod.run(*pod.commands()[0], HF_ENDPOINT=endpoint, HF_TOKEN=f"{MARKER}\n{MARKER}"))
    assert not has_marker(pod.run(*pod.commands()[0], f"--token-file={pod.folder / 'token'}", HF_ENDPOINT=endpoint))


TRACING = {
    "an endpoint that refuses": {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://MARKER.test:9/MARKER"},
    "an endpoint that repeats": {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://MARKER:MARKER@127.0.0.1:PORT/MARKER"},
    "an endpoint that is none": {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "MARKER://[MARKER"},
    "headers that are none": {"OTEL_EXPORTER_OTLP_HEADERS": "MARKER MARKER"},
    "headers": {"OTEL_EXPORTER_OTLP_HEADERS": "authorization=MARKER"},
    "a time that is none": {"OTEL_EXPORTER_OTLP_TIMEOUT": "MARKER"},
    "a compression that is none": {"OTEL_EXPORTER_OTLP_COMPRESSION": "MARKER"},
    "a certificate that is not there": {"OTEL_EXPORTER_OTLP_CERTIFICATE": "/MARKER"},
    "attributes that are none": {"OTEL_RESOURCE_ATTRIBUTES": "MARKER"},
    "a batch that is none": {"OTEL_BSP_SCHEDULE_DELAY": "MARKER"},
    "a sampler that is none": {"OTEL_TRACES_SAMPLER": "MARKER"},
    "certificates that are not there": {"REQUESTS_CA_BUNDLE": "/MARKER"},
}


@pytest.mark.parametrize("name", TRACING)
def test_what_the_exporter_of_traces_is_told_and_answered_is_not_logged(
    name: str, echo: EchoServer, environment: pytest.MonkeyPatch
) -> None:
    echo.how = "400"
    endpoint = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "https://127.0.0.1:PORT"
        if "REQUESTS" in str(TRACING[name])
        else "http://127.0.0.1:PORT"
    }
    for variable, value in {**endpoint, **TRACING[name]}.items():
        environment.setenv(variable, planted(value, echo))
    with logged(environment) as log:
        traces = RequestTraces.from_environment("tiny")
        if traces is not None:
            traces._provider.get_tracer("test").start_span("request").end()
            traces.close()
    assert "library_warning" in log.getvalue() or "tracing_off" in log.getvalue(), "the failure is said"
    assert not has_marker(log.getvalue()), log.getvalue()


@contextmanager
def logged(environment: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """The log as a pod writes it."""
    root, stream = logging.getLogger(), io.StringIO()
    handlers, level = list(root.handlers), root.level
    environment.setattr("sys.stderr", stream)
    try:
        logs.configure_logging()
        yield stream
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def test_a_server_shows_no_variable_in_answers_metrics_and_log(tmp_path: Path, environment: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        environment.setenv(variable, f"http://{MARKER}:{MARKER}@127.0.0.1:9/{MARKER}" if "NO_" not in variable else "*")
    with logged(environment) as log, serving(write_model(tmp_path / "m")) as server:
        server.wait_ready()
        for variable in VARIABLES:  # or the client of this test would use them
            environment.delenv(variable)
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 1}
        answers = [server.post("/v1/completions", body), server.post("/v1/completions", {**body, "n": -1})]
        paths = ("/ready", "/health", "/metrics", "/version", "/v1/models", "/openapi.json", f"/{'x' * 20}")
        answers += [server.get(path) for path in paths]
    for answer in answers:
        assert not has_marker(f"{answer.headers} {answer.text}")
    assert not has_marker(log.getvalue()), log.getvalue()


def test_a_refused_spec_shows_no_value_of_a_variable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries: tuple[dict[str, Any], ...] = (
        {"name": "MILLSTREAM_X", "value": MARKER},
        {"name": "A", "value": MARKER, "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
        {"name": "1A", "value": MARKER},
    )
    for entry in entries:
        stored = manifest(podTemplate={"spec": {"containers": [{"name": "runtime", "env": [entry]}]}})
        (tmp_path / "demo.json").write_text(json.dumps(stored))
        assert cli.main(["validate", str(tmp_path / "demo.json")]) == 1
        written = capsys.readouterr()
        assert "podTemplate" in written.out + written.err
        assert not has_marker(written.out + written.err), written
