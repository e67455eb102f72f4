"""GGUF models compute what llama.cpp's own reading of their blocks computes: by type, family, share and company."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from benchmarks.gguf_llama import convert
from millstream_runtime.config import DType
from millstream_runtime.errors import FailureReason, InvalidConfigError, RuntimeFailure
from millstream_runtime.gguf.block_types import BLOCK_TYPES
from millstream_runtime.models.config.rope_config import RopeConfig
from millstream_runtime.models.layers.rope import inverse_frequencies
from millstream_runtime.models.registry import expected_weights, load_model, load_model_config
from millstream_runtime.quantization.gguf_blocks import dequantized, scales_are_finite
from millstream_runtime.tokenizing.tokenizer import Tokenizer
from tests.support.family_cases import CASES, LLAMA3_ROPE, dense, rope
from tests.support.gguf_files import HALVES, TypeOf, q4_k_m, random_rows, write_gguf
from tests.support.thread_ranks import on_ranks
from tests.support.tiny_families import (
    engine_answers,
    make_engine,
    model_logits,
    prompts_of,
    reference_logits,
    write_family,
)

CPU = torch.device("cpu")
DEMO = Path(__file__).resolve().parents[3] / "models" / "demo-chat"
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
FAMILIES = {
    "llama": dense("llama", **SIZES),
    "qwen2": dense("qwen2", **SIZES, tie_word_embeddings=True),
    "qwen3": dense("qwen3", **SIZES),
    "gemma2": CASES["gemma2"].config | SIZES | {"query_pre_attn_scalar": 128},
    # What llama.cpp takes for granted: every sixth layer sees all, the others turn by a base of 10,000.
    "gemma3": dense("gemma3_text", **SIZES, num_hidden_layers=6, sliding_window=11, tie_word_embeddings=True)
    | {"query_pre_attn_scalar": 128},
}
MIXES: dict[str, TypeOf] = {
    "Q8_0": lambda module: "Q8_0",
    "Q4_K_M": q4_k_m,
    "Q2_K": lambda module: "Q3_K" if module.endswith(("v_proj", "o_proj", "down_proj")) else "Q2_K",
    "F16": lambda module: "F16",
    "old": lambda module: {"q": "Q4_0", "k": "Q4_1", "v": "Q5_0", "o": "Q5_1", "d": "IQ4_NL"}.get(
        module.rpartition(".")[2][0], "Q5_K"
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread(one_thread: None) -> None:
    """Small products on many threads wait for each other where other processes use the cores."""


class GgufFolders:
    """Each written once."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def written(self, family: str, mix: str) -> tuple[Path, Path]:
        """The folder with the file, and that of the same weights as safetensors."""
        plain, folder = self._root / family, self._root / f"{family}-{mix}"
        if not plain.exists():
            write_family(plain, **FAMILIES[family])
        if not folder.exists():
            write_gguf(plain, folder / "model.gguf", MIXES[mix])
        return folder, folder.with_name(f"{folder.name}-dense")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> GgufFolders:
    return GgufFolders(tmp_path_factory.mktemp("gguf"))


@pytest.mark.parametrize("kind", HALVES)
def test_blocks_are_dequantized_bit_for_bit(kind: str) -> None:
    rows = random_rows(kind, 64, 1024, seed=1)
    blocks = torch.from_numpy(rows).view(-1, BLOCK_TYPES[kind].block_bytes)
    expected = gguf.quants.dequantize(rows, Type[kind])
    assert np.array_equal(dequantized(blocks, BLOCK_TYPES[kind]).view(64, 1024).numpy(), expected)


@pytest.mark.parametrize("kind", HALVES)
def test_sizes_are_those_of_llama_cpp_and_every_scale_is_checked(kind: str) -> None:
    known = BLOCK_TYPES[kind]
    assert gguf.GGML_QUANT_SIZES[Type[kind]] == (known.block_elements, known.block_bytes)
    assert (Type[kind].value, known.halves) == (known.number, HALVES[kind][0])
    blocks = torch.from_numpy(random_rows(kind, 4, 1024, seed=1)).view(-1, known.block_bytes)
    assert scales_are_finite(blocks, known)
    for place in known.halves:
        for value in (float("inf"), float("-inf"), float("nan")):
            damaged = blocks.clone()
            damaged[3, place : place + 2] = torch.tensor([value]).half().view(torch.uint8)
            assert not scales_are_finite(damaged, known)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"])
def test_what_llama_cpp_packs_comes_back_within_its_rounding(kind: str) -> None:
    """The types that its Python package can write."""
    weight = np.random.default_rng(2).standard_normal((16, 256)).astype(np.float32)
    rows = gguf.quants.quantize(weight, Type[kind])
    if kind in HALVES:
        found = dequantized(torch.from_numpy(rows).view(-1, BLOCK_TYPES[kind].block_bytes), BLOCK_TYPES[kind])
        error = np.abs(found.view(16, 256).numpy() - weight).max()
        assert 0 < error < 8 / HALVES[kind][1]


