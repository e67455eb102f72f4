"""Answers that a report shows, short: nearly all the time of `millstream quality` with a tiny model is theirs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from millstream_runtime.quality import comparison


@pytest.fixture(scope="module", autouse=True)
def short_answers() -> Iterator[None]:
    """Import it in a `conftest.py`. What an answer is in full is a test of `ScoredModel`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "ANSWER_TOKENS", 12)
        yield
