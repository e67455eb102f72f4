"""Downloads reach no loopback, link-local or metadata address unless an administrator admits it: over real sockets."""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream_runtime.errors import FailureReason, InvalidConfigError, RuntimeFailure
from millstream_runtime.sources.addresses import NamedServer
from millstream_runtime.sources.allowed_hubs import CLOSED_TO_SERVERS, VARIABLE, AllowedHubs, read_allowed_hubs
from millstream_runtime.sources.client import AddressRefused, Client, RetryPolicy
from millstream_runtime.sources.hugging_face import HuggingFace
from millstream_runtime.sources.image_source import ImageSource
from millstream_runtime.sources.registry_auth import may_have_login
from millstream_runtime.sources.source import Source
from tests.support.local_registry import PASSWORD, USER, LocalRegistry
from tests.support.local_web import Handler, LocalWeb, running

ANY_IPV4 = "0.0.0.0"  # noqa: S104 - leads to this machine
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY")


class Answering(LocalWeb):
    """It answers everything, or redirects to `target`."""

    target = ""

    def respond(self, request: Handler) -> None:
        if self.target:
            return request.answer(302, Location=self.target)
        return request.answer(200, b"content")


@pytest.fixture
def server() -> Iterator[Answering]:
    with running(Answering) as started:
        yield started


@pytest.fixture
def elsewhere() -> Iterator[Answering]:
    with running(Answering) as started:
        yield started


class Names:
    """The resolver: `hosts` has the answers for names, the next one at each question; addresses are themselves."""

    def __init__(self) -> None:
        self.hosts: dict[str, list[list[str]]] = {}
        self.asked: list[str] = []
        self._resolve = socket.getaddrinfo

    def __call__(self, host: str, port: int, *_: object) -> list[Any]:
        self.asked.append(host)
        answers = self.hosts.get(host)
        if answers is None:
            if host.endswith(".invalid"):
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return self._resolve(host, port, 0, socket.SOCK_STREAM)
        addresses = answers.pop(0) if len(answers) > 1 else answers[0]
        return [one for address in addresses for one in self._resolve(address, port, 0, socket.SOCK_STREAM)]


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.delenv(VARIABLE)
    found = Names()
    monkeypatch.setattr(socket, "getaddrinfo", found)
    return found


def get(url: str) -> bytes:
    policy = RetryPolicy(attempts=2, timeout_seconds=5.0, sleep=lambda _: None)
    return Client(NamedServer(url, "the hub"), policy=policy).get(url, 1000)[0]


@pytest.mark.parametrize(
    ("address", "is_open"),
    [
        *((address, True) for address in ("10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1", "8.8.8.8", "fd00::1")),
        *((address, True) for address in ("2001:db8::1", "169.253.0.1", "169.255.0.1", "128.0.0.1", "::ffff:10.0.0.1")),
        *((address, False) for address in ("127.0.0.1", "127.255.255.254", ANY_IPV4, "::1", "::", "fe80::1%eth0")),
        *((address, False) for address in ("169.254.0.1", "169.254.169.254", "169.254.170.23", "100.100.100.200")),
        *((address, False) for address in ("168.63.129.16", "192.0.0.192", "fe80::a9fe:a9fe", "febf::1")),
        *((address, False) for address in ("fd00:ec2::254", "fd00:ec2::23", "fd20:ce::254", "fd00:c1::a9fe:a9fe")),
        *((address, False) for address in ("::ffff:127.0.0.1", "::ffff:a9fe:a9fe", "::ffff:6464:64c8", "::7f00:1")),
        *((address, False) for address in ("64:ff9b::a9fe:a9fe", "64:ff9b::127.0.0.1", "fd00:42::42")),
    ],
)
def test_which_addresses_are_closed(address: str, is_open: bool) -> None:
    assert AllowedHubs().admits("hub.invalid", ipaddress.ip_address(address), CLOSED_TO_SERVERS) is is_open


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.1", "2130706433", "0x7f.0.0.1", "%31%32%37.0.0.1", ANY_IPV4, "hub.invalid"]
)
def test_this_machine_is_not_asked_however_it_is_spelled(host: str, server: Answering, names: Names) -> None:
    names.hosts["hub.invalid"] = [["127.0.0.1"]]
    with pytest.raises(AddressRefused) as caught:
        get(f"http://{host}:{server.server_port}/")
    assert not server.requests
    assert str(caught.value) == (
        "the hub has a loopback, link-local or metadata address, where downloads do not go unless the chart value "
        "podDefaults.allowedHubs ($MILLSTREAM_ALLOWED_HUBS of a command) has its name or its range"
    )


