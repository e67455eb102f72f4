"""The order in which edits of the spec are offered: by how little they change for those who use the model. Pure.

    1. nothing that clients are promised    where pods run, how a replica is laid out and batches steps, the draft
    2. a number that they are               length, replicas, load or latency; the smallest change first
    3. more money                           than the budget allows
    4. fewer bits                           of weights, keys or values, which may cost quality

Among equals: fewer fields first, then the order in which they are tried (that of `spec_changes`).
"""

from __future__ import annotations

from millstream_operator.planning.fixes.change import Change

NOT_PROMISED, NUMBER, MONEY, QUALITY = range(4)
_NOT_PROMISED_FIELDS = (
    *("podTemplate", "accelerator.products", "parallelism", "tier", "speculation"),
    *("engine.maxNumBatchedTokens", "engine.gpuMemoryUtilizationPercent"),
)
_SAME_BITS = ("None", "absent")


def nearness(change: Change, stored: str) -> tuple[int, int, float]:
    """Smaller is nearer. `stored`: the format of the checkpoint, `None` for 16 bit."""
    ranks = [_rank(field, value in (*_SAME_BITS, stored)) for field, value in change.fields]
    return max(ranks, default=NOT_PROMISED), len(ranks), change.step


def _rank(field: str, keeps_bits: bool) -> int:
    if field.startswith("quantization"):
        return NOT_PROMISED if keeps_bits else QUALITY
    if any(field == known or field.startswith(f"{known}.") for known in _NOT_PROMISED_FIELDS):
        return NOT_PROMISED
    return MONEY if field.startswith("budget") else NUMBER
