"""What drafts gain at most for one request on a CPU, where nothing else is predicted. Pure.

    tokens of a check    1 + a + a^2 + ... + a^k        (arXiv 2211.17192, eq. 1; a: acceptance, k: drafts)
    seconds of a check   1 + k * draft / target          in decodes of the target, which read all its weights

It is a bound: a check of k + 1 tokens takes longer than a decode of one, on a CPU by what the products of several rows
cost. How much that is, the runtime measures.
"""

from __future__ import annotations

from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.planning.sizing.cpu_memory import cpu_weights_bytes
from millstream_operator.planning.sizing.roofline import SpeculationSpeed


def most_speedup_percent(speculation: SpeculationSpeed, share: float) -> int:
    """Return the tokens per second with drafts over those without, in percent.

    `share`: what a decode of the draft reads over what one of the target reads; 0 for n-grams, which cost nothing.
    """
    return round(100 * speculation.tokens_per_step / (1 + speculation.draft_tokens * share))


def draft_share(target: ModelShape, draft: ModelShape) -> float:
    """Return the bytes that one draft reads over those that a decode of the target reads."""
    read_bytes = float(_read_bytes(draft))
    if (head := draft.draft_head) is not None:
        read_bytes /= head.drafts_per_pass
        read_bytes += (target.vocab_size * target.hidden_size * target.compute_bytes) if head.uses_target_head else 0
    return read_bytes / _read_bytes(target)


def _read_bytes(shape: ModelShape) -> int:
    """What a decode reads: all weights, and of a token table that is not also the head a row alone."""
    table = shape.parameters.embedding * shape.compute_bytes if shape.parameters.head else 0
    return cpu_weights_bytes(shape) - table
