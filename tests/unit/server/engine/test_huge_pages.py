"""Engine processes ask for huge pages for their weights where the kernel gives them by request."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from millstream_runtime.config import Device, RuntimeConfig
from millstream_runtime.engine_process.messages import Event, PhaseEntered
from millstream_runtime.errors import RuntimeFailure
from millstream_runtime.server.engine import huge_pages
from millstream_runtime.server.engine.huge_pages import engine_environment
from millstream_runtime.server.engine.subprocess import EngineProcessLauncher

BY_REQUEST = "always [madvise] never\n"
TUNABLE = "glibc.malloc.hugetlb=1"


@pytest.fixture
def rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kernel's file, on a machine with glibc."""
    monkeypatch.setattr(os, "confstr", lambda name: "glibc 2.36")
    path = tmp_path / "enabled"
    path.write_text(BY_REQUEST)
    return path


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, TUNABLE),
        ("", TUNABLE),
        ("glibc.malloc.arena_max=2", f"glibc.malloc.arena_max=2:{TUNABLE}"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
        ("glibc.malloc.arena_max=2:glibc.malloc.hugetlb=2", "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=2"),
    ],
)
def test_what_a_user_has_set_stays(given: str | None, expected: str, rule: Path) -> None:
    environment = {"PATH": "/bin"} | ({} if given is None else {"GLIBC_TUNABLES": given})
    made = engine_environment(environment, Device.CPU, rule)
    assert made == {"PATH": "/bin", "GLIBC_TUNABLES": expected}


@pytest.mark.parametrize("content", ["[always] madvise never\n", "always madvise [never]\n", None])
def test_nothing_is_set_where_the_kernel_does_not_wait_for_a_request(content: str | None, rule: Path) -> None:
    rule.unlink()
    if content is not None:
        rule.write_text(content)
    assert engine_environment({}, Device.CPU, rule) == {}


def test_nothing_is_set_for_a_gpu(rule: Path) -> None:
    assert engine_environment({}, Device.CUDA, rule) == {}


def test_nothing_is_set_without_glibc(rule: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(os, "confstr", unknown)
    assert engine_environment({}, Device.CPU, rule) == {}


async def test_an_engine_process_starts_with_it(rule: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "RULE", rule)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    found: list[str] = []
    ended: asyncio.Future[RuntimeFailure] = asyncio.get_running_loop().create_future()

    def on_event(event: Event) -> None:
        assert isinstance(event, PhaseEntered)
        found.append(event.message)

    config = RuntimeConfig(model="/none", served_model_name="tiny", device=Device.CPU)
    EngineProcessLauncher(config, "tests.support.engine_that_names_its_tunables")(on_event, ended.set_result)
    await ended
    assert found == [TUNABLE]
