"""SmoothQuant: scales that make activations easy to round to 8 bits (Xiao et al. 2022, arXiv 2211.10438).

    s = max|x| ^ a / max|w| ^ (1 - a)       per input, a = 0.5: activations and weights share the large values

The inverse goes into the norm before (`scale_folds`). Servers that compute with 8-bit activations need it; this one
leaves activations as they are, so for it nothing changes but the rounding of weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from millstream_runtime.quantize.methods.awq_search import ScaledModules

EXPONENT = 0.5
LEAST_SCALE, LARGEST_SCALE = 1e-3, 1e3


def smoothing_scales(groups: Sequence[ScaledModules], powers_of_two: bool) -> Tensor:
    """Return the scales `[in]` of an input that all `groups` read; 1 where it was always zero."""
    activations = torch.stack([one.inputs.absolute_max for one in groups]).amax(0)
    weights = torch.stack([one.weight.abs().amax(0) for one in groups]).amax(0)
    scales = activations**EXPONENT / weights.clamp(min=1e-6) ** (1 - EXPONENT)
    scales = torch.where(activations > 0, scales.clamp(LEAST_SCALE, LARGEST_SCALE), torch.ones_like(scales))
    return torch.exp2(scales.log2().round()) if powers_of_two else scales
