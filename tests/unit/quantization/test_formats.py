"""A packed checkpoint computes what its dequantized weights compute: by family, format, share and order of inputs."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from millstream_runtime.models.loading.checkpoint import Checkpoint
from millstream_runtime.models.registry import expected_weights, load_model, load_model_config
from tests.support.bitsandbytes_checkpoints import llm_int8, nf4
from tests.support.family_cases import CASES, dense
from tests.support.quantized_checkpoints import Packer, awq, gptq, quantized
from tests.support.scaled_checkpoints import fp8, int8, packed_integers
from tests.support.thread_ranks import on_ranks
from tests.support.tiny_families import (
    engine_answers,
    greedy_in_company,
    make_engine,
    model_logits,
    prompts_of,
    write_family,
)

CPU = torch.device("cpu")
# Shares of two ranks are whole packed words, and those of down_proj (48 of 96) end within a group of 32.
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
MLA = SIZES | {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "moe_intermediate_size": 64,
}
FAMILIES = {
    "llama": dense("llama", **SIZES),
    "qwen2": dense("qwen2", **SIZES),
    "gemma2": CASES["gemma2"].config | SIZES,
    "phi3": dense("phi3", **SIZES),
    "mixtral": dense("mixtral", **SIZES, num_local_experts=3),
    "deepseek-v3": CASES["deepseek-v3"].config | MLA,
}
AWQ32 = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ32 = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def packing(name: str, **weights: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


FORMATS: dict[str, tuple[dict[str, Any], Packer]] = {
    "awq": (AWQ32, awq(32)),
    "awq-column": ({"quant_method": "awq", "w_bit": 4, "q_group_size": -1, "version": "GEMM"}, awq(-1)),
    "gptq": (GPTQ32, gptq(4, 32, symmetric=True)),
    "gptq-v1-zeros": (GPTQ32 | {"sym": False, "checkpoint_format": "gptq"}, gptq(4, 32)),
    "gptq-v2-zeros": (GPTQ32 | {"sym": False, "checkpoint_format": "gptq_v2"}, gptq(4, 32, version=2)),
    "gptq-act-order": (GPTQ32 | {"desc_act": True}, gptq(4, 32, act_order=True)),
    "gptq-8bit": (GPTQ32 | {"bits": 8}, gptq(8, 32)),
    "gptq-8bit-column-act-order": (
        GPTQ32 | {"bits": 8, "group_size": -1, "desc_act": True},
        gptq(8, -1, act_order=True),
    ),
    "fp8-tensor": (FP8, fp8("weight_scale", None, shape=())),
    "fp8-block": (FP8 | {"weight_block_size": [24, 32]}, fp8("weight_scale_inv", (24, 32))),
    "fbgemm-fp8": ({"quant_method": "fbgemm_fp8"}, fp8("weight_scale", (1, 1 << 20))),
    "bitsandbytes-int8": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        int8("SCB", (1, None), stored_times=127),
    ),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, nf4()),
    "nf4-double": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
        nf4(double_quant=True),
    ),
    "llm-int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}, llm_int8()),
    "ct-int4": (packing("pack-quantized", num_bits=4, strategy="group", group_size=32), packed_integers(4, 32)),
    "ct-int4-asymmetric": (
        packing("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False),
        packed_integers(4, 32, symmetric=False),
    ),
    "ct-int4-act-order": (
        packing("pack-quantized", num_bits=4, strategy="group", group_size=32, actorder="group"),
        packed_integers(4, 32, act_order=True),
    ),
    "ct-int8-channel": (packing("pack-quantized", num_bits=8, strategy="channel"), packed_integers(8, -1)),
    "ct-w8a8": (packing("int-quantized", num_bits=8, strategy="channel"), int8("weight_scale", (1, None))),
    "ct-w8a8-tensor": (packing("int-quantized", num_bits=8, strategy="tensor"), int8("weight_scale", (None, None))),
    "ct-w8a16-group": (
        packing("int-quantized", num_bits=8, strategy="group", group_size=32),
        int8("weight_scale", (1, 32)),
    ),
    "ct-fp8-tensor": (
        packing("float-quantized", num_bits=8, type="float", strategy="tensor"),
        fp8("weight_scale", None, shape=(1,)),
    ),
    "ct-fp8-channel": (
        packing("float-quantized", num_bits=8, type="float", strategy="channel"),
        fp8("weight_scale", (1, 1 << 20)),
    ),
    "ct-naive-int8": (packing("naive-quantized", num_bits=8, strategy="channel"), int8("weight_scale", (1, None))),
    "ct-naive-fp8": (
        packing("naive-quantized", num_bits=8, type="float", strategy="channel"),
        fp8("weight_scale", (1, 1 << 20)),
    ),
    "ct-fp8-block": (
        packing("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[24, 32]),
        fp8("weight_scale", (24, 32)),
    ),
}
# One of each way to store weights: those that are combined with families, ranks and company.
SEVERAL = (
    *("awq", "gptq", "gptq-act-order", "fp8-tensor", "fp8-block", "bitsandbytes-int8", "nf4-double"),
    "ct-int4-act-order",
)
[PROMPT], CHUNK_TOKENS = prompts_of([29]), 13  # three chunks, the last not full, over a page's edge
# In float32 with room: values in `test_int4_activations`.
BY_BFLOAT16 = ("awq", "gptq", "gptq-v1-zeros", "gptq-v2-zeros", "ct-int4", "ct-int4-asymmetric", "ct-int4-act-order")


@pytest.fixture(scope="module", autouse=True)
def _one_thread(one_thread: None) -> None:
    """Small products on many threads wait for each other where other processes use the cores."""


class Folders:
    """Packed checkpoints, each written once, and what they compute."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._logits: dict[Path, torch.Tensor] = {}

    def plain(self, family: str) -> Path:
        folder = self._root / family
        if not folder.exists():
            write_family(folder, **FAMILIES[family])
        return folder

    def written(self, family: str, name: str) -> tuple[Path, Path]:
        """The packed folder, and that of the dequantized weights."""
        packed = self._root / f"{family}-{name}"
        dequantized = packed.with_name(f"{packed.name}-dense")
        if not packed.exists():
            settings, pack = FORMATS[name]
            quantized(self.plain(family), packed, settings, pack)
        return packed, dequantized

    def logits(self, folder: Path) -> torch.Tensor:
        """Of the prompt that all tests of one pass take; computed once per folder."""
        if folder not in self._logits:
            self._logits[folder] = model_logits(folder, PROMPT, CHUNK_TOKENS)
        return self._logits[folder].clone()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("quantized"))


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_computes_what_its_dequantized_weights_compute(name: str, folders: Folders) -> None:
    packed, dequantized = folders.written("llama", name)
    logits = folders.logits(packed)
    torch.testing.assert_close(logits, folders.logits(dequantized))
    assert not torch.allclose(logits, folders.logits(folders.plain("llama")), rtol=1e-3)