@pytest.mark.parametrize("host", ["169.254.169.254", "100.100.100.200", "[::ffff:169.254.169.254]", "[fe80::1]"])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_metadata_service_is_not_asked(scheme: str, host: str) -> None:
    with pytest.raises(AddressRefused):
        get(f"{scheme}://{host}/latest/meta-data")


@pytest.mark.parametrize("allowed", ["hub.invalid", "HUB.invalid.", " x.invalid , 127.0.0.1 ", "127.0.0.0/8"])
def test_what_an_administrator_admits_is_reached(
    allowed: str, server: Answering, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, allowed)
    names.hosts["hub.invalid"] = [["127.0.0.1"]]
    assert get(f"http://hub.invalid:{server.server_port}/") == b"content"


def test_a_redirect_leads_nowhere_else_and_the_status_there_is_not_shown(
    server: Answering, elsewhere: Answering, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "hub.invalid")
    names.hosts["hub.invalid"] = [["127.0.0.1"]]
    server.target = f"http://127.0.0.1:{elsewhere.server_port}/admin"
    with pytest.raises(AddressRefused, match=r"^a server to which the hub redirects has a loopback"):
        get(f"http://hub.invalid:{server.server_port}/")
    assert server.requests
    assert not elsewhere.requests


def test_the_connection_is_to_the_address_that_was_checked(
    server: Answering, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resolver that answers otherwise the second time is not asked a second time."""
    monkeypatch.setenv(VARIABLE, "127.0.0.1")
    names.hosts["hub.invalid"] = [["127.0.0.1"], ["127.0.0.2"]]
    assert get(f"http://hub.invalid:{server.server_port}/") == b"content"
    assert names.asked == ["hub.invalid"]


def test_of_several_addresses_the_closed_ones_are_left_out(
    server: Answering, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing listens at 127.0.0.3, and a server that listens everywhere would answer at 127.0.0.2."""
    monkeypatch.setenv(VARIABLE, "127.0.0.1,127.0.0.3")
    names.hosts["hub.invalid"] = [["127.0.0.2", "127.0.0.3", "127.0.0.1"]]
    assert get(f"http://hub.invalid:{server.server_port}/") == b"content"
    monkeypatch.setenv(VARIABLE, "127.0.0.3")
    with pytest.raises(Exception, match="does not answer: Connection refused"):
        get(f"http://hub.invalid:{server.server_port}/")


def test_a_proxy_resolves_names_and_is_asked_for_no_closed_address(
    server: Answering, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", server.url)
    monkeypatch.setenv("HTTPS_PROXY", server.url)
    assert get("http://hub.invalid/") == b"content"
    assert names.asked == ["127.0.0.1"], "the proxy alone"
    server.requests.clear()
    metadata = ("http://169.254.169.254/", "https://169.254.169.254/", "http://%31%36%39.254.169.254/")
    for url in (*metadata, "http://127.1:9/", "http://[::ffff:7f00:1]:9/"):
        with pytest.raises(AddressRefused):
            get(url)
    assert not server.requests


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "HTTPS_PROXY"])
def test_a_metadata_service_is_no_proxy(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "http://169.254.169.254:80")
    with pytest.raises(AddressRefused):
        get(f"{variable.partition('_')[0].lower()}://hub.invalid/")


