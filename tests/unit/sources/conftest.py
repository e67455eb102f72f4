"""A small model in bytes, and local stand-ins for a hub and a registry that serve it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from millstream_runtime.sources.client import RetryPolicy
from millstream_runtime.sources.fetch import FetchOptions
from millstream_runtime.sources.lock import LockTimes
from tests.support.local_hub import LocalCDN, LocalHub
from tests.support.local_registry import LocalRegistry
from tests.support.local_web import running
from tests.support.model_files import Naps, model_files


@pytest.fixture(autouse=True)
def downloads_reach_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admit the local servers of these tests, as a user admits a hub."""
    monkeypatch.setenv("MILLSTREAM_ALLOWED_HUBS", "127.0.0.0/8")


@pytest.fixture
def naps() -> Naps:
    return Naps()


@pytest.fixture
def policy(naps: Naps) -> RetryPolicy:
    return RetryPolicy(attempts=4, timeout_seconds=20.0, sleep=naps)


@pytest.fixture
def options() -> FetchOptions:
    return FetchOptions(lock_times=LockTimes(0.05, 5.0, 10.0, 0.02))


@pytest.fixture
def cdn() -> Iterator[LocalCDN]:
    with running(LocalCDN) as server:
        yield server


@pytest.fixture
def hub(cdn: LocalCDN) -> Iterator[LocalHub]:
    with running(lambda: LocalHub(cdn, model_files())) as server:
        yield server


@pytest.fixture
def registry() -> Iterator[LocalRegistry]:
    with running(LocalRegistry) as server:
        yield server
