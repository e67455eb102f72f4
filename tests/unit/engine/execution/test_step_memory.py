"""What the arithmetic says of the largest step, against what torch allocates for it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch

from millstream_kernels.cpu import decode
from millstream_kernels.cpu.decode import load
from millstream_runtime.config import KVCacheDType, RuntimeConfig
from millstream_runtime.engine.attention.attention_chunk import AttentionChunk
from millstream_runtime.engine.attention.compiled_decodes import CompiledDecodes
from millstream_runtime.engine.attention.compiled_prompts import CompiledPrompts
from millstream_runtime.engine.attention.scaled_dot_product import SCORES_LIMIT_BYTES
from millstream_runtime.engine.cpu.policy import CpuPolicy
from millstream_runtime.engine.execution import shard, step_memory
from millstream_runtime.engine.execution.forward import Forward
from millstream_runtime.engine.execution.step_input import ChunkInput, StepInput
from millstream_runtime.engine.kv.kv_cache import KVCache
from millstream_runtime.engine.request import Request, SamplingParams
from millstream_runtime.models.layers.attention import AttentionSpec
from millstream_runtime.models.registry import load_model, load_model_config
from tests.support.allocated_memory import peak_bytes
from tests.support.engines import MakeEngine, WriteModel
from tests.support.family_cases import CASES
from tests.support.tiny_families import write_family

NUM_TOKENS, LONGEST = 512, 1024
CPU = torch.device("cpu")
SHAPE = {"hidden_size": 96, "intermediate_size": 256, "max_position_embeddings": LONGEST, "vocab_size": 90}


@pytest.mark.parametrize(
    ("family", "stored"),
    [
        *((family, KVCacheDType.AUTO) for family in ("llama", "gemma2", "mistral", "mixtral", "deepseek-v3")),
        *((family, one) for family in ("llama", "deepseek-v3") for one in (KVCacheDType.INT8, KVCacheDType.FP8)),
    ],
)
@torch.inference_mode()
def test_a_step_takes_what_was_counted(family: str, stored: KVCacheDType, tmp_path: Path) -> None:
    """A prompt behind a long context in scattered blocks. All blocks of the table are one: the pool is not measured."""
    write_family(tmp_path, **CASES[family].config | SHAPE)
    config = replace(load_model_config(tmp_path), max_model_len=LONGEST)
    model = load_model(config, tmp_path, torch.float32, CPU)
    forward = Forward(model, KVCache(config, 2, 16, torch.float32, CPU, stored=stored), CpuPolicy())

    def compute(num_read_rows: int | None = None) -> None:
        table = [0] * (LONGEST // 16)
        chunk = ChunkInput(NUM_TOKENS, LONGEST, 0, 0, len(table), table, num_read_rows=num_read_rows)
        residual = forward.residual(StepInput([3] * NUM_TOKENS, [chunk], []))
        forward.logits(residual, range(min(8, len(residual))))

    compute()  # what is kept from step to step
    measured = peak_bytes(compute)
    of_few_rows, of_nearly_all = (peak_bytes(partial(compute, rows)) for rows in (1, NUM_TOKENS - 8))
    rows, elements = config.kv_shape
    plain_bytes, attention_bytes = (
        step_memory.attention_bytes(config, 4, longest_tokens=LONGEST, num_rows=1, kv_method=method)
        for method in ("None", stored.method)
    )
    copy_bytes = LONGEST * rows * elements * 4 + attention_bytes - plain_bytes
    scores_bytes = 0 if config.has_plain_attention or config.longest_window else SCORES_LIMIT_BYTES
    counted = step_memory.activations_bytes(config, 4, num_tokens=NUM_TOKENS, num_rows=8)
    assert max(measured, of_few_rows, of_nearly_all) <= counted + copy_bytes + scores_bytes
    assert counted <= 4 * measured
    assert copy_bytes + scores_bytes <= attention_bytes


@pytest.mark.parametrize(("num_rows", "prompt_tokens", "prompt_logprobs"), [(48, 1, None), (8, 100, 5)])
def test_sampling_takes_what_was_counted(
    num_rows: int, prompt_tokens: int, prompt_logprobs: int | None, write_model: WriteModel, make_engine: MakeEngine
) -> None:
    """A large vocabulary, next to which everything else is small: rows that are drawn, biased, greedy and described."""
    engine = make_engine(write_model(vocab_size=20_000), max_num_batched_tokens=900, max_num_seqs=num_rows)
    drawn = SamplingParams(1, top_p=0.9, logprobs=20, prompt_logprobs=prompt_logprobs)
    others = [replace(drawn, top_p=1.0, logprobs=None), replace(drawn, temperature=0.0, logit_bias=((1, 1.0),))]
    kinds = [replace(drawn, temperature=0.0, logprobs=None), *others, *([drawn] * (num_rows - 3))]

    def compute() -> None:
        for index, sampling in enumerate(kinds):
            engine.add_request(Request(str(index), [index] * prompt_tokens, sampling))
        while engine.has_work():
            engine.step()

    compute()
    measured = peak_bytes(compute)
    counted = step_memory.activations_bytes(engine.model_config, 4, num_tokens=900, num_rows=num_rows)
    assert measured <= counted
    assert counted <= 2 * measured


@torch.inference_mode()
def test_the_measured_step_is_the_largest_at_the_longest_context(tmp_path: Path) -> None:
    """What a GPU computes at its boot: the budget of tokens, behind a context that the pool need not hold."""
    longest = 8 * LONGEST
    write_family(tmp_path, **CASES["llama"].config | SHAPE | {"max_position_embeddings": longest})
    model_config = load_model_config(tmp_path)
    config = RuntimeConfig(model=str(tmp_path), served_model_name="test", max_num_batched_tokens=64, max_num_seqs=8)
    model, policy = load_model(model_config, tmp_path, torch.float32, CPU), CpuPolicy()
    policy.compiled_code = None  # a GPU has none, and torch's copies grow with the context
    forward = Forward(model, KVCache(model_config, 1, 16, torch.float32, CPU), policy)
    rows, elements = model_config.kv_shape

    def allocated(max_model_len: int, num_tokens: int) -> int:
        step = replace(config, max_num_batched_tokens=num_tokens)
        return peak_bytes(lambda: shard.compute_largest_step(step, max_model_len, forward))

    more_context_bytes = (longest - LONGEST) * rows * elements * 4
    assert allocated(longest, 64) - allocated(LONGEST, 64) > more_context_bytes // 2, "the context counts"
    assert allocated(LONGEST, 3000) > 10 * allocated(LONGEST, 64), "and the tokens do, of several prompts where needed"
    residual = forward.residual(StepInput([3], [ChunkInput(1, 1, 0, 0, 1)], []))
    assert residual.isfinite().all()


@torch.inference_mode()
def test_the_measured_step_ends_with_its_sampling(tmp_path: Path) -> None:
    """It takes rows of float32 beside the logits, and more of them with more requests."""
    vocab_size = 20_000
    write_family(tmp_path, **CASES["llama"].config | SHAPE | {"vocab_size": vocab_size})
    model_config = load_model_config(tmp_path)
    model = load_model(model_config, tmp_path, torch.float32, CPU)
    forward = Forward(model, KVCache(model_config, 1, 16, torch.float32, CPU), CpuPolicy())

    def allocated(num_rows: int) -> int:
        config = RuntimeConfig(
            model=str(tmp_path), served_model_name="test", max_num_batched_tokens=64, max_num_seqs=num_rows
        )
        return peak_bytes(lambda: shard.compute_largest_step(config, LONGEST, forward))

    logits_bytes = (64 - 8) * vocab_size * 4
    assert allocated(64) - allocated(8) > 1.9 * logits_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_what_threads_of_the_compiled_prompts_keep_is_counted(dtype: torch.dtype, tmp_path: Path) -> None:
    """Once, however many kinds of layers a step has."""
    write_family(tmp_path, **CASES["gemma3"].config | SHAPE)
    config = replace(load_model_config(tmp_path), max_model_len=LONGEST)
    cache = KVCache(config, LONGEST // 16, 16, dtype, CPU)
    chunk = AttentionChunk(NUM_TOKENS, NUM_TOKENS, range(NUM_TOKENS // 16), True)
    prompts = CompiledPrompts(load(), cache, [chunk], 0)
    heads, elements = config.kv_shape[0] // 2, config.kv_shape[1]
    query = torch.zeros(NUM_TOKENS, heads, config.num_heads // heads, elements, dtype=dtype)

    def compute() -> None:
        for spec in (AttentionSpec(1.0), AttentionSpec(1.0, window=16), AttentionSpec(1.0, softcap=2.0)):
            prompts(cache.layer(0), query, spec)

    compute()
    measured = peak_bytes(compute)
    scratch_bytes = step_memory.prompt_bytes(config, dtype.itemsize)
    in_float32 = 2 * query.numel() * 4 + (query.numel() * 2 if dtype is torch.bfloat16 else 0)
    assert scratch_bytes < measured <= scratch_bytes + in_float32 + 1024
    counted = step_memory.attention_bytes(config, dtype.itemsize, longest_tokens=1, num_rows=1)
    assert scratch_bytes <= counted


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek-v3"])
@torch.inference_mode()
def test_decodes_of_the_compiled_kernel_take_what_was_counted(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores of all heads that share a key, per thread: with a latent key those of all heads. Once, though a step has
    plans of several groups of layers, and one of the rows that the last layer computes."""
    write_family(tmp_path, **CASES[family].config | SHAPE)
    config = replace(load_model_config(tmp_path), max_model_len=LONGEST)
    cache = KVCache(config, LONGEST // 16, 16, torch.float32, CPU)
    rows, elements = config.kv_shape
    heads = max(1, rows // 2)
    decodes = [AttentionChunk(1, LONGEST, range(LONGEST // 16), True)] * torch.get_num_threads()
    query = torch.zeros(len(decodes), heads, config.num_heads // heads, elements)
    latent_dim = elements - 1 if rows == 1 else None

    def compute() -> None:
        plans = [CompiledDecodes(load(), cache, decodes, 0) for _ in range(3)]
        for plan, window in product(plans, {*(config.windows or (None,))}):
            plan(cache.layer(0), query, AttentionSpec(1.0, window=window, latent_dim=latent_dim))

    compute()
    monkeypatch.setattr(decode, "_SCRATCH", decode._Scratch())  # none is left of the calls before
    scratch_bytes = step_memory.decode_bytes(config, LONGEST)
    assert scratch_bytes // 2 < peak_bytes(compute) <= scratch_bytes + 2 * query.numel() * 4 + 4096
    assert scratch_bytes <= step_memory.attention_bytes(config, 4, longest_tokens=LONGEST, num_rows=1)
