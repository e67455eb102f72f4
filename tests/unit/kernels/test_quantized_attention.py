"""Decodes and prompts over keys and values in 8 bits: their numbers, their scales, and what shows that one is bad."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from millstream_kernels.arguments import KernelArgumentError
from millstream_kernels.stored_as import StoredAs
from tests.support.paged_cases import BLOCK, Filled, Paged, assert_as_good_as_torch, make
from tests.support.triton_interpreter import interpreting
from tests.unit.kernels.test_decode import SWEEP as DECODES
from tests.unit.kernels.test_decode import decode
from tests.unit.kernels.test_prefill import SWEEP as PROMPTS
from tests.unit.kernels.test_prefill import prefill

pytestmark = [pytest.mark.usefixtures("interpreter"), pytest.mark.deep]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INT8, E4M3 = StoredAs.INT8, StoredAs.E4M3
FORMATS = (INT8, E4M3)
Attend = Callable[[Filled], Tensor]
KERNELS = pytest.mark.parametrize("attend", [decode, prefill])
BAD_CODES = (0x7F, 0xFF)


@pytest.mark.matrix("stored_as")
@pytest.mark.parametrize("stored_as", FORMATS, ids=lambda one: one.name.lower())
@pytest.mark.parametrize("case", DECODES, ids=str)
def test_decodes_are_as_good_as_torch(case: Paged, stored_as: StoredAs) -> None:
    filled = make(replace(case, stored_as=stored_as), strided=True)
    assert_as_good_as_torch(decode(filled), filled)


@pytest.mark.matrix("stored_as")
@pytest.mark.parametrize("stored_as", FORMATS, ids=lambda one: one.name.lower())
@pytest.mark.parametrize("case", PROMPTS, ids=str)
def test_prompts_are_as_good_as_torch(case: Paged, stored_as: StoredAs) -> None:
    filled = make(replace(case, stored_as=stored_as), strided=True)
    assert_as_good_as_torch(prefill(filled), filled)


def scales_of(filled: Filled) -> Tensor:
    assert filled.kv_scales is not None
    return filled.kv_scales


def slots_of(filled: Filled, request: int, first: int, stop: int) -> Tensor:
    """Places of tokens in the pool; beyond a request's last, the rest of its last block."""
    positions = torch.arange(first, stop)
    return filled.requests.tables[request].long()[positions // BLOCK] * BLOCK + positions % BLOCK


@KERNELS
def test_scales_behind_the_last_token_are_not_read(attend: Attend) -> None:
    """What an earlier owner of the block left."""
    filled = make(Paged((40, 17), (3, 2), dtype=BF16, stored_as=INT8))
    expected = attend(filled)
    assert_as_good_as_torch(expected, filled)
    for stale in (torch.nan, torch.inf, 3.0):
        for request, length in enumerate((40, 17)):
            tail = slots_of(filled, request, length, -(-length // BLOCK) * BLOCK)
            scales_of(filled)[:, tail] = stale
            filled.pool[:, tail] = 127
        assert torch.equal(attend(filled), expected), f"{stale} behind the last token"


@KERNELS
def test_scales_lie_as_far_apart_as_their_stride_says(attend: Attend) -> None:
    case = Paged((70, 33), (2, 3), 6, 3, stored_as=INT8)
    dense, strided = make(case), make(case, strided=True)
    assert scales_of(dense).stride() != scales_of(strided).stride()
    assert torch.equal(attend(dense), attend(strided))


@KERNELS
def test_scales_beyond_two_to_the_31_are_found(attend: Attend, tmp_path: Path) -> None:
    filled = make(Paged((20,), (3,), 2, 2, stored_as=INT8))
    heads, slots = scales_of(filled).shape
    far = (1 << 31) // 3 + 1  # the last head's place is no int32
    memory = torch.from_file(str(tmp_path / "scales"), shared=True, size=(heads - 1) * far + slots, dtype=FP16)
    scales = memory.as_strided((heads, slots), (far, 1)).copy_(scales_of(filled))
    expected = attend(filled)
    with interpreting(checking_overflow=True):
        assert torch.equal(attend(replace(filled, kv_scales=scales)), expected)


@KERNELS
@pytest.mark.parametrize("head", [0, 2], ids=["key", "value"])
def test_a_scale_that_is_not_finite_is_seen(attend: Attend, head: int) -> None:
    """It says that the token's numbers are bad: the heads that read them have no result, all others keep theirs."""
    filled = make(Paged((40, 50), (2, 2), stored_as=INT8))
    (slot,) = slots_of(filled, 0, 5, 6)
    filled.query[:] = -filled.pool[0, slot].sign()  # an infinite scale gives a score of minus infinity
    expected = attend(filled)
    for bad in (torch.inf, torch.nan):
        scales_of(filled)[head, slot] = bad
        result = attend(filled)
        assert result[:2, :2].isnan().all(), f"a scale of {bad}"
        assert torch.equal(result[:2, 2:], expected[:2, 2:])
        assert torch.equal(result[2:], expected[2:])


@KERNELS
@pytest.mark.parametrize("head", [0, 2], ids=["key", "value"])
def test_a_code_that_is_no_number_is_seen(attend: Attend, head: int) -> None:
    filled = make(Paged((40, 50), (2, 2), stored_as=E4M3))
    expected = attend(filled)
    for bad in BAD_CODES:
        filled.pool[head, slots_of(filled, 0, 5, 6), 7] = bad
        result = attend(filled)
        seen = result[:2, :2] if head == 0 else result[:2, :2, 7]
        assert seen.isnan().all(), f"code {bad:#x}"
        assert torch.equal(result[2:], expected[2:])


@pytest.mark.matrix("attend", "stored_as")
@KERNELS
@pytest.mark.parametrize(("stored_as", "dtype"), [(INT8, FP32), (INT8, FP16), (E4M3, FP32), (E4M3, FP16), (E4M3, BF16)])
def test_every_code_is_its_number(attend: Attend, stored_as: StoredAs, dtype: torch.dtype) -> None:
    """One token: the result is its value. Subnormal numbers of e4m3 among them."""
    filled = make(Paged((1,), (1,), 2, 1, 256, dtype, stored_as=stored_as))
    codes = [code for code in range(256) if stored_as is INT8 or code not in BAD_CODES]
    codes += [0] * (256 - len(codes))
    stored = torch.tensor(codes).to(torch.uint8).view(filled.pool.dtype)
    if stored_as is INT8:
        stored = stored.clamp(min=-127)
    (slot,) = slots_of(filled, 0, 0, 1)
    filled.pool[1, slot] = stored
    scale = scales_of(filled)[1, slot] if stored_as is INT8 else scales_of(filled)[1]
    numbers = stored if stored_as is INT8 else stored.view(torch.float8_e4m3fn)
    expected = (numbers.float() * scale.float()).to(dtype)
    assert torch.equal(attend(filled)[0], expected.expand(2, -1))


@KERNELS
def test_small_values_keep_their_bits_in_float16(attend: Attend) -> None:
    """A weight times such a scale alone is less than a float16 can tell from its neighbours."""
    filled = make(Paged((120,), (2,), 4, 2, 64, FP16, stored_as=INT8))
    scales_of(filled)[2:] *= 2**-8
    filled = replace(filled, values=[filled.values[0] * 2**-8])
    assert_as_good_as_torch(attend(filled), filled)


BAD: dict[str, tuple[StoredAs, dict[str, Any]]] = {
    "kv_scales are missing: a pool of torch.int8 has codes": (INT8, {"kv_scales": None}),
    "kv_scales are missing: a pool of torch.uint8 has codes": (E4M3, {"kv_scales": None}),
    "kv_scales are given, but": (StoredAs.NUMBERS, {"kv_scales": torch.ones(4)}),
    "kv_scales has the shape": (INT8, {"kv_scales": torch.ones(4, 63, dtype=FP16)}),
    "kv_scales is float32": (INT8, {"kv_scales": torch.ones(4, 80)}),
    "kv_scales is float16": (E4M3, {"kv_scales": torch.ones(4, dtype=FP16)}),
    "kv_scales has a stride of 2": (E4M3, {"kv_scales": torch.ones(8)[::2]}),
    "pool has strides": (INT8, {"pool": torch.zeros(4, 80, 72, dtype=torch.int8)[..., :64]}),
}


@KERNELS
@pytest.mark.parametrize("problem", BAD)
def test_an_argument_that_it_does_not_take_is_named(attend: Attend, problem: str) -> None:
    stored_as, change = BAD[problem]
    filled = replace(make(Paged((20,), (1,), stored_as=stored_as)), **change)
    with pytest.raises(KernelArgumentError, match=f"^{problem}"):
        attend(filled)
