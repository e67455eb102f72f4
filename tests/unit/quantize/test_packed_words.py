"""Words of 4-bit codes as AutoAWQ and AutoGPTQ pack them, written out: no code of this project says what is right.

AutoAWQ, `awq/modules/linear/gemm.py` (`from_linear`): bits 4i of a word along the outputs hold the output
[0, 2, 4, 6, 1, 3, 5, 7][i] of its eight. AutoGPTQ, `nn_modules/qlinear` (`pack`): bits 4i of a word along the inputs
hold input i of its eight; zero points are stored minus one, in words along the outputs in their own order.
`tests/packers` compares whole folders with gptqmodel, which has AutoAWQ's module.
"""

from __future__ import annotations

import torch

from millstream_runtime.quantize.methods.rounding import GroupedCodes
from millstream_runtime.quantize.output.packing import AwqPacking, GptqPacking
from millstream_runtime.quantize.settings import ActOrder

INPUTS, OUTPUTS, GROUP = 32, 8, 16
NUMBERS = torch.arange(8, dtype=torch.uint8)
SCALES = torch.tensor([[0.5, 0.25]] * OUTPUTS)


def signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def test_awq_interleaves_the_outputs_of_a_word() -> None:
    codes = NUMBERS.unsqueeze(1).repeat(1, INPUTS)  # output n has code n for every input
    codes[7, 1] = 15  # of the second input: the highest bits, and the sign
    zeros = torch.stack((NUMBERS, torch.full_like(NUMBERS, 8)), dim=1)
    groups = torch.arange(INPUTS) // GROUP
    found = AwqPacking(GROUP).pack("m", GroupedCodes(codes, SCALES, zeros, groups))
    assert {name: tuple(one.shape) for name, one in found.items()} == {
        "m.qweight": (INPUTS, 1),
        "m.qzeros": (2, 1),
        "m.scales": (2, OUTPUTS),
    }
    assert found["m.qweight"].flatten().tolist() == [0x75316420, signed(0xF5316420), *[0x75316420] * 30]
    assert found["m.qzeros"].flatten().tolist() == [0x75316420, signed(0x88888888)]
    assert found["m.scales"].tolist() == [[0.5] * OUTPUTS, [0.25] * OUTPUTS]
    assert (found["m.qweight"].dtype, found["m.scales"].dtype) == (torch.int32, torch.float16)


def test_gptq_packs_inputs_in_their_order_and_zero_points_minus_one() -> None:
    codes = NUMBERS.repeat(INPUTS // 8).repeat(OUTPUTS, 1)  # input k has code k mod 8 for every output
    codes[3, 31] = 15
    zeros = torch.full((OUTPUTS, 2), 8, dtype=torch.uint8)
    zeros[0, 1], zeros[7, 1] = 1, 16  # stored as 0 and 15
    groups = torch.arange(INPUTS) // GROUP
    found = GptqPacking(GROUP, ActOrder.NONE).pack("m", GroupedCodes(codes, SCALES, zeros, groups))
    assert {name: tuple(one.shape) for name, one in found.items()} == {
        "m.qweight": (INPUTS // 8, OUTPUTS),
        "m.qzeros": (2, 1),
        "m.scales": (2, OUTPUTS),
        "m.g_idx": (INPUTS,),
    }
    assert found["m.qweight"][:3].tolist() == [[0x76543210] * OUTPUTS] * 3
    assert found["m.qweight"][3].tolist() == [signed(0xF6543210) if n == 3 else 0x76543210 for n in range(OUTPUTS)]
    assert found["m.qzeros"].flatten().tolist() == [0x77777777, signed(0xF7777770)]
    assert found["m.g_idx"].tolist() == [0] * GROUP + [1] * GROUP
