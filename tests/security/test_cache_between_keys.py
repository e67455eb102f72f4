"""Nobody can find out by the prefix cache what the holder of another key has asked, whatever salt they choose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from millstream_runtime.server.http.api_keys import ApiKeys
from tests.support.server_thread import serving

PROMPT = [*range(40)]
CACHED_TOKENS = 32


def test_no_salt_makes_one_key_meet_what_another_has_sent(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("key-a\nkey-b\n")
    holders = {key: ApiKeys(file).holder(f"Bearer {key}") for key in ("key-a", "key-b")}
    assert holders["key-a"] is not None
    assert holders["key-b"] is not None
    tenant_a, tenant_b = holders["key-a"].tenant, holders["key-b"].tenant
    with serving(tiny_model, api_keys_file=str(file)) as server:
        server.wait_ready()

        def cached(key: str, **salt: str) -> int:
            body: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1, **salt}
            headers = {"Authorization": f"Bearer {key}"}
            answer = httpx.post(server.url + "/v1/completions", json=body, headers=headers, timeout=60)
            assert answer.status_code == 200, answer.text
            found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            return found

        cached("key-a")
        cached("key-a", cache_salt="of a team")
        assert cached("key-a") == cached("key-a", cache_salt="of a team") == CACHED_TOKENS
        # What is between tenant and salt inside, and names that a client could guess.
        for salt in ("of a team", tenant_a, f"{tenant_a}\n", f"\n{tenant_a}\n", f"{tenant_b}\n{tenant_a}", "\n", "\0"):
            assert cached("key-b", cache_salt=salt) == 0, repr(salt)
        assert cached("key-b") == 0
