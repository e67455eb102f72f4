"""Weights packed by bitsandbytes itself, on a CPU: see `quantized_checkpoints`."""

from __future__ import annotations

import bitsandbytes.functional as bnb
import torch
from torch import Tensor

from tests.support.quantized_checkpoints import Packer


def nf4(*, double_quant: bool = False) -> Packer:
    """What `Linear4bit` saves."""

    def pack(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        packed, state = bnb.quantize_4bit(
            weight.float().contiguous(), blocksize=64, compress_statistics=double_quant, quant_type="nf4"
        )
        tensors = {"weight": packed} | {f"weight.{key}": one for key, one in state.as_dict(packed=True).items()}
        scales = state.absmax
        if double_quant:
            scales = bnb.dequantize_blockwise(state.absmax, state.state2) + state.offset
        codes = torch.stack((packed.flatten() >> 4, packed.flatten() & 15), dim=1).flatten().int()
        blocks = torch.arange(weight.numel()) // state.blocksize
        dequantized = state.code.double()[codes[: weight.numel()]] * scales.double()[blocks]  # not rounded to 32 bits
        return tensors, dequantized.view(weight.shape)

    return pack


def llm_int8() -> Packer:
    """What `Linear8bitLt` saves."""

    def pack(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, scales, _ = bnb.int8_vectorwise_quant(weight.half().contiguous())
        dequantized = codes.double() * (scales.float() / 127).double().unsqueeze(1)
        return {"weight": codes, "SCB": scales}, dequantized

    return pack
