"""Tensor-parallel layers compute on two processes what the whole layers compute on one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from millstream_runtime.errors import InvalidConfigError
from millstream_runtime.models.parallel import even_share, kv_head_share, vocabulary_share

ROOT = Path(__file__).parents[3]


class FakeRanks:
    """A fake: the arithmetic of shares asks for a place only, and talks to nobody."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def sum_(self, partial: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        raise NotImplementedError


@pytest.mark.parametrize("size", [1, 2])
def test_every_layer_on_gloo(size: int, tmp_path: Path) -> None:
    """Vocabulary 97 and one key/value head: neither divides by two."""
    command = [sys.executable, "-m", "tests.support.parallel_rank", str(tmp_path / "store")]
    ranks = [
        subprocess.Popen([*command, str(rank), str(size)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for rank in range(size)
    ]
    for process in ranks:
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0
        differences = json.loads(output)
        assert set(differences) == {"embedding", "mlp", "qkv", "head"}
        assert max(differences.values()) < 1e-4, differences


@pytest.mark.parametrize(("total", "size"), [(1, 1), (97, 2), (97, 4), (3, 4), (128, 8)])
def test_every_token_has_exactly_one_rank(total: int, size: int) -> None:
    shares = [vocabulary_share(total, FakeRanks(rank, size)) for rank in range(size)]
    assert [token for share in shares for token in range(total)[share]] == list(range(total))


@pytest.mark.parametrize(
    ("num_kv_heads", "size", "expected"),
    [
        (8, 2, [(0, 4), (4, 8)]),
        (2, 2, [(0, 1), (1, 2)]),
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (1, 2, [(0, 1)] * 2),
    ],
)
def test_key_value_heads_stay_with_their_queries(num_kv_heads: int, size: int, expected: list[tuple[int, int]]) -> None:
    shares = [kv_head_share(num_kv_heads, FakeRanks(rank, size)) for rank in range(size)]
    assert [(share.start, share.stop) for share in shares] == expected


def test_sizes_that_do_not_divide_are_refused_by_name() -> None:
    with pytest.raises(InvalidConfigError, match=r"tensor-parallel-size is 4; it must divide num_attention_heads.* 6"):
        even_share(6, FakeRanks(0, 4), "num_attention_heads")
    with pytest.raises(InvalidConfigError, match="num_key_value_heads"):
        kv_head_share(3, FakeRanks(0, 2))
