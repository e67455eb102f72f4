"""Keys from a file: who may ask, what probes may do without, and a change of the file without a restart."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path

import httpx
import pytest

from millstream_runtime.errors import FailureReason, RuntimeFailure
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
        for path in ("/health", "/ready", "/metrics", "/load"):
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
    assert keys.holder("Bearer key-a") is not None
    (tmp_path / "next").symlink_to("new")
    os.replace(tmp_path / "next", link)  # noqa: PTH105 - the call that the kubelet makes
    assert keys.holder("Bearer key-a") is None
    assert keys.holder("bearer key-b") is not None


def test_tenants_have_names_that_tell_nothing_of_their_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("key-a\nkey-b\n")
    names = [str(ApiKeys(file).holder(f"Bearer {key}")) for key in ("key-a", "key-b")]
    assert len({*names}) == 2
    assert not any("key" in name for name in names)


def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path where the operator mounts the key `kyes` of the Secret `chat-keys`."""
    monkeypatch.setattr(api_keys, "API_KEYS_FOLDER", str(tmp_path))
    (tmp_path / "chat-keys").mkdir()
    return tmp_path / "chat-keys" / "kyes"


def test_in_a_pod_messages_name_the_secret_and_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = mounted(tmp_path, monkeypatch)
    with pytest.raises(RuntimeFailure) as caught:
        ApiKeys(file)
    assert str(caught.value) == (
        "Secret chat-keys has no key kyes, or does not exist: create it with one API key per line, or correct "
        "auth.apiKeysSecretRef."
    )
    file.write_text("two words\n")
    with pytest.raises(RuntimeFailure) as caught:
        ApiKeys(file)
    assert str(caught.value).startswith("Key kyes of the Secret chat-keys (auth.apiKeysSecretRef) has no usable key: ")


def test_a_secret_that_is_deleted_is_said_and_its_keys_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = mounted(tmp_path, monkeypatch)
    file.write_text("key-a\n")
    keys = ApiKeys(file)
    assert keys.problem == ""
    file.unlink()
    assert keys.problem == (
        "the file is gone: the Secret was deleted, or has no such key, and a pod that starts now fails; the keys that "
        "were read before stay valid"
    )
    assert keys.holder("Bearer key-a") is not None
    file.write_text("key-b\n")
    assert keys.problem == ""


UNUSABLE = [
    b"two words\n",
    b" \n\t\n",
    b"a\tb\n",
    "key".encode("utf-16"),
    None,
    b"",
    b"# only a comment\n",
    b"\xff\xfe",
    b"x" * 600,
    b"x" * (2 << 20),
    "clé".encode(),
    b"a\x00b\n",
    b"key\n" * 1001,
]


