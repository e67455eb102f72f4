"""The base image follows Debian's security suite: made anew when a package changes, kept when that is unknown."""

from __future__ import annotations

import http.client
import io
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hack.cluster import base_image, docker_engine, node_image, paths, security_updates, shell
from hack.cluster.errors import ClusterError
from hack.cluster.security_updates import index_digest, newest
from hack.cluster.steps import Steps

A, B = "a" * 64, "b" * 64
URI, SUITE = "http://mirror.example/debian-security", "bookworm-security"


def release(digest: str, date: str = "Sun, 22 Nov 2026") -> str:
    return f"""-----BEGIN PGP SIGNED MESSAGE-----
Suite: oldstable-security
Date: {date}
MD5Sum:
 {"c" * 32}  1234 main/binary-amd64/Packages
SHA256:
 {"d" * 64}  1234 contrib/binary-amd64/Packages
 {"e" * 64}  1234 main/binary-arm64/Packages
 {digest}  1234 main/binary-amd64/Packages
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def age(seconds: float) -> None:
    memory = paths.cache_folder() / "security-updates.json"
    memory.write_text(json.dumps({f"{SUITE}/amd64": {"digest": A, "at": time.time() - seconds}}))


def no_network(_: str) -> str:
    raise OSError("no route")


def test_only_the_packages_of_the_architecture_count() -> None:
    assert index_digest(release(A), "amd64") == A
    assert index_digest(release(A), "arm64") == "e" * 64
    assert index_digest(release(A, "Mon, 23 Nov 2026"), "amd64") == A
    assert index_digest("<html>log in to the network</html>", "amd64") == ""


def test_a_change_is_seen_and_asked_for_at_most_twice_a_day() -> None:
    asked: list[str] = []

    def fetch(address: str) -> str:
        asked.append(address)
        return release(B)

    age(13 * 3600)
    assert newest(URI, SUITE, "amd64", fetch=fetch) == B
    assert newest(URI, SUITE, "amd64", fetch=fetch) == B
    assert asked == [f"{URI}/dists/{SUITE}/InRelease"]


def failing(error: Exception) -> Callable[[str], str]:
    def fetch(_: str) -> str:
        raise error

    return fetch


NO_ANSWERS: dict[str, Callable[[str], str]] = {
    "no route": no_network,
    "a portal": lambda _: "<html>",
    "nothing": lambda _: "",
    "half an answer": failing(http.client.IncompleteRead(b"x", 9)),
    "another protocol": failing(http.client.BadStatusLine("SSH-2.0")),
    "too slow": failing(TimeoutError("timed out")),
    "a bad address": failing(http.client.InvalidURL("URL can't contain control characters")),
    "an error without words": failing(http.client.RemoteDisconnected("")),
}


@pytest.mark.parametrize("name", NO_ANSWERS)
def test_without_an_answer_the_last_one_stays_and_one_line_says_why(name: str) -> None:
    age(13 * 3600)
    said: list[str] = []
    assert newest(URI, SUITE, "amd64", said.append, fetch=NO_ANSWERS[name]) == A
    assert newest("", SUITE, "amd64", fetch=no_network) == A
    (line,) = said
    assert line.startswith(f"Debian's security updates are not known: {URI}/dists/{SUITE}/InRelease: ")
    assert ": ." not in line


def test_a_mirror_that_is_away_is_not_asked_at_each_call() -> None:
    age(13 * 3600)
    said: list[str] = []
    for _ in range(3):
        assert newest(URI, SUITE, "amd64", said.append, fetch=no_network) == A
        assert newest(URI, SUITE, "arm64", said.append, fetch=no_network) == ""
    assert len(said) == 2, "one per architecture"
    memory = paths.cache_folder() / "security-updates.json"
    stored = json.loads(memory.read_text())
    for seen in stored.values():
        seen["failed_at"] -= security_updates.RETRY_SECONDS
    memory.write_text(json.dumps(stored))
    assert newest(URI, SUITE, "amd64", said.append, fetch=lambda _: release(B)) == B
    assert newest(URI, SUITE, "amd64", said.append, fetch=no_network) == B
    assert len(said) == 2


def test_a_machine_that_never_had_an_answer_knows_none() -> None:
    assert newest(URI, SUITE, "amd64", fetch=no_network) == ""
    for broken in ("{broken", "[]", '{"bookworm-security/amd64": 7}', '{"bookworm-security/amd64": {"at": "x"}}'):
        (paths.cache_folder() / "security-updates.json").write_text(broken)
        assert newest(URI, SUITE, "amd64", fetch=no_network) == ""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Docker's store, as a list of names; making an image adds one."""
    images: list[str] = []
    monkeypatch.setattr(shell, "run", lambda *_, **__: "\n".join(images))
    monkeypatch.setattr(docker_engine, "architecture", lambda: "amd64")
    monkeypatch.setattr(base_image, "_make", lambda reference, _: images.insert(0, reference))
    monkeypatch.setattr("os.geteuid", lambda: 0)
    return images


def ensured(digest: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    monkeypatch.setattr(security_updates, "newest", lambda *_: digest)
    out = io.StringIO()
    steps = Steps(out=out)
    name = base_image.ensure(steps)
    steps.close()
    return name, out.getvalue()


def test_an_update_makes_another_base_and_leaves_the_cluster(
    engine: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = node_image.name()
    first, _ = ensured(A, monkeypatch)
    assert ensured(A, monkeypatch)[0] == first
    second, _ = ensured(B, monkeypatch)
    assert (len(engine), second != first) == (2, True)
    assert node_image.name() == node


def test_what_cannot_be_made_anew_stays_and_is_said(engine: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = ensured(A, monkeypatch)
    assert ensured("", monkeypatch)[0] == first  # the suite was out of reach

    def fails(*_: object) -> None:
        raise ClusterError("The mirror does not answer.")

    monkeypatch.setattr(base_image, "_make", fails)
    name, said = ensured(B, monkeypatch)
    assert name == first
    assert "The mirror does not answer." in said
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    name, said = ensured(B, monkeypatch)
    assert name == first
    assert "lacks security updates of Debian: run `sudo" in said


@pytest.mark.parametrize("error", [ClusterError("The mirror does not answer."), OSError("No space left on device")])
def test_a_build_that_failed_is_not_tried_again_at_each_call(
    error: Exception, engine: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = ensured(A, monkeypatch)
    tries: list[str] = []

    def fails(reference: str, _: Steps) -> None:
        tries.append(reference)
        raise error

    monkeypatch.setattr(base_image, "_make", fails)
    assert [ensured(B, monkeypatch)[0] for _ in range(3)] == [first] * 3
    assert len(tries) == 1
    _, said = ensured(B, monkeypatch)
    assert "making it anew failed, and is tried again" in said
    assert ensured("c" * 64, monkeypatch)[0] == first, "a newer update is tried"
    assert len(tries) == 2


def test_a_first_base_that_cannot_be_made_is_an_error(engine: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ClusterError("The mirror does not answer.")

    monkeypatch.setattr(base_image, "_make", fails)
    with pytest.raises(ClusterError, match="does not answer"):
        ensured(A, monkeypatch)
