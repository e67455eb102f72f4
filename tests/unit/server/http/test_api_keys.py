"""Keys from a file: who may ask, what probes may do without, and a change of the file without a restart."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import pytest

from millstream_runtime.errors import InvalidConfigError
from millstream_runtime.server.http import api_keys
from millstream_runtime.server.http.api_keys import ApiKeys
from tests.support.server_thread import serving

BODY = {"model": "tiny", "prompt": list(range(40)), "max_tokens": 1}


@pytest.fixture(autouse=True)
def _check_at_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_keys, "RECHECK_SECONDS", 0.0)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_only_holders_of_a_key_get_in_probes_excepted(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# team a\nkey-a\n\nkey-b\n")
    with serving(tiny_model, api_keys_file=str(file)) as server:
        server.wait_ready()

        def ask(headers: dict[str, str], path: str = "/v1/completions") -> httpx.Response:
            return httpx.post(server.url + path, json=BODY, headers=headers, timeout=60)

        for headers in (
            {},
            {"Authorization": "Bearer"},
            bearer("key-c"),
            bearer("# team a"),
            {"Authorization": "Basic key-a"},
        ):
            refused = ask(headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
            assert refused.headers["www-authenticate"] == "Bearer"
            assert "key-" not in refused.text
        for path in ("/health", "/ready", "/metrics"):
            assert server.get(path).status_code == 200
        for path in ("/v1/models", "/version", "/openapi.json", "/nothing"):  # closed unless named
            assert server.get(path).status_code == 401
        usage = [ask(bearer(key)).json()["usage"] for key in ("key-a", "key-a", "key-b")]
        cached = [one["prompt_tokens_details"]["cached_tokens"] for one in usage]
        assert cached == [0, 32, 0]  # another key cannot tell from the time what this one has sent
        file.write_text("key-c\n")
        assert ask(bearer("key-c")).status_code == 200
        assert ask(bearer("key-a")).status_code == 401
        file.unlink()  # a Secret that is being swapped: what is known stays
        assert ask(bearer("key-c")).status_code == 200


def test_a_swapped_link_is_a_change(tmp_path: Path) -> None:
    """Kubernetes changes a mounted Secret by pointing a link elsewhere."""
    for name, key in (("old", "key-a"), ("new", "key-b")):
        (tmp_path / name).write_text(key)
    link = tmp_path / "keys"
    link.symlink_to("old")
    keys = ApiKeys(link)
    assert keys.tenant("Bearer key-a") is not None
    (tmp_path / "next").symlink_to("new")
    os.replace(tmp_path / "next", link)  # noqa: PTH105 - the call that the kubelet makes
    assert keys.tenant("Bearer key-a") is None
    assert keys.tenant("bearer key-b") is not None


def test_tenants_have_names_that_tell_nothing_of_their_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("key-a\nkey-b\n")
    names = [ApiKeys(file).tenant(f"Bearer {key}") or "" for key in ("key-a", "key-b")]
    assert len({*names}) == 2
    assert not any("key" in name for name in names)


@pytest.mark.parametrize("content", [None, b"", b"# only a comment\n", b"\xff\xfe", b"x" * 600, b"x" * (2 << 20)])
def test_a_file_without_a_usable_key_is_refused_in_one_sentence(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InvalidConfigError, match="--api-keys-file") as caught:
        ApiKeys(file)
    assert "\n" not in str(caught.value)
