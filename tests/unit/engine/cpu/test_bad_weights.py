"""Checkpoints and memory that are not as they should be, where a CPU holds weights in 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from millstream_kernels.cpu.bfloat16 import check as bfloat16_check
from millstream_kernels.cpu.bfloat16.product import Bfloat16Product
from millstream_runtime.config import Device, DType, RuntimeConfig
from millstream_runtime.engine.cpu import compiled_code
from millstream_runtime.engine.execution import shard
from millstream_runtime.engine.execution.shard_config import resolve_shard_config
from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.models.layers.decoder import Decoder
from tests.support.bfloat16_operations import ExactOperations
from tests.support.tiny_families import logits_of
from tests.support.tiny_model import write_tiny_model

pytestmark = [
    pytest.mark.skipif(compiled_code.load()[0] is None, reason="no kernels are compiled for this machine"),
    pytest.mark.deep,
]
PROMPT = [5, 9, 3, 200, 17, 4, 4, 88]
Change = Callable[[dict[str, Tensor]], None]


class NoRoomToPack(ExactOperations):
    """torch's own error of a CPU without memory."""

    def pack(self, weight: Tensor) -> Tensor:
        return torch.empty(1 << 60, dtype=torch.uint8)


@pytest.fixture(params=["rounded products", "widened weights"])
def product(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Bfloat16Product | None:
    """Of the CPU, where it has one."""
    found = Bfloat16Product(ExactOperations(), 1, 2) if request.param == "rounded products" else None
    monkeypatch.setattr(bfloat16_check, "load", lambda: (found, None if found else "the CPU lacks it"))
    return found


def written(folder: Path, change: Change) -> Path:
    """A tiny bfloat16 checkpoint that is changed."""
    write_tiny_model(folder, torch_dtype="bfloat16")
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def loaded(folder: Path) -> Decoder:
    config = RuntimeConfig(model=str(folder), served_model_name="m", device=Device.CPU, dtype=DType.BFLOAT16)
    return shard.load(config, resolve_shard_config(config))


def logits(model: Decoder) -> Tensor:
    return logits_of(model, model.config, PROMPT, len(PROMPT), torch.float32)


def test_subnormal_weights_are_numbers_as_all_others(product: Bfloat16Product | None, tmp_path: Path) -> None:
    """2 ** -133 is the least of bfloat16. A layer whose weights are so small adds nothing that float32 can show, so the
    answer is that of `transformers` with zeros in their place."""

    def shrink(tensors: dict[str, Tensor]) -> None:
        for name in ("model.layers.0.self_attn.o_proj.weight", "model.layers.1.mlp.down_proj.weight"):
            tensors[name] = torch.full_like(tensors[name], 2.0**-133)
            tensors[name][::2] *= -3

    def zero(tensors: dict[str, Tensor]) -> None:
        for name in ("model.layers.0.self_attn.o_proj.weight", "model.layers.1.mlp.down_proj.weight"):
            tensors[name].zero_()

    found = logits(loaded(written(tmp_path / "subnormal", shrink)))
    zeros = written(tmp_path / "zeros", zero)
    assert torch.equal(found, logits(loaded(zeros)))
    reference = AutoModelForCausalLM.from_pretrained(zeros, dtype=torch.float32)
    with torch.inference_mode():
        exact = reference(torch.tensor([PROMPT])).logits[0]
    tolerance = 1e-4 if product is None else 0.1  # two layers of products that are rounded to bfloat16
    torch.testing.assert_close(found, exact, rtol=0, atol=tolerance)


@pytest.mark.usefixtures("product")
def test_modules_of_several_types_that_share_their_input_are_rounded_to_the_type_of_the_checkpoint(
    tmp_path: Path,
) -> None:
    """Query in bfloat16, key in float16, value in float32; gate in float32, up in bfloat16. Each is one product."""
    kinds = {"k_proj.weight": torch.float16, "v_proj.weight": torch.float32, "gate_proj.weight": torch.float32}

    def as_stored(tensors: dict[str, Tensor], rounds: bool) -> None:
        random = torch.Generator().manual_seed(1)
        for name, tensor in tensors.items():
            kind = next((kind for ending, kind in kinds.items() if name.endswith(ending)), None)
            if kind is not None:  # numbers that bfloat16 does not hold
                finer = (tensor.float() * (1 + 0.003 * torch.rand(tensor.shape, generator=random))).to(kind)
                tensors[name] = finer.bfloat16() if rounds else finer

    mixed = loaded(written(tmp_path / "mixed", lambda tensors: as_stored(tensors, rounds=False)))
    rounded = loaded(written(tmp_path / "rounded", lambda tensors: as_stored(tensors, rounds=True)))
    assert torch.equal(logits(mixed), logits(rounded))


def test_memory_that_holds_the_weights_and_not_what_packing_takes_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = Bfloat16Product(NoRoomToPack(), 1, 2)
    monkeypatch.setattr(bfloat16_check, "load", lambda: (product, None))
    with pytest.raises(RuntimeFailure) as refused:
        loaded(written(tmp_path, lambda tensors: None))
    assert refused.value.reason is FailureReason.OUT_OF_MEMORY
    assert f"Memory ran out while the weights of {tmp_path} were read: they need " in refused.value.message
    assert " as bfloat16, more for one layer while it is packed, and " in refused.value.message


def test_a_product_that_computes_wrongly_is_not_used_and_the_answer_stays_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Halved(ExactOperations):
        def product(self, x: Tensor, packed: Tensor) -> Tensor:
            return super().product(x, packed) / 2

    folder = written(tmp_path, lambda tensors: None)
    monkeypatch.setattr(bfloat16_check, "load", lambda: bfloat16_check.checked(Halved()))
    config = RuntimeConfig(model=str(folder), served_model_name="m", device=Device.CPU, dtype=DType.BFLOAT16)
    resolved = resolve_shard_config(config)
    assert not resolved.arithmetic.rounds_products
    assert (resolved.policy.bfloat16_problem or "").startswith("oneDNN's bfloat16 product failed its check: a product")
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        exact = reference(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits(loaded(folder)), exact, rtol=1e-4, atol=1e-4)
