"""CORS by the rules of the Fetch standard (section 3.3): what a browser asks before, and what it reads of an answer.

A browser shows an answer to a page if `Access-Control-Allow-Origin` is the page's origin or "*".
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from millstream_runtime.config import LiveConfig, RuntimeConfig
from millstream_runtime.config_files import dump
from millstream_runtime.errors import InvalidConfigError
from tests.support.command_line import config_from_command_line
from tests.support.server_thread import ServerThread, serving, wait_for

PAGE, OTHER_PAGE = "https://chat.example.com", "https://evil.example.com"
BODY = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 2}
KEY = {"Authorization": "Bearer key-a"}
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    """It needs a key, and allows one page."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("key-a\n")
    with serving(tiny_model, api_keys_file=str(file), allowed_origins=(f"{PAGE}:443",)) as started:
        started.wait_ready()
        yield started


def preflight(server: ServerThread, page: str, path: str = PATH) -> httpx.Response:
    """What a browser sends before a POST of JSON with a key and a header of OpenAI's SDK; never with the key."""
    headers = {
        "Origin": page,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
    }
    return httpx.options(server.url + path, headers=headers, timeout=60)


def post(
    server: ServerThread, page: str = PAGE, key: dict[str, str] = KEY, fields: dict[str, object] | None = None
) -> httpx.Response:
    return httpx.post(server.url + PATH, json=BODY | (fields or {}), headers={"Origin": page} | key, timeout=60)


def shown_to(answer: httpx.Response) -> str | None:
    shown: str | None = answer.headers.get("access-control-allow-origin")
    return shown


def test_a_preflight_is_answered_without_a_key_and_allows_what_clients_send(server: ServerThread) -> None:
    for path in (PATH, "/v1/chat/completions", "/v1/models"):
        answer = preflight(server, PAGE, path)
        assert answer.status_code == 200
        assert shown_to(answer) == PAGE
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert answer.headers["access-control-allow-headers"] == "authorization,content-type,x-stainless-lang"
        assert "access-control-allow-credentials" not in answer.headers, "cookies play no part"


def test_a_page_of_another_origin_is_shown_nothing(server: ServerThread) -> None:
    refused = preflight(server, OTHER_PAGE)
    assert (refused.status_code, shown_to(refused)) == (400, None)
    assert shown_to(post(server, OTHER_PAGE)) is None


def test_everything_but_a_preflight_needs_the_key_and_the_page_can_read_why(server: ServerThread) -> None:
    refused = post(server, key={})
    assert (refused.status_code, shown_to(refused)) == (401, PAGE)
    assert refused.json()["error"]["code"] == "invalid_api_key"
    plain = httpx.options(server.url + PATH, headers={"Origin": PAGE}, timeout=60)  # no preflight: nothing is asked for
    assert plain.status_code == 401


@pytest.mark.parametrize(
    ("fields", "status"), [({}, 200), ({"stream": True}, 200), ({"max_tokens": -1}, 400), ({"model": "other"}, 404)]
)
def test_answers_streams_and_errors_are_shown_to_the_page(
    server: ServerThread, fields: dict[str, object], status: int
) -> None:
    answer = post(server, fields=fields)
    assert (answer.status_code, shown_to(answer)) == (status, PAGE)
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert "Origin" in answer.headers["vary"], "a cache must not give the answer to another page"
    if fields.get("stream"):
        assert answer.text.endswith("data: [DONE]\n\n")


def test_nothing_is_allowed_by_default_and_a_live_file_allows_it_while_the_server_runs(
    tiny_model: Path, tmp_path: Path
) -> None:
    live = tmp_path / "live.json"
    live.write_text(dump(LiveConfig()))
    with serving(tiny_model, live_config=live) as server:
        server.wait_ready()
        closed = preflight(server, PAGE)
        assert closed.status_code == 405
        answer = post(server)
        assert answer.status_code == 200
        assert not [name for name in (*closed.headers, *answer.headers) if name.startswith("access-control")]
        live.write_text(dump(LiveConfig(allowed_origins=("*",))))
        wait_for(lambda: preflight(server, PAGE).status_code == 200, "the live file to be applied")
        assert shown_to(post(server, OTHER_PAGE)) == "*"


@pytest.mark.parametrize(
    "origin",
    [
        *("https://chat.example.com/", "https://chat.example.com/app", "chat.example.com", "https://Chat.example.com"),
        *("https://", "https://*.example.com", "null", "", "https://a.example:0", "https://a.example:443000"),
        "https://" + "a" * 250,
    ],
)
def test_an_origin_that_no_browser_sends_is_refused_with_the_fix(origin: str) -> None:
    with pytest.raises(InvalidConfigError, match="scheme://host:port in lower case, without a path") as raised:
        RuntimeConfig(model="/m", served_model_name="m", allowed_origins=(origin,))
    assert repr(origin)[:200] in raised.value.message


def test_the_flag_takes_several_origins_and_their_number_is_bounded() -> None:
    config = config_from_command_line(["--model=/m", "--allowed-origins", "https://a.example, capacitor://localhost"])
    assert config.allowed_origins == ("https://a.example", "capacitor://localhost")
    with pytest.raises(InvalidConfigError, match="has 33 origins; at most 32 are allowed"):
        RuntimeConfig(model="/m", served_model_name="m", allowed_origins=(PAGE,) * 33)