def test_a_hub_and_a_registry_say_so_with_their_reason(server: Answering) -> None:
    host = f"127.0.0.1:{server.server_port}"
    asked: list[Source] = [HuggingFace("org/tiny", endpoint=f"http://{host}"), ImageSource(f"{host}/org/tiny:1")]
    for source in asked:
        with pytest.raises(RuntimeFailure, match=r"podDefaults\.allowedHubs") as caught:
            source.resolve()
        assert caught.value.reason is FailureReason.DOWNLOAD_FAILED
    assert not server.requests


@pytest.mark.parametrize(
    "text", ["http://hub", "hub:8080", "hub/x", "a,b c", "10.0.0.0/33", "-", "ä.invalid", "x" * 254]
)
def test_an_entry_that_admits_nothing_is_refused_unquoted(text: str) -> None:
    with pytest.raises(InvalidConfigError, match=r"MILLSTREAM_ALLOWED_HUBS: entry \d is no host name") as caught:
        read_allowed_hubs({VARIABLE: text})
    assert text not in caught.value.message


# A registry's login


@pytest.mark.parametrize(
    ("registry", "token_server", "may"),
    [
        ("registry.invalid", "registry.invalid", True),
        ("registry.invalid", "tokens.invalid", False),
        ("registry.invalid", "registry.invalid.evil.invalid", False),
        ("registry.invalid", "listed.invalid", True),
        ("registry-1.docker.io", "auth.docker.io", True),
        ("registry.invalid", "auth.docker.io", False),
        ("registry.gitlab.com", "gitlab.com", True),
        ("registry.gitlab.com.evil.invalid", "gitlab.com", False),
        ("rg.fr-par.scw.cloud", "api.scaleway.com", True),
        ("registry.cn-hangzhou.aliyuncs.com", "dockerauth.cn-hangzhou.aliyuncs.com", True),
        ("registry.cn-hangzhou.aliyuncs.com", "dockerauth.cn-beijing.aliyuncs.com", False),
        ("registryXgitlab.com", "gitlab.com", False),
    ],
)
def test_where_a_login_may_go(registry: str, token_server: str, may: bool) -> None:
    assert may_have_login(registry, token_server, AllowedHubs(frozenset({"listed.invalid"}))) is may


def test_a_login_goes_to_no_token_server_that_a_challenge_alone_names(
    registry: LocalRegistry, names: Names, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names.hosts["tokens.invalid"] = [["127.0.0.1"]]
    registry.artifact("1", {"config.json": b"{}"})
    registry.wants = "bearer"
    login = tmp_path / "config.json"
    login.write_text(json.dumps({"auths": {registry.host: {"username": USER, "password": PASSWORD}}}))
    with running(LocalRegistry) as tokens:
        registry.realm = f"http://tokens.invalid:{tokens.server_port}"
        monkeypatch.setenv(VARIABLE, "127.0.0.0/8")
        with pytest.raises(RuntimeFailure, match=r"asks for its login at another host.*allowedHubs") as caught:
            ImageSource(f"{registry.host}/org/tiny:1", docker_configs=[login]).resolve()
        assert caught.value.reason is FailureReason.DOWNLOAD_UNAUTHORIZED
        assert "tokens" not in caught.value.message, "a header of a server is not quoted"
        assert not tokens.requests
        with pytest.raises(RuntimeFailure, match="HTTP 401"):
            ImageSource(f"{registry.host}/org/tiny:1").resolve()
        assert tokens.authorizations["/token"] == {""}, "without a login there is nothing to keep"
        monkeypatch.setenv(VARIABLE, "127.0.0.0/8,tokens.invalid")
        assert ImageSource(f"{registry.host}/org/tiny:1", docker_configs=[login]).resolve().files
