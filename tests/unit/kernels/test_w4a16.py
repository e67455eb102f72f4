"""Products by weights of 4 bits: their numbers, one result for one row, and what AWQ and GPTQ files hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from millstream_kernels.arguments import KernelArgumentError
from millstream_kernels.linear.int4_weight import Int4Weight, repack
from millstream_kernels.linear.splits import splits_of
from millstream_kernels.linear.w4a16 import plan, w4a16_linear
from millstream_runtime.quantization.awq import AwqLayout
from millstream_runtime.quantization.gptq import GptqLayout
from tests.support.int4_cases import Int4Case, loaded, repacked, unpacked
from tests.support.kernel_launches import recording_launches
from tests.support.quantized_checkpoints import Packer, awq, gptq
from tests.support.triton_interpreter import interpreting

pytestmark = pytest.mark.usefixtures("interpreter")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

SWEEP = [
    (1, Int4Case(128, 128, 128), BF16),
    (3, Int4Case(1024, 130, 128), BF16),  # two splits; outputs beyond a tile
    (16, Int4Case(1056, 8, 32), FP16),  # an input tile that is not full; four groups per tile
    (17, Int4Case(1024, 136, 64, BF16), BF16),  # a tile of 64 rows
    (64, Int4Case(64, 128, 64), FP16),
    (5, Int4Case(1152, 128, None), BF16),  # one group per output
    (2, Int4Case(640, 72, 256, symmetric=True), FP16),  # a last group that is shorter
    (65, Int4Case(1040, 64, 128), BF16),  # all splits in one program
    (130, Int4Case(256, 128, 32), BF16),
    (4, Int4Case(1024, 40, 128), FP32),
]


def rows(count: int, size: int, dtype: torch.dtype, *, gap: int = 8, seed: int = 1) -> Tensor:
    """`[count, size]`, with a gap between rows, which is NaN."""
    memory = torch.full((count, size + gap), torch.nan, dtype=dtype)
    memory[:, :size] = torch.randn(count, size, generator=torch.Generator().manual_seed(seed))
    return memory[:, :size]


def product(x: Tensor, weight: Int4Weight, bias: Tensor | None = None) -> Tensor:
    """Into an output that is NaN beforehand."""
    return w4a16_linear(x, weight, bias, output=torch.full((x.shape[0], weight.num_outputs), torch.nan, dtype=x.dtype))


def assert_as_good_as_torch(result: Tensor, x: Tensor, dense: Tensor, bias: Tensor | None = None) -> None:
    """The error is at most twice that of torch in the same type, or a rounding of the largest number."""
    added = torch.zeros(dense.shape[1], dtype=x.dtype) if bias is None else bias
    truth = x.double() @ dense + added.double()
    torch_error = (torch.addmm(added, x, dense.to(x.dtype)).double() - truth).abs().max().item()
    rounding = torch.finfo(x.dtype).eps / 2 * truth.abs().max().item()
    assert result.isfinite().all()
    error = (result.double() - truth).abs().max().item()
    assert error <= max(2 * torch_error, rounding), f"error {error:.3g}, torch's {torch_error:.3g}"


@pytest.mark.parametrize(("count", "case", "dtype"), SWEEP, ids=lambda one: str(one).removeprefix("torch."))
def test_it_is_as_good_as_torch(count: int, case: Int4Case, dtype: torch.dtype) -> None:
    x, bias = rows(count, case.num_inputs, dtype), rows(1, case.num_outputs, dtype, seed=2)[0]
    assert_as_good_as_torch(product(x, case.packed(), bias), x, case.dense, bias)


@pytest.mark.parametrize("case", [one for _, one, _ in SWEEP], ids=str)
def test_what_was_repacked_is_the_weight(case: Int4Case) -> None:
    assert torch.equal(unpacked(case.packed()), case.dense)


def test_a_row_has_one_result_alone_in_company_and_in_a_prompt() -> None:
    """K order and splits follow from the weight: 1, 17 and 64 rows (splits apart) and 80 (in one program)."""
    case = Int4Case(1024, 128, 128)
    weight = case.packed()
    assert splits_of(128, 1024).count == 2
    x = rows(80, case.num_inputs, BF16)
    together = product(x, weight)
    assert plan(80, weight, 90).writes_partials is False
    for chosen in ([79], [*range(30, 47)], [*range(64)]):
        assert plan(len(chosen), weight, 90).writes_partials is True
        assert torch.equal(product(x[chosen].clone(), weight), together[chosen]), f"rows {chosen}"


def test_splits_follow_from_the_weight_alone() -> None:
    for num_outputs, num_inputs, count in ((4096, 4096, 8), (28672, 4096, 2), (1024, 14336, 16), (128256, 4096, 1)):
        assert splits_of(num_outputs, num_inputs).count == count
        assert splits_of(num_outputs, num_inputs).tiles >= 4
    assert splits_of(128, 384).count == 1
    for num_tiles in range(1, 60):
        splits = splits_of(128, num_tiles * 128)
        assert (splits.count - 1) * splits.tiles < num_tiles <= splits.count * splits.tiles


def test_a_row_with_nan_leaves_its_neighbours_alone() -> None:
    case = Int4Case(256, 128, 128)
    x = rows(4, 256, BF16)
    expected = product(x, case.packed())
    x[2, 17] = torch.nan
    result = product(x, case.packed())
    assert result[2].isnan().all()
    assert torch.equal(result[[0, 1, 3]], expected[[0, 1, 3]])


def test_codes_less_zero_points_are_exact_at_every_value() -> None:
    """x picks one input: the result is code - zero, times a scale that is a power of two."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(8)[:, None].expand(128, 16).contiguous()
    zeros = torch.arange(16, dtype=torch.uint8)[None, :].contiguous()
    expected = (codes.double() - zeros) / 64
    for dtype in (BF16, FP16):
        weight = repack(codes, torch.full((1, 16), 1 / 64, dtype=FP16), zeros, 128)
        assert torch.equal(product(torch.eye(128, dtype=dtype), weight).double(), expected)


