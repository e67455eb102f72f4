"""What holds for every test.

Hypothesis measures no time, because these tests run on noisy machines, and takes the same examples in each run, so that
a red run has its cause in the change; `--hypothesis-profile=random` looks for others. Tests of real processes, sockets
and clusters get a second attempt: what a scheduler does to them on a busy machine is not what they assert. One that
passes at the second attempt is named in the summary, and is to be mended. Tests of the engine, the models, the planner
and the reconciler get none: an answer that is wrong once is wrong.
"""

from __future__ import annotations

import logging
import random
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("millstream", settings.get_profile("random"), derandomize=True)
settings.load_profile("millstream")

HERE = Path(__file__).resolve().parent
WITH_PROCESSES = {
    HERE / "security",
    HERE / "soak",
    *(
        HERE / "unit" / name
        for name in (
            "bench",
            "cluster",
            "commands/test_console_blocks.py",
            "demo",
            "distributed",
            "engine_process",
            "images",
            "runtime",
            "server",
            "sources",
            "benchmarks/test_servers.py",
            "contracts/test_ready_contract.py",
            "e2e/test_lane_run.py",
            "operator/leadership/test_operator_process.py",
        )
    ),
}


@pytest.fixture(autouse=True)
def _logs_of_a_new_process() -> None:
    """A command that ran in this process, for a test or for a fixture of many, left levels of its own."""
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("millstream").setLevel(logging.NOTSET)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What a test or its fixtures draw without a seed is the same whichever tests ran before it in this process.

    Which those are depends on when the processes of `--numprocesses` are done with other files.
    """
    random.seed(0)
    for name, seed in (("numpy.random", "seed"), ("torch", "manual_seed")):
        if (module := sys.modules.get(name)) is not None:
            getattr(module, seed)(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not WITH_PROCESSES.isdisjoint((item.path, *item.path.parents)):
            item.add_marker(pytest.mark.flaky(reruns=1))
