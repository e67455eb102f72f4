"""A tiny model and a server of it for the tests that do not change it; a hub and a registry on the loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.local_hub import LocalCDN, LocalHub
from tests.support.local_registry import LocalRegistry
from tests.support.local_web import running
from tests.support.model_files import model_files
from tests.support.server_thread import ServerThread, serving
from tests.support.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def server(tiny_model: Path) -> Iterator[ServerThread]:
    with serving(tiny_model) as started:
        yield started.wait_ready()


@pytest.fixture(autouse=True)
def downloads_reach_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admit the local servers of these tests, as a user admits a hub."""
    monkeypatch.setenv("MILLSTREAM_ALLOWED_HUBS", "127.0.0.0/8")


@pytest.fixture
def cdn() -> Iterator[LocalCDN]:
    with running(LocalCDN) as started:
        yield started


@pytest.fixture
def hub(cdn: LocalCDN) -> Iterator[LocalHub]:
    with running(lambda: LocalHub(cdn, model_files())) as started:
        yield started


@pytest.fixture
def registry() -> Iterator[LocalRegistry]:
    with running(LocalRegistry) as started:
        yield started