def test_a_group_of_32_ends_within_a_tile_and_has_a_scale_of_its_own() -> None:
    """Trap: a tile of inputs that crosses a group and takes one scale for both."""
    codes = torch.full((128, 8), 9, dtype=torch.uint8)
    scales = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=FP16)[:, None].expand(4, 8).contiguous()
    x = torch.zeros(4, 128, dtype=BF16)
    x[range(4), [31, 32, 95, 96]] = 1
    result = product(x, repack(codes, scales, 8, 32))
    assert result[:, 0].tolist() == [1, 2, 4, 8]


def of_file(pack: Packer, layout: Any, num_outputs: int, num_inputs: int) -> tuple[Int4Weight, Tensor]:
    """Pack a random weight by plain loops, and read it with the runtime's loader: repacked, and dense `[K, N]`."""
    weight = torch.randn(num_outputs, num_inputs, generator=torch.Generator().manual_seed(5)) * 0.1
    tensors, dense = pack("module", weight)
    return repacked(loaded(layout, tensors, num_outputs, num_inputs)), dense.t()


FILES: dict[str, Callable[[], tuple[Int4Weight, Tensor]]] = {
    "AWQ, outputs of a word in AWQ's order": lambda: of_file(awq(128), AwqLayout(128), 72, 256),
    "AWQ, groups of 32": lambda: of_file(awq(32), AwqLayout(32), 136, 96),
    "AWQ, a group per output": lambda: of_file(awq(-1), AwqLayout(None), 16, 256),
    "GPTQ v1, zero points less one": lambda: of_file(gptq(4, 64), GptqLayout(4, 64, False, True), 72, 256),
    "GPTQ v2, zero points as they are": lambda: of_file(
        gptq(4, 64, version=2), GptqLayout(4, 64, False, False), 72, 256
    ),
    "GPTQ, act-order": lambda: of_file(gptq(4, 32, act_order=True), GptqLayout(4, 32, True, True), 24, 160),
    "GPTQ, symmetric": lambda: of_file(gptq(4, 128, symmetric=True), GptqLayout(4, 128, False, True), 24, 256),
}


@pytest.mark.parametrize("name", FILES)
def test_what_a_checkpoint_holds_is_what_is_computed_with(name: str) -> None:
    """Traps: the order of half-bytes in a word, a mask before the shift, zero points less one, inputs out of order."""
    weight, dense = FILES[name]()
    assert torch.equal(unpacked(weight), dense)
    x = rows(3, weight.num_inputs, BF16)
    assert_as_good_as_torch(product(x, weight), x, dense)