@pytest.mark.matrix("family")
@pytest.mark.parametrize("name", [name for name in SEVERAL if name != "gptq"])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama"])
def test_every_kind_of_layer_is_loaded(family: str, name: str, folders: Folders) -> None:
    """Biases, fused parts, experts, latent attention and its reordered outputs, a tied head."""
    packed, dequantized = folders.written(family, name)
    torch.testing.assert_close(folders.logits(packed), folders.logits(dequantized))


@pytest.mark.deep
@pytest.mark.matrix("name")
@pytest.mark.parametrize(
    ("family", "name"),
    [*product(FAMILIES, SEVERAL), *(("llama", name) for name in FORMATS if name not in SEVERAL)],
)
def test_two_ranks_compute_what_one_computes(family: str, name: str, folders: Folders) -> None:
    packed, _ = folders.written(family, name)
    shared = on_ranks(2, lambda ranks: model_logits(packed, PROMPT, CHUNK_TOKENS, ranks=ranks))
    torch.testing.assert_close(shared, folders.logits(packed), rtol=1e-6, atol=1e-6)


@pytest.mark.deep
@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_is_the_same_alone_and_in_company(name: str, folders: Folders) -> None:
    packed, dequantized = folders.written("llama", name)
    prompts = prompts_of([3, 17, 31, 40])
    engine = make_engine(packed)
    together = engine_answers(engine, prompts, 8)
    assert [engine_answers(engine, [prompt], 8)[0] for prompt in prompts] == together
    if name not in BY_BFLOAT16:
        assert together == engine_answers(make_engine(dequantized), prompts, 8)
    # Without room for another form of the weights, packed ones round nothing more.
    assert torch.equal(greedy_in_company(packed, prompts, 8), greedy_in_company(dequantized, prompts, 8))


