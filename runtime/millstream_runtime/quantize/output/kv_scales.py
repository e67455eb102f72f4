"""Static scales of an FP8 KV cache, as llm-compressor writes them next to the attention: what `kv_scales.py` reads."""

from __future__ import annotations

import torch
from torch import Tensor

from millstream_runtime.quantize.layers.layer_run import LargestInCache

FP8_MAX = 448.0
# Twice what the data had still fits. A float loses no bit of its mantissa by that; a number beyond would be cut.
HEADROOM = 2.0
SMALLEST = 2.0**-20  # of a largest number: a layer whose values are all 0 has a scale, too


def kv_scales(prefix: str, largest: LargestInCache) -> dict[str, Tensor]:
    """Return the scales of a layer's keys and values, float32 `[1]`. `prefix`: of its tensors, `model.layers.3.`."""
    return {
        f"{prefix}self_attn.{name}": torch.tensor([max(number, SMALLEST) * HEADROOM / FP8_MAX])
        for name, number in (("k_scale", largest.key), ("v_scale", largest.value))
    }
