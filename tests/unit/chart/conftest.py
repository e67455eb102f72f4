"""Every test of the chart renders it with the pinned helm."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.helm_chart import have_helm

HELM_BUILD_SECONDS = 1800  # from source, on a busy machine; the first test waits for it


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(HELM_BUILD_SECONDS))


@pytest.fixture(scope="session", autouse=True)
def _helm() -> None:
    have_helm()
