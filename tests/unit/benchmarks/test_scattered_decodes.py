"""`benchmarks.scattered_decodes` measures what it says: pools whose sequences are scattered, and one where none is."""

from __future__ import annotations

from pathlib import Path

from benchmarks.scattered_decodes import measure
from tests.support.tiny_model import write_tiny_model


def test_only_the_pools_that_should_be_scattered_are(tmp_path: Path) -> None:
    found = measure(write_tiny_model(tmp_path / "tiny"), num_seqs=3, prompt_tokens=64, rounds=1)
    assert found["scattered_sequences"]["contiguous"] == 0
    assert found["scattered_sequences"]["shared"] >= 2
    assert found["scattered_sequences"]["evicted"] >= 2
    assert all(found["answers_equal"].values())
