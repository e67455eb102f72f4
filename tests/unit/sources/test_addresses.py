"""An address is shown where the spec or this package names it, and nowhere else."""

from __future__ import annotations

import pytest

from millstream_runtime.sources.addresses import NamedServer, is_http_address, origin
from millstream_runtime.sources.client import BearerAuth
from millstream_runtime.sources.hugging_face import DEFAULT_ENDPOINT, HuggingFace

HUB = NamedServer("https://secret.example/path", "the hub")


@pytest.mark.parametrize(
    "address",
    ["https://huggingface.co", "http://hub.example:8080/prefix", "http://10.0.0.1", "http://[::1]:80", "HTTP://hub"],
)
def test_an_address_of_a_hub(address: str) -> None:
    assert is_http_address(address)


@pytest.mark.parametrize(
    "address",
    [
        *(
            "",
            "huggingface.co",
            "http://",
            "http:///x",
            "file:///etc",
            "ftp://hub",
            "http://hub:port",
            "http://hub:99999",
        ),
        *(
            "http://user@hub",
            "http://user:password@hub",
            "http://hub/?a=b",
            "http://hub/#a",
            "http://hub\\x",
            "http://a b",
        ),
        *("http://[::", "http://[hub]", "http://hub/\n", "http://hub\u2100.example", "http://" + "a" * 70 + ".example"),
    ],
)
def test_what_is_none(address: str) -> None:
    assert not is_http_address(address)


@pytest.mark.parametrize("url", ["https://secret.example/other?x=1", "https://secret.example:443"])
def test_a_server_has_its_name_at_every_path(url: str) -> None:
    assert HUB.name_of(url) == "the hub"


@pytest.mark.parametrize(
    "url", ["https://cdn.example/x", "http://secret.example", "https://secret.example:8443", "::["]
)
def test_another_server_is_named_by_who_redirects_to_it(url: str) -> None:
    assert HUB.name_of(url) == "a server to which the hub redirects"


def test_a_credential_belongs_to_scheme_host_and_port() -> None:
    auth = BearerAuth("token", "https://hub.example")
    assert origin("https://hub.example") == ("https", "hub.example", 443)
    assert auth.header("https://hub.example:443/x") == "Bearer token"
    assert auth.header("http://hub.example") is None
    assert auth.header("https://hub.example:444") is None


def test_the_default_hub_is_shown_and_another_is_not() -> None:
    assert HuggingFace("org/tiny").client.server.name == DEFAULT_ENDPOINT
    other = HuggingFace("org/tiny", endpoint="https://secret.example/")
    assert other.client.server.name == "the hub that HF_ENDPOINT names"
