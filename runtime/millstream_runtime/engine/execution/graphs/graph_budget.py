"""What recorded graphs may take of a device's memory: decided before the KV pool takes the rest. Pure."""

from __future__ import annotations

from millstream_runtime.engine.execution.graphs.buckets import Buckets

GATHER_SHARE_PERCENT = 2  # of the usable memory: what one layer of a padded step may copy, or keep of partial sums
GATHER_FACTOR = 1.5  # in addition to the copy there are masks, indices, and scores where they are capped
GRAPH_FIXED_BYTES = 64 << 20  # cuBLAS workspaces of the stream that records, and what the allocator rounds up
GRAPH_BYTES_PER_LAYER = 8 << 20  # of nodes and parameters, over all graphs; the planner's estimate too


def buckets_within(
    limit_bytes: int,
    *,
    block_bytes: int,
    num_layers: int,
    max_num_seqs: int,
    max_model_len: int,
    block_size_tokens: int,
    in_place: bool = False,
) -> Buckets:
    """Buckets whose steps take at most GATHER_SHARE_PERCENT of `limit_bytes` in a layer.

    `block_bytes`: what a step takes for each KV block that it names, in all layers. `in_place`: see `Buckets`.
    """
    layer_block_bytes = max(1, block_bytes // num_layers)
    most_cells = limit_bytes * GATHER_SHARE_PERCENT // 100 // layer_block_bytes
    return Buckets(max_num_seqs, -(-max_model_len // block_size_tokens), most_cells, in_place=in_place)


def estimate_bytes(buckets: Buckets, *, block_bytes: int, num_layers: int) -> int:
    """What to keep free for graphs, on the full side: the copies of the largest, which all share, and all nodes."""
    largest = buckets.largest
    if largest is None:
        return 0
    copied_bytes = int(largest.cells * block_bytes / num_layers * GATHER_FACTOR)
    return copied_bytes + num_layers * GRAPH_BYTES_PER_LAYER + GRAPH_FIXED_BYTES
