"""Tests with `interpreter` run kernels on the CPU; the others compile them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.triton_interpreter import interpreting


@pytest.fixture
def interpreter() -> Iterator[None]:
    with interpreting():
        yield
