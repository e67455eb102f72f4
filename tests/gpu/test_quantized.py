"""On a GPU: quantized checkpoints answer as their dequantized weights do, by the kernels and without, and speculate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from millstream_runtime.config import Device, DType, GovernorMode, RuntimeConfig, SpeculationMethod, WeightFormat
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.kernel_backends import Backend, KernelChoice
from millstream_runtime.models.layers.triton_layers import TritonLayers
from millstream_runtime.quantization.eight_bit_rounding import round_to_fp8
from millstream_runtime.quantization.gpu.kernel_check import KernelCheck
from millstream_runtime.quantization.grouped_weight import GroupedWeight, pack_halves, runs_of
from tests.support.tiny_families import engine_answers, prompts_of
from tests.unit.quantization.test_formats import FORMATS, SEVERAL, Folders

pytestmark = pytest.mark.gpu
PROMPTS = prompts_of((15, 18, 31))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("quantized"))


def engine_of(folder: Path, device: Device, dtype: DType, **changes: Any) -> Engine:
    settings: dict[str, Any] = {"max_num_seqs": 4, "kv_cache_memory_bytes": 4 << 20}
    settings |= changes
    config = RuntimeConfig(model=str(folder), served_model_name="t", device=device, dtype=dtype, **settings)
    return Engine(config, lambda phase, message: None)


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_answers_as_its_dequantized_weights_on_a_cpu(name: str, folders: Folders) -> None:
    """In float32, where no kernel computes: each product dequantizes the weight."""
    packed, dequantized = folders.written("llama", name)
    expected = engine_answers(engine_of(dequantized, Device.CPU, DType.FLOAT32), PROMPTS, 12)
    assert engine_answers(engine_of(packed, Device.CUDA, DType.FLOAT32), PROMPTS, 12) == expected


@pytest.mark.parametrize("name", SEVERAL)
def test_kernels_pass_their_check_in_bfloat16(name: str, folders: Folders) -> None:
    engine = engine_of(folders.written("llama", name)[0], Device.CUDA, DType.BFLOAT16)
    linear = [one for one in engine.kernels if one.part == "linear"]
    assert linear == [KernelChoice("linear", Backend.TRITON, "the kernels take this model")]
    assert all(len(answer) == 12 for answer in engine_answers(engine, PROMPTS, 12))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(4096, 6144), (4096, 28_672), (14_336, 4096)])
def test_kernels_compute_weights_of_an_8b_model(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(shape[1])
    groups = torch.arange(shape[0]) // 128
    codes = torch.randint(0, 16, shape, generator=generator).to(torch.uint8)
    zeros = torch.randint(0, 16, (shape[0] // 128, shape[1]), generator=generator).to(torch.uint8)
    scales = torch.rand(zeros.shape, generator=generator).half() + 0.01
    weight = GroupedWeight(
        codes=pack_halves(codes).cuda(),
        scales=scales.cuda(),
        zeros=pack_halves(zeros).cuda(),
        runs=runs_of(groups),
        num_outputs=shape[1],
        bits=4,
    )
    check = KernelCheck(dtype)
    layers = TritonLayers(norms=False, activations=False, linears=True, rotates=False, experts=False, check=check)
    assert layers.packed_linear(weight, None) is not None, check.problem


@pytest.mark.parametrize("method", [SpeculationMethod.N_GRAM, SpeculationMethod.DRAFT_MODEL])
def test_drafts_change_no_token(method: SpeculationMethod, folders: Folders) -> None:
    """In float32; the model is its own draft model, so that drafts stand."""
    folder = folders.plain("llama")
    draft = {"draft_model": str(folder)} if method is SpeculationMethod.DRAFT_MODEL else {}
    speculating = {"speculation_method": method, "speculation_governor": GovernorMode.DISABLED, **draft}
    expected = engine_answers(engine_of(folder, Device.CUDA, DType.FLOAT32), PROMPTS, 24)
    engine = engine_of(folder, Device.CUDA, DType.FLOAT32, **speculating)
    assert engine_answers(engine, PROMPTS, 24) == expected
    counts = engine.stats().speculation
    assert counts is not None
    assert counts.num_accepted_tokens > 0 or method is SpeculationMethod.N_GRAM


def test_a_checkpoint_that_is_rounded_while_it_is_loaded_has_the_codes_of_a_cpu(folders: Folders) -> None:
    """In float32, where no kernel computes; `--quantization FP8`."""
    rounded = {"quantization": WeightFormat.FP8}
    on_cpu = engine_of(folders.plain("llama"), Device.CPU, DType.FLOAT32, **rounded)
    on_gpu = engine_of(folders.plain("llama"), Device.CUDA, DType.FLOAT32, **rounded)
    assert engine_answers(on_gpu, PROMPTS, 12) == engine_answers(on_cpu, PROMPTS, 12)
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(512, 1024, generator=generator) * 10 ** torch.randn(512, 1, generator=generator)
    here, there = (round_to_fp8(one, per_tensor=False) for one in (weight, weight.cuda()))
    assert torch.equal(here.codes.view(torch.uint8), there.codes.cpu().view(torch.uint8))
    assert torch.equal(here.scales, there.scales.cpu())
