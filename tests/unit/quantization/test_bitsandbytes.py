"""What bitsandbytes packs is dequantized bit for bit as bitsandbytes does it; what it would not write is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import pytest
import torch
from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
from safetensors.torch import load_file, save_file

from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.models.loading.checkpoint import Checkpoint
from millstream_runtime.models.loading.weights import LoadedWeights
from millstream_runtime.models.registry import load_model, load_model_config
from millstream_runtime.quantization.nf4 import Nf4Layout
from millstream_runtime.quantization.scaled_codes import ScaledCodesLayout
from millstream_runtime.quantization_config.formats import ScaledCodesFormat
from tests.support.bitsandbytes_checkpoints import llm_int8, nf4
from tests.support.family_cases import dense
from tests.support.quantized_checkpoints import Packer, quantized
from tests.support.tiny_families import write_family

pytestmark = pytest.mark.deep

CPU = torch.device("cpu")
NF4: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
DOWN = "model.layers.1.mlp.down_proj"
STATE = f"{DOWN}.weight.quant_state.bitsandbytes__nf4"


def stored(folder: Path, weight: torch.Tensor, pack: Packer) -> LoadedWeights:
    tensors, _ = pack("m", weight)
    folder.mkdir(exist_ok=True)
    save_file({f"m.{name}": one.contiguous() for name, one in tensors.items()}, folder / "model.safetensors")
    return LoadedWeights(Checkpoint(folder), torch.float32, CPU)


def dequantized(packed: torch.Tensor, state: bnb.QuantState) -> torch.Tensor:
    """Return what bitsandbytes dequantizes on a GPU, computed by its portable code on any CPU.

    Its own AVX-512 kernel starts a block at each row. Its packer and its CUDA kernel let blocks of 64 go on in the
    next row, so that kernel is wrong wherever a row is no multiple of 64.
    """
    absmax = state.absmax
    if state.nested:
        assert state.state2 is not None
        absmax = bnb.dequantize_blockwise(absmax, state.state2) + state.offset
    codes, size = packed.reshape(-1), state.blocksize
    found: torch.Tensor = _dequantize_4bit_compute(codes, absmax, state.code, size, state.shape, state.dtype)
    return found


@pytest.mark.matrix("double_quant")
@pytest.mark.parametrize("shape", [(64, 64), (24, 96), (7, 320), (30, 66), (48, 1024), (513, 192)])
@pytest.mark.parametrize("double_quant", [False, True])
def test_nf4_is_dequantized_bit_for_bit(double_quant: bool, shape: tuple[int, int], tmp_path: Path) -> None:
    """Also where blocks of 64 go on in the next row, and in 16 bits after one rounding."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    pack = nf4(double_quant=double_quant)
    found = Nf4Layout(double_quant).dense_weight(stored(tmp_path, weight, pack), "m", *shape)
    packed, state = bnb.quantize_4bit(weight, compress_statistics=double_quant, quant_type="nf4")
    assert torch.equal(found, dequantized(packed, state))
    packed, state = bnb.quantize_4bit(weight.bfloat16(), compress_statistics=double_quant, quant_type="nf4")
    tensors = {"m.weight": packed} | {f"m.weight.{key}": one for key, one in state.as_dict(packed=True).items()}
    save_file({key: one.contiguous() for key, one in tensors.items()}, tmp_path / "model.safetensors")
    source = LoadedWeights(Checkpoint(tmp_path), torch.bfloat16, CPU)
    assert torch.equal(Nf4Layout(double_quant).dense_weight(source, "m", *shape), dequantized(packed, state))


def test_llm_int8_is_dequantized_as_by_bitsandbytes(tmp_path: Path) -> None:
    """It multiplies by a rounded 1/127: the last bit may differ."""
    weight = torch.randn(48, 96, generator=torch.Generator().manual_seed(3)).half()
    layout = ScaledCodesLayout(ScaledCodesFormat(False, 1, None, "SCB", 127.0))
    found = layout.dense_weight(stored(tmp_path, weight, llm_int8()), "m", 48, 96)
    codes, scales, _ = bnb.int8_vectorwise_quant(weight)
    torch.testing.assert_close(found, bnb.int8_vectorwise_dequant(codes, scales).float(), rtol=2e-7, atol=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_family(tmp_path / "plain", **dense("llama", hidden_size=64, intermediate_size=128, head_dim=16))
    settings = NF4 | {"bnb_4bit_use_double_quant": True}
    quantized(tmp_path / "plain", tmp_path / "packed", settings, nf4(double_quant=True))
    return tmp_path / "packed"


def refusal(folder: Path, **tensors: torch.Tensor) -> str:
    path = folder / "model.safetensors"
    save_file(load_file(path) | tensors, path)
    with pytest.raises(RuntimeFailure) as refused:
        load_model(load_model_config(folder), folder, torch.float32, CPU)
    assert refused.value.reason is FailureReason.CHECKPOINT_INVALID
    return refused.value.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("quant_type", "fp4"),
        ("blocksize", 128),
        ("shape", [64, 64]),
        ("nested_blocksize", 128),
        ("nested_offset", None),
        ("nested_offset", "0.1"),
    ],
)
def test_a_state_that_contradicts_the_tensors_is_named(field: str, value: Any, folder: Path) -> None:
    state = json.loads(bytes(load_file(folder / "model.safetensors")[STATE].tolist()))
    text = json.dumps(state | {field: value}).encode()
    message = refusal(folder, **{STATE: torch.tensor([*text], dtype=torch.uint8)})
    assert f"{STATE} says {field} " in message


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff\xfe", b'{"a": NaN}', b"[" * 5000])
def test_a_state_that_is_no_json_is_named(text: bytes, folder: Path) -> None:
    assert f"{STATE} holds no JSON object" in refusal(folder, **{STATE: torch.tensor([*text], dtype=torch.uint8)})


def test_a_state_of_megabytes_is_not_read(folder: Path) -> None:
    assert f"{STATE} has shape [1000000]" in refusal(folder, **{STATE: torch.zeros(1_000_000, dtype=torch.uint8)})


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("weight", torch.zeros(4095, 1, dtype=torch.uint8), "has shape [4095, 1]"),
        ("weight", torch.zeros(4096, 1, dtype=torch.int8), "is I8; it must be one of U8"),
        ("weight.absmax", torch.zeros(128), "is F32; it must be one of U8"),
        ("weight.quant_map", torch.linspace(-1, 1, 16), "is not the table of NF4"),
        ("weight.nested_absmax", torch.tensor([float("nan")]), "NaN"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(name: str, tensor: torch.Tensor, words: str, folder: Path) -> None:
    message = refusal(folder, **{f"{DOWN}.{name}": tensor})
    assert f"{DOWN}.{name.split('.')[0]}" in message
    assert words in message


def test_double_quantization_that_config_json_does_not_tell(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": NF4}))
    assert "weight.absmax is U8; it must be one of F32" in refusal(folder)


def test_rows_in_the_order_of_a_gpu_are_refused(tmp_path: Path) -> None:
    write_family(tmp_path / "plain", **dense("llama", hidden_size=64, intermediate_size=128, head_dim=16))
    settings = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    quantized(tmp_path / "plain", tmp_path / "packed", settings, llm_int8())
    name = f"{DOWN}.weight_format"
    load_model(load_model_config(tmp_path / "packed"), tmp_path / "packed", torch.float32, CPU)
    assert f"{name} is 2" in refusal(tmp_path / "packed", **{name: torch.tensor(2, dtype=torch.uint8)})