@pytest.mark.matrix("mix")
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_mix_computes_what_its_dequantized_weights_compute(family: str, mix: str, folders: GgufFolders) -> None:
    folder, dequantized_folder = folders.written(family, mix)
    [prompt] = prompts_of([29])
    found, expected = model_logits(folder, prompt, 13), model_logits(dequantized_folder, prompt, 13)
    # A Gemma norm comes back from one plus its weight: rounded in float32.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_computes_what_transformers_computes_from_the_same_file(family: str, folders: GgufFolders) -> None:
    """Config from the metadata, names, the order of rotary rows, norms, biases, tied heads."""
    folder, _ = folders.written(family, "Q4_K_M")
    config = AutoConfig.from_pretrained(folder.with_name(f"{folder.name}-dense"))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    read = load_gguf_checkpoint(str(folder / "model.gguf"), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(read, strict=False)
    assert (set(missing) - {"lm_head.weight"}, unexpected) == (set(), [])
    assert config.tie_word_embeddings or "lm_head.weight" in read
    [prompt] = prompts_of([29])
    torch.testing.assert_close(model_logits(folder, prompt, 13), reference_logits(model, prompt), rtol=1e-4, atol=1e-4)


@pytest.mark.deep
@pytest.mark.matrix("mix")
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
@pytest.mark.parametrize("mix", ["Q8_0", "Q4_K_M", "Q2_K"])
def test_two_ranks_compute_what_one_computes(mix: str, family: str, folders: GgufFolders) -> None:
    folder, _ = folders.written(family, mix)
    [prompt] = prompts_of([29])
    shared = on_ranks(2, lambda ranks: model_logits(folder, prompt, 13, ranks=ranks))
    torch.testing.assert_close(shared, model_logits(folder, prompt, 13), rtol=1e-6, atol=1e-6)


def test_a_share_that_ends_within_a_block_is_refused(folders: GgufFolders) -> None:
    folder, _ = folders.written("llama", "Q4_K_M")
    with pytest.raises(InvalidConfigError, match=r"--tensor-parallel-size .* 256 weights; choose a smaller size"):
        on_ranks(4, lambda ranks: model_logits(folder, [1, 2, 3], 8, ranks=ranks))


@pytest.mark.deep
@pytest.mark.parametrize("mix", ["Q8_0", "Q4_K_M", "Q2_K"])
def test_an_answer_is_the_same_alone_and_in_company(mix: str, folders: GgufFolders) -> None:
    folder, dequantized_folder = folders.written("llama", mix)
    prompts = prompts_of([3, 17, 31, 40])
    engine = make_engine(folder)
    together = engine_answers(engine, prompts, 12)
    assert [engine_answers(engine, [prompt], 12)[0] for prompt in prompts] == together
    assert together == engine_answers(make_engine(dequantized_folder), prompts, 12)


@pytest.mark.parametrize("mix", MIXES)
def test_weights_take_the_bytes_that_were_planned(mix: str, folders: GgufFolders) -> None:
    folder, _ = folders.written("llama", mix)
    config = load_model_config(folder)
    packed = load_model(config, folder, torch.float32, CPU)
    assert packed.weight_bytes == expected_weights(config, torch.float32).num_bytes
    dequantized_once = load_model(config, folder, torch.float32, CPU, copy_budget_bytes=1 << 30)
    assert dequantized_once.weight_bytes > packed.weight_bytes


def test_llama_3s_rotary_factors_are_those_of_the_file(tmp_path: Path) -> None:
    """llama.cpp keeps them as a tensor and no field."""
    scaled = RopeConfig(theta=10000.0, type="llama3", **LLAMA3_ROPE)  # type: ignore[arg-type]
    factors = inverse_frequencies(RopeConfig(theta=10000.0), 128) / inverse_frequencies(scaled, 128)
    family = dense("llama", **SIZES, rope_parameters=rope("llama3", **LLAMA3_ROPE))
    write_family(tmp_path / "plain", **family)
    folder = tmp_path / "packed"
    expected = write_gguf(
        tmp_path / "plain", folder / "model.gguf", lambda module: "Q8_0", tensors={"rope_freqs.weight": factors.numpy()}
    )
    [prompt] = prompts_of([29])
    torch.testing.assert_close(
        model_logits(folder, prompt, 13), model_logits(expected, prompt, 13), rtol=1e-4, atol=1e-4
    )


def test_a_scale_that_is_not_finite_is_refused(folders: GgufFolders, tmp_path: Path) -> None:
    folder, _ = folders.written("llama", "Q4_K_M")
    data = bytearray((folder / "model.gguf").read_bytes())
    tensor = next(one for one in gguf.GGUFReader(folder / "model.gguf").tensors if one.name == "blk.1.ffn_up.weight")
    data[tensor.data_offset : tensor.data_offset + 2] = np.float16("nan").tobytes()
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(RuntimeFailure, match=r"mlp\.up_proj\.weight \(Q4_K\) holds NaN") as refused:
        load_model(load_model_config(tmp_path), tmp_path, torch.float32, CPU)
    assert refused.value.reason is FailureReason.CHECKPOINT_INVALID


@pytest.mark.deep
def test_the_demo_model_answers_from_its_gguf_file_as_from_its_folder(tmp_path: Path) -> None:
    """The file alone: sizes, vocabulary and weights. In float32, as the file is computed: on a CPU that multiplies
    bfloat16 numbers the folder is computed so."""
    convert(DEMO, tmp_path / "demo.gguf", "F32")
    answers = []
    for folder in (DEMO, tmp_path):
        tokenizer = Tokenizer.from_folder(folder)
        ids = tokenizer.encode("<|im_start|>user\nWhat is a KV cache?<|im_end|>\n<|im_start|>assistant\n")
        [answer] = engine_answers(make_engine(folder, kv_cache_memory_bytes=16 << 20, dtype=DType.FLOAT32), [ids], 24)
        answers.append(tokenizer.decode(answer))
    assert answers[0] == answers[1]
    assert len(answers[0].split()) > 5