@pytest.mark.parametrize("content", UNUSABLE)
def test_a_file_without_a_usable_key_is_refused_in_one_sentence(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(RuntimeFailure, match="--api-keys-file") as caught:
        ApiKeys(file)
    assert caught.value.reason is FailureReason.API_KEYS_INVALID
    assert "\n" not in str(caught.value)
    assert "xxx" not in str(caught.value)


@pytest.mark.parametrize("content", UNUSABLE)
def test_a_new_file_that_cannot_be_used_keeps_the_old_keys_and_the_log_says_why_once(
    tmp_path: Path, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text("key-a\nkey-b\n")
    keys = ApiKeys(file)
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    for _ in range(3):
        assert keys.holder("Bearer key-a") is not None
        assert keys.holder("Bearer x") is None
    (record,) = caplog.records
    logged = str(record.__dict__)
    assert record.getMessage() == "api_keys_bad"
    assert str(file) in logged
    assert not any(secret in logged for secret in ("key-a", "xxx", "clé"))
    file.write_text("key-c\n")
    assert keys.holder("Bearer key-c") is not None
    assert keys.holder("Bearer key-a") is None


def test_a_file_that_becomes_readable_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of permissions changes neither its time nor its size: the keys stayed as they were until a restart."""
    file = tmp_path / "keys"
    file.write_text("key-a\n")
    keys = ApiKeys(file)
    file.unlink()
    file.write_text("# of another length, for older kernels count time in milliseconds\nkey-b\n")
    with monkeypatch.context() as patched:

        def refused(*_: object) -> None:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

        patched.setattr(Path, "open", refused)
        assert keys.holder("Bearer key-b") is None
        assert "Permission denied" in keys.problem
    assert keys.holder("Bearer key-b") is not None
    assert keys.problem == ""


def test_windows_text_and_spaces_around_keys_do_not_matter(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b"\xef\xbb\xbfkey-a\r\n  key-b  \r\n")
    keys = ApiKeys(file)
    assert keys.holder("Bearer key-a") is not None
    assert keys.holder("Bearer key-b") is not None


PARTLY_USABLE: dict[str, tuple[bytes, str]] = {
    "a space inside": (b"key-a\nsecret one\nkey-b\n", "line 2: white space inside the key; write one key per line"),
    "a comment behind": (b"key-a\nsecret#1 # team a\nkey-b", "line 2: white space inside the key"),
    "a control character": (b"key-a\nsec\x0bret\nkey-b", "line 2: a character that is not printable ASCII"),
    "no ASCII": ("# team a\nkey-a\nsécret\nkey-b".encode(), "line 3: a character that is not printable ASCII"),
    "no UTF-8": (b"key-a\n\xff\xfe\nkey-b", "line 2: a character that is not printable ASCII"),
    "too long": (b"key-a\n" + b"s" * 513 + b"\nkey-b", "line 2: a key has at most 512 characters"),
    "many": (b"key-a\nkey-b\n" + b"a b\n" * 9, "line 3: white space inside the key; write one key per line; line 4"),
}


@pytest.mark.parametrize("name", PARTLY_USABLE)
def test_a_key_that_cannot_be_used_is_named_by_its_line_and_the_others_work(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content, problem = PARTLY_USABLE[name]
    file = tmp_path / "keys"
    file.write_bytes(content)
    keys = ApiKeys(file)
    for _ in range(3):
        assert all(keys.holder(f"Bearer {key}") is not None for key in ("key-a", "key-b"))
        assert not any(
            keys.holder(f"Bearer {part}") for part in ("secret one", "secret", "one", "secret#1", "a b", "a")
        )
    assert problem in keys.problem
    assert len(keys.problem) < 300
    (record,) = caplog.records
    assert record.getMessage() == "api_key_refused"
    logged = str(record.__dict__)
    assert str(file) in logged
    assert not any(part in logged or part in keys.problem for part in ("key-a", "secret", "sss", "sé"))
    file.write_bytes(b"key-a\nkey-b\n")
    assert keys.problem == ""


def test_ready_says_what_is_wrong_with_the_keys_while_it_is(tmp_path: Path, tiny_model: Path) -> None:
    """The operator reads it there: it has no right on the Secret."""
    file = tmp_path / "keys"
    file.write_text("key-a\n")
    with serving(tiny_model, api_keys_file=str(file)) as server:
        server.wait_ready()
        assert "api_keys_problem" not in server.get("/ready").json()
        file.write_text("key-a\nkey b\n")
        assert server.get("/ready").json()["api_keys_problem"].startswith("line 2: white space inside the key")
        file.write_text("\n")
        said = server.get("/ready").json()["api_keys_problem"]
        assert said == "the file has no usable key; write one key per line; the keys that were read before stay valid"
        file.write_text("key-a\nkey-b\n")
        assert "api_keys_problem" not in server.get("/ready").json()


def test_the_key_of_the_operators_probe_comes_with_the_live_configuration(tmp_path: Path, tiny_model: Path) -> None:
    """Only its digest does: who reads the ConfigMap cannot ask with it. Several are accepted while it is rotated."""
    file, live = tmp_path / "keys", tmp_path / "live.json"
    file.write_text("key-a\n")
    first, second = (hashlib.sha256(key.encode()).hexdigest() for key in ("probe-1", "probe-2"))
    live.write_text(json.dumps({"probe_key_digests": [first, second]}))
    with serving(tiny_model, api_keys_file=str(file), live_config=live) as server:
        server.wait_ready()

        def status(key: str) -> int:
            return httpx.post(server.url + "/v1/completions", json=BODY, headers=bearer(key), timeout=60).status_code

        assert [status(key) for key in ("key-a", "probe-1", "probe-2", first)] == [200, 200, 200, 401]
        live.write_text(json.dumps({"probe_key_digests": [second]}))
        server.reload_live_config()
        assert [status(key) for key in ("key-a", "probe-1", "probe-2")] == [200, 401, 200]
        live.write_text("{}")
        server.reload_live_config()
        assert [status(key) for key in ("key-a", "probe-2")] == [200, 401]


def test_a_probe_key_closes_nothing_where_there_are_no_keys(tmp_path: Path, tiny_model: Path) -> None:
    live = tmp_path / "live.json"
    live.write_text(json.dumps({"probe_key_digests": [hashlib.sha256(b"probe").hexdigest()]}))
    with serving(tiny_model, live_config=live) as server:
        server.wait_ready()
        assert httpx.post(server.url + "/v1/completions", json=BODY, timeout=60).status_code == 200


def test_the_key_of_the_probe_opens_probes_and_nothing_else(tmp_path: Path, tiny_model: Path) -> None:
    """Who reads it cannot use the model with it."""
    file, live = tmp_path / "keys", tmp_path / "live.json"
    file.write_text("key-a\n")
    live.write_text(json.dumps({"probe_key_digests": [hashlib.sha256(b"probe").hexdigest()]}))
    question = {"model": "tiny", "prompt": "Hello", "max_tokens": 1, "temperature": 0}  # as the operator asks
    with serving(tiny_model, api_keys_file=str(file), live_config=live) as server:
        server.wait_ready()

        def answer(method: str, path: str, body: object = None, key: str = "probe") -> httpx.Response:
            return httpx.request(method, server.url + path, json=body, headers=bearer(key), timeout=60)

        assert answer("POST", "/v1/completions", question).status_code == 200
        assert answer("GET", "/v1/models").status_code == 200
        beyond: list[dict[str, object]] = [
            {"max_tokens": 2},
            {"max_tokens": None},
            {"n": 2},
            {"best_of": 2},
            {"prompt": "x" * 65},
            {"prompt": ["a", "b"]},
            {"prompt": [1] * 65},
            {"priority": -100},
            {"logprobs": 5},
            {"logit_bias": {"1": 5}},
            {"prompt": "x" * 10_000},
        ]
        for change in beyond:
            refused = answer("POST", "/v1/completions", question | change)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "probe_key_limited"), change
            assert "the operator's probe" in refused.json()["error"]["message"]
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        closed = [
            ("POST", "/v1/chat/completions", chat),
            ("POST", "/tokenize", {"prompt": "a"}),
            ("GET", "/version", None),
        ]
        for method, path, body in [*closed, ("GET", "/openapi.json", None), ("GET", "/v1/models/tiny", None)]:
            assert answer(method, path, body).status_code == 403, path
        chunked = httpx.post(
            server.url + "/v1/completions",
            content=iter([json.dumps(question).encode()]),
            headers={**bearer("probe"), "Content-Type": "application/json"},
            timeout=60,
        )
        assert chunked.status_code == 403, "its length is not known"
        assert answer("POST", "/v1/chat/completions", chat, key="key-a").status_code in (200, 400)
        assert answer("GET", "/version", key="key-a").status_code == 200
        file.write_text("key-a\nprobe\n")
        assert answer("GET", "/version").status_code == 200, "a user's key that is the probe's is a user's"


def test_a_key_ranks_above_the_others_where_its_line_says_so(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("key-a\nkey-b  rank=above\nkey-c rank=below\nkey-d above\nrank=above\n")
    keys = ApiKeys(file)
    ranks = {}
    for key in ("key-a", "key-b", "rank=above"):
        holder = keys.holder(f"Bearer {key}")
        assert holder is not None
        ranks[key] = keys.ranks_above(holder.tenant)
    assert ranks == {"key-a": False, "key-b": True, "rank=above": False}
    for line in ("key-b  rank=above", "key-b rank=above", "key-c", "key-d"):
        assert keys.holder(f"Bearer {line}") is None
    assert "line 3: the rank of a key is rank=above" in keys.problem
    assert "line 4: white space inside the key" in keys.problem
    file.write_text("key-a rank=above\nkey-b\n")
    above, equal = keys.holder("Bearer key-a"), keys.holder("Bearer key-b")
    assert above is not None
    assert equal is not None
    assert (keys.ranks_above(above.tenant), keys.ranks_above(equal.tenant)) == (True, False)
