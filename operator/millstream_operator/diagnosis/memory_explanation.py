"""The planned memory as a sentence, for out-of-memory errors. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PARTS = (
    ("weightsBytes", "weights"),
    ("embeddingsBytes", "embeddings"),
    ("draftWeightsBytes", "draft weights"),
    ("activationsBytes", "activations"),
    ("graphsBytes", "CUDA graphs"),
    ("contextBytes", "process and libraries"),
    ("kvCacheBytes", "KV cache"),
)


def planned_memory(plan: Mapping[str, Any]) -> str:
    """`The plan counted on 4.0 GiB: 1.2 GiB weights, …`; "" where the plan has no ledger."""
    ledger = plan.get("memory")
    if not ledger:
        return ""
    parts = ", ".join(f"{gibibytes(ledger[key])} {words}" for key, words in _PARTS if ledger.get(key))
    return f"The plan counted on {gibibytes(ledger['usableBytes'])}: {parts}."


def gibibytes(count: int) -> str:
    """`1.5 GiB`, or MiB below a tenth of one."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 // 10 else f"{count / 2**20:.0f} MiB"
