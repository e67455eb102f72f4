"""Folders that other packers made give the logits that those packers compute with them.

`make packed-checkpoints` writes `tests/data/packed_checkpoints`: two layers, groups of 32, of which the second of
`down_proj` is shared by two ranks.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from millstream_runtime.models.linear.shares import rank_config
from millstream_runtime.models.linear.tensor_parallel import SINGLE_PROCESS, Ranks
from millstream_runtime.models.registry import load_model, load_model_config
from millstream_runtime.quantization.cpu.int8_linear import levels
from tests.packers.tiny_llama import read_expected
from tests.support.thread_ranks import on_ranks
from tests.support.tiny_families import logits_of, model_logits

FOLDERS = Path(__file__).resolve().parents[2] / "data" / "packed_checkpoints"
NAMES = sorted(path.parent.relative_to(FOLDERS).as_posix() for path in FOLDERS.glob("*/*/config.json"))
# Both sides multiply the same codes and scales; the packer rounds products and sums to float32. Each of the 15 products
# of a token rounds its result by about 1e-7 of it.
FLOAT32_ERROR = 5e-6
# In each of the 14 layers activations, scales and results are rounded to bfloat16, at most by 2 ** -9 of them.
BFLOAT16_ERROR = 14 * 3 * 2**-9
CODES = ("qweight", "weight_packed", "weight")  # names of the tensor of packed weights


@pytest.fixture(scope="module", autouse=True)
def _one_thread(one_thread: None) -> None:
    """Small products on many threads wait for each other where other processes use the cores."""


def expected(name: str, kind: str = "logits") -> list[tuple[list[int], Tensor]]:
    return read_expected(FOLDERS / f"{name}.expected.safetensors", kind)


def error(found: Tensor, wanted: Tensor) -> float:
    """Relative, of all logits."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.matrix("name")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_a_folder_gives_the_logits_that_its_packer_computes(name: str, ranks: int) -> None:
    for prompt, wanted in expected(name):
        found = float64_logits(FOLDERS / name, prompt, ranks)
        assert error(found, wanted) < FLOAT32_ERROR


@pytest.mark.deep
@pytest.mark.parametrize("name", NAMES)
def test_one_weight_that_is_off_by_one_code_would_show(name: str, tmp_path: Path) -> None:
    shutil.copytree(FOLDERS / name, tmp_path / "changed")
    path = tmp_path / "changed" / "model.safetensors"
    tensors = load_file(path)
    module = "model.layers.0.mlp.down_proj"
    [stored] = [tensors[f"{module}.{one}"] for one in CODES if f"{module}.{one}" in tensors]
    stored.view(torch.uint8).view(-1)[0] ^= 1
    save_file(tensors, path, metadata={"format": "pt"})
    errors = [error(model_logits(path.parent, prompt, 13), wanted) for prompt, wanted in expected(name)]
    assert max(errors) > 3 * FLOAT32_ERROR


@pytest.mark.deep
@pytest.mark.matrix("name")
@pytest.mark.skipif(not levels(), reason="torch has no FBGEMM on this machine")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_a_server_with_room_in_memory_stays_within_the_rounding_of_its_kernels(name: str, ranks: int) -> None:
    """4 bits by bfloat16 activations, W8A8 by 8-bit ones, others dequantized to float32."""
    is_w8a8 = "w8a8" in name
    for index, (prompt, wanted) in enumerate(expected(name)):
        if is_w8a8:
            # The packer rounds each row to 8 bits, as we do; we perhaps to 7 (twice the step). Both roundings add up.
            by_packer = expected(name, "quantized")[index][1]
            bound = 5**0.5 * error(by_packer, wanted) * 1.5
            assert 1e-4 < error(logits_with_room(FOLDERS / name, prompt, ranks), by_packer) < bound
        else:
            assert error(logits_with_room(FOLDERS / name, prompt, ranks), wanted) < BFLOAT16_ERROR


def float64_logits(folder: Path, prompt: list[int], num_ranks: int) -> Tensor:
    """Of all positions, by ranks that compute with dequantized weights."""
    if num_ranks == 1:
        return model_logits(folder, prompt, 13)
    return on_ranks(num_ranks, lambda ranks: model_logits(folder, prompt, 13, ranks=ranks))


def logits_with_room(folder: Path, prompt: list[int], num_ranks: int) -> Tensor:
    """Of all positions, by ranks with memory for every kernel's form of the weights."""
    config = load_model_config(folder)

    def of_rank(ranks: Ranks) -> Tensor:
        model = load_model(config, folder, torch.float32, torch.device("cpu"), ranks, copy_budget_bytes=1 << 30)
        return logits_of(model, rank_config(config, ranks), prompt, 13, torch.float32)

    return on_ranks(num_ranks, of_rank) if num_ranks > 1 else of_rank(SINGLE_PROCESS)
