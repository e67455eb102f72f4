"""Layers of quantized weights by Triton kernels, in the interpreter: their products, and what is left to torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from millstream_runtime.models.layers.triton_layers import TritonLayers
from millstream_runtime.models.registry import load_model, load_model_config
from millstream_runtime.quantization.gpu.int8_linear import int8_linear
from millstream_runtime.quantization.gpu.weight_only_linear import weight_only_linear
from millstream_runtime.quantization.grouped_weight import GroupedWeight, pack_halves, runs_of
from millstream_runtime.quantization.nf4 import NF4_VALUES
from tests.support.family_cases import dense
from tests.support.kernel_launches import recording_launches
from tests.support.quantized_checkpoints import quantized
from tests.support.scaled_checkpoints import fp8, int8
from tests.support.tiny_families import logits_of, model_logits, prompts_of, write_family
from tests.support.triton_interpreter import interpreting

LINEARS = TritonLayers(norms=False, activations=False, linears=True, rotates=False, experts=False)
CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 1,
}


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    with interpreting():
        yield


def weight_of(num_inputs: int, num_outputs: int, **changes: Any) -> GroupedWeight:
    generator = torch.Generator().manual_seed(num_inputs)
    weight = GroupedWeight(
        codes=torch.randint(-127, 128, (num_inputs, num_outputs), generator=generator).to(torch.int8),
        scales=torch.rand(1, num_outputs, generator=generator) + 0.01,
        zeros=0,
        runs=runs_of(torch.zeros(num_inputs, dtype=torch.long)),
        num_outputs=num_outputs,
        bits=8,
        quantizes_activations=True,
    )
    return replace(weight, **changes)


@pytest.mark.parametrize("columns", [None, torch.zeros(40, dtype=torch.int32)])
def test_a_product_of_8_bit_activations_is_that_of_rounded_rows(columns: torch.Tensor | None) -> None:
    weight = weight_of(144, 40, columns=columns)
    bias = torch.randn(40, generator=torch.Generator().manual_seed(1))
    x = torch.randn(3, 144, generator=torch.Generator().manual_seed(2))
    linear = int8_linear(weight, bias)
    assert linear is not None
    steps = x.abs().amax(1, keepdim=True) / 127
    truth = (x / steps).round().double() * steps.double() @ weight.dense(torch.float64)
    torch.testing.assert_close(linear(x).double(), truth + bias, rtol=1e-6, atol=1e-5)
    order = [*range(39, -1, -1)]
    assert torch.equal(linear.reordered(order).without_bias()(x), linear.without_bias()(x)[:, order])
    residual = torch.ones(3, 40)
    linear.add_to(residual, x)
    assert torch.equal(residual, 1 + linear(x))


@pytest.mark.parametrize(
    "changes",
    [
        {"quantizes_activations": False},
        {"zeros": 3},
        {"order": torch.arange(144, dtype=torch.int32)},
        {"scales": torch.ones(2, 40)},
    ],
)
def test_other_weights_of_8_bits_have_no_product_of_8_bit_activations(changes: dict[str, Any]) -> None:
    assert int8_linear(weight_of(144, 40, **changes), None) is None
    assert int8_linear(weight_of(24, 8), None) is None


IN_GROUPS = {
    "scales": torch.rand(2, 40, generator=torch.Generator().manual_seed(3)) + 0.01,
    "runs": ((0, 128, 0), (128, 144, 1)),
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"columns": torch.zeros(40, dtype=torch.int32)},
        IN_GROUPS,
        {"codes": torch.randint(0, 255, (144, 40), dtype=torch.uint8), "zeros": 128},
        {"codes": torch.linspace(-400, 400, 144 * 40).view(144, 40).to(torch.float8_e4m3fn)},
        {"order": torch.arange(143, -1, -1, dtype=torch.int32)},
    ],
    ids=["channel", "tensor", "groups", "unsigned", "e4m3", "order"],
)
def test_a_product_of_16_bit_activations_is_that_of_the_dense_weight(changes: dict[str, Any]) -> None:
    weight = weight_of(144, 40, **changes)
    bias = torch.randn(40, generator=torch.Generator().manual_seed(1))
    x = torch.randn(3, 144, generator=torch.Generator().manual_seed(2))
    linear = weight_only_linear(weight, bias)
    assert linear is not None
    truth = x.double() @ weight.dense(torch.float64) + bias
    assert float((linear(x).double() - truth).abs().max() / truth.abs().max()) < 1e-6
    order = [*range(39, -1, -1)]
    assert torch.equal(linear.reordered(order).without_bias()(x), linear.without_bias()(x)[:, order])
    residual = torch.ones(3, 40)
    linear.add_to(residual, x)
    assert torch.equal(residual, 1 + linear(x))


@pytest.mark.parametrize(
    "changes",
    [
        {"zeros": 3},
        {"zeros": torch.ones(1, 40, dtype=torch.uint8)},
        {"codes": torch.zeros(144, 40, dtype=torch.uint8)},
        IN_GROUPS | {"runs": ((0, 64, 0), (64, 128, 1))},
        IN_GROUPS | {"runs": ((0, 16, 0), (16, 144, 1))},
    ],
)
def test_weights_of_8_bits_that_the_kernel_does_not_take_are_left_to_others(changes: dict[str, Any]) -> None:
    assert weight_only_linear(weight_of(144, 40, **changes), None) is None
    assert weight_only_linear(weight_of(24, 8), None) is None


def test_a_product_in_nf4_is_that_of_the_dense_weight() -> None:
    codes = torch.randint(0, 16, (128, 41), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
    changes = {"codes": pack_halves(codes), "scales": torch.rand(2, 41) + 0.1, "runs": ((0, 64, 0), (64, 128, 1))}
    weight = weight_of(128, 41, bits=4, values=torch.tensor(NF4_VALUES), quantizes_activations=False, **changes)
    bias = torch.randn(41, generator=torch.Generator().manual_seed(1))
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(2))
    found = LINEARS.packed_linear(weight, bias)
    assert found is not None
    linear, num_bytes = found
    assert num_bytes == 41 * 64 + 41 * 2 * 4 + 16 * 4
    truth = x.double() @ weight.dense(torch.float64) + bias
    assert float((linear(x).double() - truth).abs().max() / truth.abs().max()) < 1e-6
    order = [*range(40, -1, -1)]
    assert torch.equal(linear.reordered(order).without_bias()(x), linear.without_bias()(x)[:, order])
    residual = torch.ones(3, 41)
    linear.add_to(residual, x)
    assert torch.equal(residual, 1 + linear(x))
    shorter: dict[str, Any] = {"scales": weight.scales, "runs": ((0, 32, 0), (32, 64, 1)), "codes": weight.codes[:64]}
    assert LINEARS.packed_linear(replace(weight, **shorter), None) is None


@pytest.mark.deep
def test_an_fp8_checkpoint_is_computed_by_the_kernel_with_torchs_numbers(tmp_path: Path) -> None:
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 128]}
    write_family(tmp_path / "plain", **dense("llama", **SIZES))
    packed = tmp_path / "packed"
    dequantized = quantized(tmp_path / "plain", packed, settings, fp8("weight_scale_inv", (32, 128)))
    (prompt,) = prompts_of([3])
    config = load_model_config(packed)
    with recording_launches() as launches:
        model = load_model(config, packed, torch.float32, CPU, kernels=LINEARS)
        found = logits_of(model, config, prompt, 2, torch.float32)
    assert {one.kernel for one in launches} == {"w8a16_product", "sum_splits"}
    wanted = model_logits(dequantized, prompt, 2)
    assert float((found.double() - wanted).norm() / wanted.norm()) < 1e-5


@pytest.mark.deep
def test_a_checkpoint_of_8_bit_activations_is_computed_by_the_kernels(tmp_path: Path) -> None:
    activations = {"type": "int", "num_bits": 8, "dynamic": True, "strategy": "token"}
    weights = {"type": "int", "num_bits": 8, "symmetric": True, "strategy": "channel"}
    settings = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}},
        "ignore": ["lm_head"],
    }
    write_family(tmp_path / "plain", **dense("llama", **SIZES))
    packed = tmp_path / "packed"
    dequantized = quantized(tmp_path / "plain", packed, settings, int8("weight_scale", (1, None)))
    (prompt,) = prompts_of([3])
    config = load_model_config(packed)
    with recording_launches() as launches:
        model = load_model(config, packed, torch.float32, CPU, kernels=LINEARS)
        found = logits_of(model, config, prompt, 2, torch.float32).double()
    assert {one.kernel for one in launches} == {"quantize_row", "w8a8_product", "sum_splits"}
    wanted = model_logits(dequantized, prompt, 2)
    assert 1e-4 < float((found - wanted).norm() / wanted.norm()) < 0.2  # as on a CPU, where activations are rounded too
