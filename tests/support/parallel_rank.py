"""One rank of a tensor-parallel test: the same seeded layers whole and in shares, compared on this rank.

Run as `python -m tests.support.parallel_rank FILE RANK SIZE` by test_parallel.py; prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F

from millstream_runtime.models.linear import Linear
from millstream_runtime.models.parallel import (
    DistributedRanks,
    Ranks,
    RowParallelLinear,
    VocabularyParallelEmbedding,
    VocabularyParallelHead,
    column_parallel,
    even_share,
    kv_head_share,
)

VOCABULARY, HIDDEN, INTERMEDIATE = 97, 24, 20
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 1, 10


def compare(ranks: Ranks) -> dict[str, float]:
    """The greatest difference between whole and parallel, by layer."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    embedding, head = random(VOCABULARY, HIDDEN), random(HIDDEN, VOCABULARY)
    gate_up = Linear(random(HIDDEN, 2 * INTERMEDIATE), random(2 * INTERMEDIATE))
    down = Linear(random(INTERMEDIATE, HIDDEN), random(HIDDEN))
    qkv = Linear(random(HIDDEN, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM), None)
    tokens = torch.tensor([0, 48, 49, 96, 50, 7])

    x = F.embedding(tokens, embedding)
    units = even_share(INTERMEDIATE, ranks, "intermediate_size")
    up_units = slice(INTERMEDIATE + units.start, INTERMEDIATE + units.stop)
    inner = column_parallel(gate_up, [units, up_units])(x)
    whole, parallel = x.clone(), x.clone()
    down.add_to(whole, mlp_inner(gate_up(x)))
    RowParallelLinear.of(down, units, ranks).add_to(parallel, mlp_inner(inner))

    queries = scaled(even_share(NUM_HEADS, ranks, "num_attention_heads"), 0)
    kv = kv_head_share(NUM_KV_HEADS, ranks)
    keys, values = scaled(kv, NUM_HEADS), scaled(kv, NUM_HEADS + NUM_KV_HEADS)
    mine = column_parallel(qkv, [queries, keys, values])(x)
    expected = torch.cat([qkv(x)[:, part] for part in (queries, keys, values)], dim=1)

    return {
        "embedding": difference(VocabularyParallelEmbedding.of(embedding, ranks)(tokens), x),
        "mlp": difference(parallel, whole),
        "qkv": difference(mine, expected),
        "head": difference(VocabularyParallelHead.of(head, ranks)(x), x @ head),
    }


def mlp_inner(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def scaled(heads: slice, first_head: int) -> slice:
    return slice((first_head + heads.start) * HEAD_DIM, (first_head + heads.stop) * HEAD_DIM)


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    assert one.shape == other.shape
    return float((one - other).abs().max())


def main(file: str, rank: int, size: int) -> dict[str, float]:
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=size, timeout=timedelta(seconds=120)
    )
    try:
        group = dist.group.WORLD
        assert group is not None
        return compare(DistributedRanks(group))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
