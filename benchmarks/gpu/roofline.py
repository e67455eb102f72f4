"""What one H200 could do at best with a load: every step at the peaks of its data sheet. Imports no torch.

prompts   all tokens at once, by arithmetic            answers   one step per token of the longest, all at once
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millstream_operator.catalog.gpu import load_catalog
from millstream_operator.catalog.read_shape import read_shape
from millstream_operator.planning.sizing.memory_ledger import kv_bytes_per_token
from millstream_operator.planning.sizing.weights import rank_weights, weight_format
from millstream_runtime.roofline import ModelSizes, Rates, attention_flops, step_work

PART = "H200-141GB"


def peak_rates() -> Rates:
    """Bandwidth and bfloat16 arithmetic of the part."""
    part = load_catalog().get(PART)
    assert part is not None
    return Rates(part.memory_bandwidth_bytes_per_second, part.dtype_flops("bf16"))


def sizes_of(config: dict[str, Any]) -> ModelSizes:
    """Of a model in 16 bits on one device."""
    shape = read_shape(config | {"torch_dtype": "bfloat16"})
    weights = rank_weights(shape, weight_format(shape, "None"))
    return ModelSizes(
        active_parameters=shape.active_parameters,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        head_dim=shape.head_size,
        read_bytes=weights.linear_bytes + weights.head_bytes,
        experts_bytes=weights.experts_bytes,
        num_experts=shape.num_experts,
        num_experts_per_token=shape.num_experts_per_token,
        kv_bytes_per_token=kv_bytes_per_token(shape, "None", 1),
    )


def most_tokens_per_second(config: dict[str, Any], lengths: Sequence[tuple[int, int]], rates: Rates) -> float:
    """Answer tokens per second. `lengths`: of each request's prompt and answer, all begun at once."""
    sizes = sizes_of(config)
    prompts = [prompt for prompt, _ in lengths]
    seen = sum(prompt * prompt // 2 for prompt in prompts)
    seconds = rates.seconds(step_work(sizes, sum(prompts), 0)) + attention_flops(sizes, seen) / rates.flops_per_second
    for step in range(1, max(answer for _, answer in lengths)):
        running = [prompt + step for prompt, answer in lengths if step < answer]
        seconds += rates.seconds(step_work(sizes, len(running), sum(running)))
    return sum(answer for _, answer in lengths) / seconds
