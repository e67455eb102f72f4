"""By how much two right answers of an engine may differ: in other company steps have other sizes, sums other orders."""

from __future__ import annotations

from millstream_runtime.models.config.model_config import ModelConfig

FLOAT32 = 1e-3
# Weights of 4 bits are multiplied in bfloat16. So a row that differs in the last bit of float32 now and then becomes
# another bfloat16, and so do products of it: each by 2^-8 of its size, turned in pairs by the rotary angles. What is
# wrong differs by about as much as it is.
PACKED = 2**-5


def tolerance(config: ModelConfig) -> float:
    """Absolute, and relative to a number, of keys, values and log-probabilities."""
    return FLOAT32 if config.quantization is None else PACKED
