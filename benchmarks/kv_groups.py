"""How many requests fit in the same KV memory where a model mixes windowed and full layers: exact counts, no timing.

The scheduler and the block manager admit requests of 8,192 tokens, without a model, until no other has room: once with
one block table for all layers, once with one per group (`--enable-hybrid-kv-cache-manager`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import machine
from millstream_runtime.engine.request import Request, SamplingParams
from millstream_runtime.engine.scheduling.hybrid_block_manager import make_block_manager
from millstream_runtime.engine.scheduling.scheduler import Scheduler
from millstream_runtime.engine.scheduling.sequence import Sequence
from millstream_runtime.kv_layout import KVLayout, group_layers, one_group

RESULT = Path(__file__).parent / "results" / "kv_groups.json"
KV_BYTES = 16 << 30
REQUEST_TOKENS, BLOCK_TOKENS, MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS = 8192, 16, 2048, 512
DTYPE_BYTES = 2


class Shape(NamedTuple):
    """What the KV pool depends on. A pattern of layers repeats; `F` is full, `W` windowed."""

    num_layers: int
    pattern: str
    window_tokens: int
    num_kv_heads: int
    head_dim: int

    @property
    def windows(self) -> list[int | None]:
        """By layer."""
        kinds = (self.pattern * self.num_layers)[: self.num_layers]
        return [self.window_tokens if kind == "W" else None for kind in kinds]


SHAPES = {
    "gemma-2-2b": Shape(26, "WF", 4096, 4, 256),
    "gemma-2-9b": Shape(42, "WF", 4096, 8, 256),
    "gemma-3-1b": Shape(26, "WWWWWF", 512, 1, 256),
    "gemma-3-12b": Shape(48, "WWWWWF", 1024, 8, 256),
    "gpt-oss-20b": Shape(24, "WF", 128, 8, 64),
}


def running_at_once(shape: Shape, layout: KVLayout, request_tokens: int) -> int:
    """Requests whose prompts are all in the pool when it has no room for another."""
    layer_token_bytes = 2 * shape.num_kv_heads * shape.head_dim * DTYPE_BYTES
    num_blocks = KV_BYTES // (layout.layers_per_group * layer_token_bytes * BLOCK_TOKENS)
    blocks = make_block_manager(
        layout.windows, num_blocks, BLOCK_TOKENS, MAX_NUM_SEQS, lookahead_tokens=MAX_NUM_BATCHED_TOKENS
    )
    scheduler = Scheduler(blocks, MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS)
    for number in range(MAX_NUM_SEQS):
        request = Request(str(number), [0] * request_tokens, SamplingParams(max_tokens=1))
        scheduler.add(Sequence(request, number, 0, [0] * request_tokens, request_tokens))
    while chunks := scheduler.apply(scheduler.plan()):
        scheduler.advance(chunks)
        for sequence, _ in chunks:
            sequence.is_complete = not sequence.num_uncomputed_tokens  # it stays, as one that decodes would
    blocks.check_integrity(scheduler.running)
    if scheduler.num_preemptions_total:
        raise RuntimeError("a request was preempted: the count is not what fits")
    return len(scheduler.running)


def measure() -> dict[str, Any]:
    """Counts by model."""
    found: dict[str, Any] = {}
    for name, shape in SHAPES.items():
        grouped = group_layers(shape.windows, REQUEST_TOKENS + 1)
        before = running_at_once(shape, one_group(shape.num_layers, None), REQUEST_TOKENS)
        after = running_at_once(shape, grouped, REQUEST_TOKENS)
        found[name] = {
            "groups": grouped.num_groups,
            "layers_per_group": grouped.layers_per_group,
            "requests_one_table": before,
            "requests_table_per_group": after,
            "ratio": round(after / before, 2),
        }
    return found


def main() -> None:
    """Measure, print, save."""
    models = measure()
    print(f"requests of {REQUEST_TOKENS} tokens at once in {KV_BYTES >> 30} GiB of KV cache")
    for name, one in models.items():
        print(f"{name:12} {one['requests_one_table']:4} -> {one['requests_table_per_group']:4} (x {one['ratio']})")
    setting = {
        "kv_bytes": KV_BYTES,
        "request_tokens": REQUEST_TOKENS,
        "block_size_tokens": BLOCK_TOKENS,
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
    }
    RESULT.write_text(json.dumps({"machine": machine.describe(), **setting, "models": models}, indent=2) + "\n")
    print(f"saved {RESULT}")


if __name__ == "__main__":
    main()
