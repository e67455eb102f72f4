"""How many bytes a second this machine reads from memory: the roof of decoding at batch 1.

A decode step of one sequence reads every weight once and does two operations with each; on any CPU the reading is the
slower part. So tokens a second times weight bytes, over what the machine streams at best, tells how much is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open

STREAM_BYTES = 1 << 29  # far more than any cache
REPEATS = 5


def stream_bytes_per_second() -> float:
    """The best of a plain sum and of matrix-vector products over half a gibibyte of float32, torch's threads."""
    data = torch.ones(STREAM_BYTES // 4)
    matrices = data.view(-1, 4096, 4096)
    vector = torch.ones(4096)

    def multiply() -> None:
        for matrix in matrices:
            torch.mv(matrix, vector)

    def total() -> None:
        data.sum()

    return STREAM_BYTES / min(_seconds(total), _seconds(multiply))


def _seconds(work: Callable[[], None]) -> float:
    """The quickest of some runs, after one that warms up."""
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def weight_bytes_per_token(folder: Path, itemsize: int = 4) -> int:
    """Bytes of weights that one decode step reads: all but the embedding table, of which it reads a row.

    With tied embeddings the table is the head too, and is read whole.
    """
    elements: dict[str, int] = {}
    for shard in folder.glob("*.safetensors"):
        with safe_open(shard, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                elements[name] = torch.Size(tensors.get_slice(name).get_shape()).numel()
    if "lm_head.weight" in elements:
        elements.pop("model.embed_tokens.weight", None)
    return sum(elements.values()) * itemsize
