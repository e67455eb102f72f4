"""Tokens of changed logits, and log-probabilities, by Triton kernels that sort nothing: `millstream_kernels.sampling`.

A seed means the same as with torch: the same uniform numbers, bit for bit, the same order of the draw, and for `top_p`
the same redraws (`draw_on_host`).

Importing this imports triton: only an engine that chose the kernel does (`execution.kernel_choice`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from millstream_kernels.sampling.logprobs import describe_tokens
from millstream_kernels.sampling.sample import SamplingRows, sample_tokens
from millstream_runtime.engine.sampling.logprobs import Description
from millstream_runtime.engine.sampling.sampler import SamplingRow
from millstream_runtime.engine.transfer import on_device

ALIGNED_NUMBERS = 4  # of 4 bytes in 16: kernels are compiled for tensors that begin at multiples of it
LARGEST_TOP_K = 2**31 - 1


def choose_tokens(logits: Tensor, rows: Seq[SamplingRow]) -> Tensor:
    """`logits` `[R, vocab]` float32, after bias and penalties, to tokens `[R]` int64; -1 where they are not finite."""
    params = [row.params for row in rows]
    device, count = logits.device, len(rows)
    padding = [0] * (-count % ALIGNED_NUMBERS)

    def vectors(columns: list[list[int]] | list[list[float]], dtype: torch.dtype) -> list[Tensor]:
        """One copy to the device, each vector at a multiple of 16 bytes."""
        return [one[:count] for one in on_device([[*column, *padding] for column in columns], device, dtype)]

    temperatures, min_p = vectors([[one.temperature for one in params], [one.min_p for one in params]], torch.float32)
    (top_p,) = vectors([[one.top_p for one in params]], torch.float64)
    (top_k,) = vectors([[min(one.top_k, LARGEST_TOP_K) for one in params]], torch.int32)
    seeds, positions = vectors([[_signed(row.seed) for row in rows], [row.position for row in rows]], torch.int64)
    return sample_tokens(logits, SamplingRows(temperatures, top_k, top_p, min_p, seeds, positions))


def describe_rows(logits: Tensor, token_ids: Tensor, num_best: int) -> Description:
    """See `logprobs.DescribeTokens`."""
    found = describe_tokens(logits, token_ids, num_best)
    return Description(found.ranks, found.logprobs, found.best_tokens, found.best)


def _signed(seed: int) -> int:
    """The int64 with the low 64 bits of a seed."""
    low = seed & (1 << 64) - 1
    return low - (1 << 64) if low >= 1 << 63 else low