@pytest.mark.deep
@pytest.mark.parametrize("name", [name for name in FORMATS if name.endswith("act-order")])
def test_on_two_ranks_an_answer_is_the_same_alone_and_in_company(name: str, folders: Folders) -> None:
    """The second rank's share of `down_proj` begins within a group of 32, whose inputs lie in any order."""
    packed, dequantized = folders.written("llama", name)
    prompts = prompts_of([3, 17, 31])
    together = on_ranks(2, lambda ranks: greedy_in_company(packed, prompts, 8, ranks))
    for place, prompt in enumerate(prompts):
        alone = on_ranks(2, partial(greedy_in_company, packed, [prompt], 8))
        assert alone.tolist() == together[place : place + 1].tolist()
    assert together.tolist() == greedy_in_company(dequantized, prompts, 8).tolist()


@pytest.mark.parametrize("name", ["awq", "gptq", "gptq-act-order", "gptq-8bit", "ct-int4", "ct-w8a8"])
def test_weights_take_the_bytes_that_were_planned(name: str, folders: Folders) -> None:
    """Those of the files: plain tensors have the files' own dtype here. GPTQ's trivial order is not kept.

    Rows of a table of codes end in 4 or 8 bytes of their own, which show in layers as narrow as these.
    """
    packed, _ = folders.written("llama", name)
    config = load_model_config(packed)
    model = load_model(config, packed, torch.float32, CPU)
    planned_bytes = expected_weights(config, torch.float32).num_bytes
    assert planned_bytes <= model.weight_bytes < 1.08 * planned_bytes
    with Checkpoint(packed) as checkpoint:
        wanted = expected_weights(config, torch.float32).expected
        names = [one for one in wanted if one in checkpoint and not one.endswith("weight_shape")]
        indices = sum(checkpoint.read(one).numel() * 4 for one in names if one.endswith("g_idx"))
        joined = 0 if name != "gptq-act-order" else indices  # each part keeps its order: nothing is shared
        checkpoint.bytes_read = 0
        total = sum(one.numel() * one.element_size() for one in map(checkpoint.read, names))
    assert planned_bytes == total - indices + joined


def test_where_memory_has_room_the_weights_are_kept_dequantized(folders: Folders) -> None:
    """The same tokens by other means; both count what they take."""
    packed, dequantized = folders.written("llama", "gptq-8bit-column-act-order")
    config = load_model_config(packed)
    roomy = load_model(config, packed, torch.float32, CPU, copy_budget_bytes=1 << 30)
    assert roomy.weight_bytes > load_model(config, packed, torch.float32, CPU).weight_bytes
    plain = load_model(load_model_config(dequantized), dequantized, torch.float32, CPU, copy_budget_bytes=1 << 30)
    assert roomy.weight_bytes == pytest.approx(plain.weight_bytes, rel=0.01)


@pytest.mark.matrix("kept", "where")
@pytest.mark.parametrize(
    ("kept", "where"),
    [
        ("model.layers.1.mlp", "layers.1.mlp"),
        ("model.layers.1.", "layers.1"),
        ("model.layers.*.mlp", "mlp"),
        ("k_proj", "k_proj"),
        ("self_attn", "self_attn"),
    ],
)
@pytest.mark.parametrize("field", ["modules_to_not_convert", "ignore"])
def test_modules_that_a_config_lists_stay_in_16_bit(field: str, kept: str, where: str, tmp_path: Path) -> None:
    """Also one of three that are computed together."""
    write_family(tmp_path / "plain", **FAMILIES["qwen2"])
    dequantized = quantized(tmp_path / "plain", tmp_path / "packed", AWQ32 | {field: [kept]}, awq(32), keep=where)
    packed = model_logits(tmp_path / "packed", PROMPT, CHUNK_TOKENS)
    torch.testing.assert_close(packed, model_logits(dequantized, PROMPT, CHUNK_TOKENS))
