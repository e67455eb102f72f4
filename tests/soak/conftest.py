"""Options and fixtures of the seeded sample: `pytest tests/soak`. All tests share a control plane and an event loop."""

from __future__ import annotations

import datetime
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from hack.cluster.steps import Steps
from tests.soak import tools, world
from tests.soak.simulated_nodes import NODES


def pytest_addoption(parser: pytest.Parser) -> None:
    today = datetime.datetime.now(datetime.UTC).date().toordinal()
    parser.addoption("--soak-seed", type=int, default=today, help="where the faults strike; by default it is the day's")


def pytest_report_header(config: pytest.Config) -> str:
    return f"soak: --soak-seed {config.getoption('--soak-seed')}"


@pytest.fixture(scope="session")
def seed(request: pytest.FixtureRequest) -> int:
    chosen: int = request.config.getoption("--soak-seed")
    return chosen


@pytest.fixture(scope="session")
def programs() -> tools.Tools:
    """Built where they are missing, which takes minutes once."""
    steps = Steps()
    try:
        return tools.ensure(steps)
    finally:
        steps.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def where(programs: tools.Tools) -> AsyncIterator[world.World]:
    """A control plane with simulated GPU nodes."""
    async with world.world(programs, nodes=NODES) as found:
        yield found
