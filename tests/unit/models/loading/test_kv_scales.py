"""Static scales of an FP8 KV cache: found by every name, 1 where there are none, refused where they are no scale."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from millstream_runtime.config import Device, KVCacheDType, RuntimeConfig
from millstream_runtime.engine.execution import shard
from millstream_runtime.engine.execution.shard_config import resolve_shard_config
from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.models.loading.kv_scales import read_kv_scales
from tests.support.family_cases import dense
from tests.support.tiny_families import write_family

KEYS, VALUES = 0.02, 0.5


def with_scales(folder: Path, **scales: float | torch.Tensor) -> Path:
    """`folder` with tensors of layer 1's attention, in a file of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.layers.1.self_attn.{name}": torch.as_tensor(one) for name, one in scales.items()}
    save_file(tensors, folder / "scales.safetensors")
    return folder


@pytest.mark.parametrize(
    "scales",
    [
        {"k_scale": KEYS, "v_scale": VALUES},
        {"k_scale": torch.tensor([KEYS]), "v_scale": torch.tensor([[VALUES]], dtype=torch.bfloat16)},
        {"attn.k_scale": KEYS, "attn.v_scale": VALUES},
        {"k_proj.k_scale": KEYS, "v_proj.v_scale": VALUES},
        {"k_proj.output_scale": KEYS, "v_proj.output_scale": VALUES},
    ],
)
def test_scales_are_found_under_every_name(scales: dict[str, float | torch.Tensor], tmp_path: Path) -> None:
    found = read_kv_scales(with_scales(tmp_path, **scales), 3)
    assert found[0] == found[2] == (1.0, 1.0)
    assert found[1] == pytest.approx((KEYS, VALUES))


@pytest.mark.parametrize("name", ["kv_scale", "k_scale", "v_proj.output_scale"])
def test_a_scale_without_its_fellow_serves_keys_and_values(name: str, tmp_path: Path) -> None:
    assert read_kv_scales(with_scales(tmp_path, **{name: 0.25}), 2)[1] == (0.25, 0.25)


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        (0.0, "is 0.0"),
        (-1.0, "is -1.0"),
        (float("nan"), "is nan"),
        (float("inf"), "is inf"),
        (torch.ones(4), r"is F32 of shape \[4\]"),
        (torch.tensor(1), r"is I64 of shape \[\]"),
    ],
)
def test_what_is_no_scale_is_refused_by_its_name(scale: float | torch.Tensor, words: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeFailure, match=rf"layers\.1\.self_attn\.k_scale {words}; .* int8") as caught:
        read_kv_scales(with_scales(tmp_path, k_scale=scale), 2)
    assert caught.value.reason is FailureReason.CHECKPOINT_INVALID


def test_an_fp8_cache_stores_numbers_divided_by_the_scales_of_its_checkpoint(tmp_path: Path) -> None:
    """A file that the index does not name counts for nothing, so the checkpoint is written as one file."""
    model = write_family(tmp_path, **dense("llama"))
    model.save_pretrained(tmp_path, max_shard_size="1GB")
    for stale in [*tmp_path.glob("model-0*"), tmp_path / "model.safetensors.index.json"]:
        stale.unlink()
    with_scales(tmp_path, k_scale=1 / 64, v_scale=2.0)
    found = []
    for stored in (KVCacheDType.FP8, KVCacheDType.INT8):
        runtime = RuntimeConfig(model=str(tmp_path), served_model_name="test", device=Device.CPU, kv_cache_dtype=stored)
        cache = shard.make_kv_cache(runtime, resolve_shard_config(runtime), 1)
        for layer in range(2):
            pool = cache.layer(layer)
            pool.write(torch.tensor([0]), torch.full((1, 4, 12), 100.0))
            found.append(pool.between(0, 1)[:, 0, 0].tolist())
    assert found[0] == [96.0] * 4, "the format has 96 and 104, and a tie goes to the even one"
    assert found[1] == [448 / 64] * 2 + [2 * 48.0] * 2, "6400 is beyond the format; 50 lies between 48 and 52"
    assert found[2] == found[3] == pytest.approx([100.0] * 4, rel=1e-3), "INT8 has scales of its own"
