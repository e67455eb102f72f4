"""Norms and activations: their numbers, their traps, and the codes of their quantized outputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from millstream_kernels.arguments import KernelArgumentError
from millstream_kernels.elementwise.codes import Codes, Quantized, e4m3_codes, int8_codes
from millstream_kernels.elementwise.gated_activation import Activation, gated_activation, gated_activation_quantized
from millstream_kernels.elementwise.rms_norm import rms_norm, rms_norm_quantized
from millstream_runtime.models.layers.norm import RmsNorm
from millstream_runtime.models.layers.torch_layers import gelu_tanh
from tests.support.kernel_launches import recording_launches

pytestmark = pytest.mark.usefixtures("interpreter")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EPS = 1e-5
SHAPES = [(1, 8), (3, 256), (2, 264), (5, 896), (2, 4096), (1, 5120)]
TORCH = {Activation.SILU: F.silu, Activation.GELU_TANH: gelu_tanh}


def rows(count: int, size: int, dtype: torch.dtype, *, seed: int = 1, gap: int = 0) -> Tensor:
    """`[count, size]`; with a gap between rows, which is NaN."""
    values = torch.randn(count, size, generator=torch.Generator().manual_seed(seed)) * 3
    memory = torch.full((count, size + gap), torch.nan, dtype=dtype)
    memory[:, :size] = values
    return memory[:, :size]


def poisoned(count: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.full((count, size), torch.nan, dtype=dtype)


def assert_as_good(result: Tensor, torch_result: Tensor, truth: Tensor) -> None:
    """The error is at most twice that of torch in the same type, or half a rounding of each number."""
    assert result.dtype == torch_result.dtype
    assert result.isfinite().all()
    torch_error = (torch_result.double() - truth).abs().max()
    allowed = torch.maximum(2 * torch_error, torch.finfo(result.dtype).eps * truth.abs())
    assert ((result.double() - truth).abs() <= allowed).all()


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


@pytest.mark.matrix("size")
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize(("count", "size"), SHAPES)
def test_a_norm_is_as_good_as_the_engines(count: int, size: int, dtype: torch.dtype) -> None:
    x, weight = rows(count, size, dtype, gap=8), rows(1, size, dtype, seed=2)[0]
    result = rms_norm(x, weight, EPS, output=poisoned(count, size, dtype))
    assert_as_good(result, RmsNorm(weight, EPS)(x), normed(x.double(), weight.double()))


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_the_residual_is_added_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    x, residual = rows(4, 264, dtype, gap=16), rows(4, 264, dtype, seed=3, gap=8) * 100
    weight = rows(1, 264, FP32, seed=2)[0]
    expected = (residual.float() + x.float()).to(dtype)
    result = rms_norm(x, weight, EPS, residual=residual)
    assert torch.equal(residual, expected)
    assert_as_good(result, RmsNorm(weight, EPS)(expected), normed(expected.double(), weight.double()))


def test_gemmas_one_is_added_to_the_weight_in_float32() -> None:
    """In bfloat16 1 + 0.002 is 1."""
    x, weight = rows(4, 256, BF16), torch.full((256,), 0.002, dtype=BF16)
    x[:] = x.abs() + 1
    result = rms_norm(x, weight, EPS, one_plus_weight=True)
    truth = normed(x.double(), 1 + weight.double())
    assert ((result.double() - truth).abs() <= 2**-8 * truth).all()
    assert not torch.equal(result, rms_norm(x, torch.ones(256, dtype=BF16), EPS))


def test_llamas_reference_rounds_before_the_weight_too() -> None:
    x, weight = rows(4, 512, BF16), rows(1, 512, BF16, seed=2)[0]
    wide = x.float()
    expected = (wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt()).to(BF16) * weight
    result = rms_norm(x, weight, EPS, cast_before_weight=True)
    # A sum in another order may move a number that lies between two of bfloat16.
    assert (result != expected).float().mean() < 0.001
    assert (rms_norm(x, weight, EPS) != expected).float().mean() > 0.05


@pytest.mark.parametrize("codes", Codes)
def test_a_quantized_norm_has_the_codes_of_the_norm(codes: Codes) -> None:
    x, residual, weight = rows(3, 264, BF16), rows(3, 264, BF16, seed=3), rows(1, 264, BF16, seed=2)[0]
    copy = residual.clone()
    result = rms_norm_quantized(x, weight, EPS, codes, residual=residual)
    assert_codes_of(result, rms_norm(x, weight, EPS, residual=copy), codes)
    assert torch.equal(residual, copy)


@pytest.mark.matrix("activation")
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize(("count", "size"), [(1, 8), (3, 1032), (2, 2048)])
def test_a_gate_is_as_good_as_the_engines(count: int, size: int, activation: Activation, dtype: torch.dtype) -> None:
    x = rows(count, 2 * size, dtype, gap=8)
    result = gated_activation(x, activation, output=poisoned(count, size, dtype))
    gate, up = x.chunk(2, -1)
    truth = TORCH[activation](gate.double()) * up.double()
    assert_as_good(result, TORCH[activation](gate).mul_(up), truth)


@pytest.mark.parametrize("activation", Activation)
def test_a_gate_far_from_zero_is_neither_nan_nor_infinite(activation: Activation) -> None:
    gate = torch.tensor([[-1e30, -1e4, -90, -0.0, 0.0, 90, 1e4, 1e30]], dtype=FP32)
    result = gated_activation(torch.cat((gate, torch.ones_like(gate)), -1), activation)
    torch.testing.assert_close(result, gate.clamp(min=0.0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("codes", Codes)
def test_a_quantized_gate_has_the_codes_of_the_gate(codes: Codes, activation: Activation) -> None:
    x = rows(3, 2 * 2056, BF16, gap=8)
    result = gated_activation_quantized(x, activation, codes)
    assert_codes_of(result, gated_activation(x, activation), codes)


def assert_codes_of(result: Quantized, numbers: Tensor, codes: Codes) -> None:
    limit = 127 if codes == Codes.INT8 else 448
    wide = numbers.float()
    scales = wide.abs().amax(-1) / limit
    quotients = wide / scales[:, None]
    if codes == Codes.INT8:
        expected = quotients.round().to(torch.int8)
    else:
        expected = quotients.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(result.scales, scales)
    assert torch.equal(result.codes, expected)


@pytest.mark.parametrize("codes", Codes)
def test_a_row_of_zeros_has_codes_of_zero_and_a_row_with_nan_a_scale_that_is_nan(codes: Codes) -> None:
    x = rows(4, 256, BF16)
    clean = rms_norm_quantized(x, torch.ones(256, dtype=BF16), EPS, codes)
    x[1] = 0
    x[2, 200] = torch.nan
    weight = torch.ones(256, dtype=BF16)
    gates = torch.cat((x, torch.ones_like(x)), -1)
    for result in (
        rms_norm_quantized(x, weight, EPS, codes),
        gated_activation_quantized(gates, Activation.SILU, codes),
    ):
        assert not result.codes[1].any()
        assert result.scales[1] == 0
        assert result.scales.isnan().tolist() == [False, False, True, False]
    own = rms_norm_quantized(x, weight, EPS, codes)
    assert torch.equal(own.codes[[0, 3]], clean.codes[[0, 3]])


@triton.jit
def encode(numbers, bytes_out, SIZE: tl.constexpr, INT8: tl.constexpr):
    places = tl.arange(0, SIZE)
    values = tl.load(numbers + places)
    if INT8:
        tl.store(bytes_out + places, int8_codes(values))
    else:
        tl.store(bytes_out + places, e4m3_codes(values))


def test_codes_of_float8_are_torchs_at_every_tie() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[every.isfinite()].sort().values
    middles = (every[1:] + every[:-1]) / 2
    edges = torch.tensor([448.0, 464.0, 465.0, 1e30, -1e30, torch.inf, -torch.inf, torch.nan, 1e-30, -0.0, 2.0**-10])
    numbers = torch.cat((every, middles, middles.nextafter(middles + 1), middles.nextafter(middles - 1), edges))
    numbers = F.pad(numbers, (0, 1024 - len(numbers) % 1024))
    codes = torch.full(numbers.shape, 85, dtype=torch.uint8)
    for start in range(0, len(numbers), 1024):
        encode[(1,)](numbers[start : start + 1024], codes[start : start + 1024], SIZE=1024, INT8=False)
    bounded = numbers.clamp(-448, 448).masked_fill(numbers.isinf(), torch.nan)
    expected = bounded.to(torch.float8_e4m3fn)
    finite = bounded.isfinite()
    assert torch.equal(codes[finite], expected.view(torch.uint8)[finite])
    assert codes[~finite].view(torch.float8_e4m3fn).float().isnan().all()


def test_codes_of_int8_round_half_to_even() -> None:
    numbers = torch.arange(-256, 256) / 2
    codes = torch.zeros(512, dtype=torch.int8)
    encode[(1,)](numbers, codes, SIZE=512, INT8=True)
    assert torch.equal(codes, numbers.round().clamp(-127, 127).to(torch.int8))


def test_a_row_has_one_result_alone_and_in_company() -> None:
    x, weight = rows(5, 896, BF16), rows(1, 896, BF16, seed=2)[0]
    assert torch.equal(rms_norm(x, weight, EPS)[3], rms_norm(x[3:4].clone(), weight, EPS)[0])
    assert torch.equal(gated_activation(x, Activation.SILU)[3], gated_activation(x[3:4].clone(), Activation.SILU)[0])


def test_no_rows_give_no_rows() -> None:
    assert rms_norm(rows(0, 64, BF16), rows(1, 64, BF16)[0], EPS).shape == (0, 64)
    assert gated_activation(rows(0, 64, BF16), Activation.SILU).shape == (0, 32)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("x", lambda: rms_norm(rows(2, 20, BF16), rows(1, 20, BF16)[0], EPS)),
        ("x", lambda: rms_norm(rows(2, 64, BF16).double(), rows(1, 64, BF16)[0], EPS)),
        ("x", lambda: rms_norm(rows(64, 64, BF16).T, rows(1, 64, BF16)[0], EPS)),
        ("x", lambda: rms_norm(rows(2, 64, BF16, gap=4), rows(1, 64, BF16)[0], EPS)),
        ("x", lambda: rms_norm(rows(1, 16392, BF16), rows(1, 16392, BF16)[0], EPS)),
        ("weight", lambda: rms_norm(rows(2, 64, BF16), rows(1, 32, BF16)[0], EPS)),
        ("residual", lambda: rms_norm(rows(2, 64, BF16), rows(1, 64, BF16)[0], EPS, residual=rows(2, 64, FP16))),
        (
            "residual",
            lambda: rms_norm(rows(2, 64, BF16), rows(1, 64, BF16)[0], EPS, residual=rows(1, 64, BF16).expand(2, 64)),
        ),
        ("output", lambda: rms_norm(rows(2, 64, BF16), rows(1, 64, BF16)[0], EPS, output=poisoned(2, 64, FP32))),
        ("x", lambda: gated_activation(rows(2, 24, BF16), Activation.SILU)),
        ("output", lambda: gated_activation(rows(2, 64, BF16), Activation.SILU, output=poisoned(2, 64, BF16))),
    ],
)
def test_what_a_kernel_cannot_take_is_refused_by_name(argument: str, call: Callable[[], Tensor]) -> None:
    with pytest.raises(KernelArgumentError) as caught:
        call()
    assert caught.value.argument == argument


def test_production_starts_what_is_in_the_table() -> None:
    x, weight = rows(2, 2048, BF16), rows(1, 2048, BF16)[0]
    with recording_launches(executing=False) as launches:
        rms_norm(x, weight, EPS)
        rms_norm(x, weight, EPS, residual=x.clone())
        rms_norm(x, weight.float(), EPS, residual=x.clone())
        for codes in Codes:
            rms_norm_quantized(x, weight, EPS, codes, residual=x.clone())
            gated_activation_quantized(x, Activation.SILU, codes)
        for activation in Activation:
            gated_activation(x, activation)
    assert len(launches) == 9
    for launch in launches:
        assert len(launch.variant_names()) == 1, launch
