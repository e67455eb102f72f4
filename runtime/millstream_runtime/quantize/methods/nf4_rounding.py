"""NF4: the nearest of 16 values per weight, times the largest of 64 weights (Dettmers et al. 2023, arXiv 2305.14314).

The values are those of `quantization.nf4`. No data is needed.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor

from millstream_runtime.quantization.nf4 import BLOCK, NF4_VALUES, STATE
from millstream_runtime.quantize.methods.layer_method import LayerJob, QuantizedLayer
from millstream_runtime.quantize.output.bitsandbytes import Nf4Packing

BLOCKS_AT_ONCE = 1 << 14
SMALLEST_SCALE = 2.0**-126  # of float32, normal numbers


class Nf4:
    """Each weight becomes the nearest value of NF4."""

    needs_data = False

    def __init__(self, packing: Nf4Packing) -> None:
        self.packing = packing

    def quantize(self, job: LayerJob) -> QuantizedLayer:
        found = QuantizedLayer()
        for module in (module for group in job.groups for module in group.modules):
            name = f"{module}.weight"
            found.packed |= nf4_tensors(name, job.tensors.pop(name), job.stored[name])
        return found


def nf4_tensors(name: str, weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors that bitsandbytes stores for a weight.

    Args:
        weight: float32 `[out, in]`.
        dtype: what a loader of the format dequantizes to.
    """
    codes, scales = round_to_nf4(weight)
    state = {
        "quant_type": "nf4",
        "blocksize": BLOCK,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": list(weight.shape),
    }
    return {
        name: (codes[0::2] << 4 | codes[1::2]).unsqueeze(1),
        f"{name}.absmax": scales,
        f"{name}.quant_map": torch.tensor(NF4_VALUES),
        f"{name}.{STATE}": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


def round_to_nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8 `[out * in]`, row after row, and scales float32 `[blocks]`. `out * in` is even."""
    values = torch.tensor(NF4_VALUES, device=weight.device)
    between = (values[1:] + values[:-1]) / 2
    flat = weight.reshape(-1)
    num_blocks = -(-len(flat) // BLOCK)
    codes = torch.empty(len(flat), dtype=torch.uint8, device=weight.device)
    scales = torch.empty(num_blocks, device=weight.device)
    for first in range(0, num_blocks, BLOCKS_AT_ONCE):
        part = flat[first * BLOCK : (first + BLOCKS_AT_ONCE) * BLOCK]
        missing = -len(part) % BLOCK
        blocks = torch.nn.functional.pad(part, (0, missing)).view(-1, BLOCK)
        largest = blocks.abs().amax(1)
        found = torch.bucketize(blocks / largest.clamp(min=SMALLEST_SCALE).unsqueeze(1), between, out_int32=True)
        codes[first * BLOCK : first * BLOCK + len(part)] = found.view(-1)[: len(part)].to(torch.uint8)
        scales[first : first + len(blocks)] = largest
    return codes, scales
