"""What helps an engine without memory, by the flag and by the field of the spec that sets it."""

from __future__ import annotations

MEMORY_REMEDY = (
    "give the pod more (podTemplate.spec.containers[runtime].resources.limits.memory; on a GPU a larger one), or lower "
    "--max-num-seqs (engine.maxNumSeqs), --max-num-batched-tokens (engine.maxNumBatchedTokens) or "
    "--kv-cache-memory-bytes"
)