def test_outputs_in_another_order() -> None:
    case = Int4Case(160, 136, 32)
    order = torch.randperm(136, generator=torch.Generator().manual_seed(3))[:130]
    assert torch.equal(unpacked(case.packed().with_outputs(order)), case.dense[:, order])


def test_the_high_half_byte_of_a_word_has_no_sign() -> None:
    """Trap: `>>` of a negative word fills with ones; a mask that comes first would keep them."""
    codes = torch.zeros(128, 1, dtype=torch.uint8)
    codes[96:] = 15
    weight = repack(codes, torch.ones(1, 1, dtype=FP16), 0, 128)
    assert (weight.codes[0, 0, 0] < 0).all()
    result = product(torch.ones(1, 128, dtype=BF16), weight)
    assert result.item() == 32 * 15


def test_indices_beyond_two_to_the_31_are_computed_in_64_bits(tmp_path: Path) -> None:
    """Rows so far apart that their distance is no int32, in a file with holes. `checking_overflow` makes an error of
    int32 arithmetic that overflows."""
    case, far = Int4Case(128, 16, 128), (1 << 30) + 8
    memory = torch.from_file(str(tmp_path / "x"), shared=True, size=2 * far + 128, dtype=FP16)
    x = memory.as_strided((3, 128), (far, 1))
    x.copy_(rows(3, 128, FP16))
    with interpreting(checking_overflow=True):
        result = product(x, case.packed())
    assert_as_good_as_torch(result, x, case.dense)


def test_no_rows_are_no_work() -> None:
    assert product(rows(0, 128, BF16), Int4Case(128, 24, 128).packed()).shape == (0, 24)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("x", {"x": rows(2, 128, BF16).double()}),
        ("x", {"x": rows(2, 120, BF16)}),
        ("x", {"x": rows(2, 128, BF16, gap=4)}),
        ("x", {"x": rows(2, 256, BF16)[:, ::2]}),
        ("x", {"x": torch.zeros(257, dtype=BF16)[1:].view(2, 128)}),
        ("bias", {"bias": torch.zeros(16, dtype=FP32)}),
        ("bias", {"bias": torch.zeros(8, dtype=BF16)}),
        ("output", {"output": torch.zeros(2, 16, dtype=FP32)}),
        ("output", {"output": torch.zeros(16, 2, dtype=BF16).T}),
    ],
)
def test_what_the_kernel_cannot_take_is_refused_by_name(argument: str, change: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"x": rows(2, 128, BF16), "weight": Int4Case(128, 16, 128).packed()} | change
    with pytest.raises(KernelArgumentError) as caught:
        w4a16_linear(**arguments)
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("codes", {"codes": torch.zeros(128, 8, dtype=torch.int32)}),
        ("codes", {"codes": torch.full((128, 8), 16, dtype=torch.uint8)}),
        ("group_size", {"group_size": 48}),
        ("group_size", {"group_size": 192}),
        ("scales", {"scales": torch.ones(2, 8, dtype=FP16)}),
        ("scales", {"scales": torch.ones(1, 8)}),
        ("zeros", {"zeros": 16}),
        ("zeros", {"zeros": torch.full((1, 8), 16, dtype=torch.uint8)}),
        ("order", {"order": torch.zeros(128, dtype=torch.int64)}),
    ],
)
def test_what_cannot_be_repacked_is_refused_by_name(argument: str, change: dict[str, Any]) -> None:
    codes, scales = torch.zeros(128, 8, dtype=torch.uint8), torch.ones(1, 8, dtype=FP16)
    arguments: dict[str, Any] = {"codes": codes, "scales": scales, "zeros": 8, "group_size": 128} | change
    with pytest.raises(KernelArgumentError) as caught:
        repack(**arguments)
    assert caught.value.argument == argument


def test_production_starts_what_is_in_the_table() -> None:
    started = set()
    for dtype, group_size in ((BF16, 128), (BF16, 64), (BF16, 32), (FP16, 128)):
        weight = Int4Case(1024, 128, group_size).packed()
        for count, one in ((1, weight), (40, weight), (65, weight), (40, Int4Case(128, 8, group_size).packed())):
            with recording_launches(executing=False) as launches:
                product(rows(count, one.num_inputs, dtype), one)
            for launch in launches:
                assert launch.variant_names(), f"{launch} is compiled in service"
                started.add((launch.kernel, *launch.variant_names()))
    assert len({kernel for kernel, *_ in started}) == 2
