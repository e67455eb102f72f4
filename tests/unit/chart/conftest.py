"""Every test of the chart renders it with the pinned helm."""

from __future__ import annotations

import pytest

from tests.support.helm_chart import have_helm


@pytest.fixture(scope="session", autouse=True)
def _helm() -> None:
    have_helm()
