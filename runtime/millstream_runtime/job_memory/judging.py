"""What `millstream quality` needs in memory; the operator sizes its Job by these. Imports nothing.

Memory holds one layer of one model, or the output heads of both, and the hidden states of some documents.
"""

from __future__ import annotations

GROUP_TOKENS = 1 << 14  # of documents that are computed together; more where there is room
CHUNK_TOKENS = 512  # of a document at a time
CHUNK_ROWS = 16  # float32 rows as wide as the widest of a layer, per token of a chunk: activations, attention
LAYER_LAYOUTS = 2  # a CPU keeps a float32 weight in two layouts


def judging_bytes(
    *, hidden_size: int, intermediate_size: int, layer_bytes: int, head_bytes: int, embedding_bytes: int
) -> int:
    """Return what judging takes besides the process itself, in float32.

    Args:
        layer_bytes: of the largest layer, as it is computed.
        head_bytes, embedding_bytes: of one model; a tied head is the embedding.
    """
    states_bytes = 2 * 4 * hidden_size * GROUP_TOKENS  # of both models
    chunk_bytes = 4 * CHUNK_ROWS * CHUNK_TOKENS * max(hidden_size, intermediate_size)
    weights_bytes = max(LAYER_LAYOUTS * layer_bytes, 2 * head_bytes, embedding_bytes)
    return states_bytes + chunk_bytes + weights_bytes
