"""Tiny random models of any family, written by transformers; what transformers and this runtime compute with them."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from millstream_runtime.config import Device, RuntimeConfig
from millstream_runtime.engine.attention.attention_chunk import AttentionChunk
from millstream_runtime.engine.attention.paged_attention import TorchAttention
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.kv.kv_cache import KVCache
from millstream_runtime.engine.request import Request, SamplingParams
from millstream_runtime.models.config.model_config import ModelConfig
from millstream_runtime.models.layers.decoder import Decoder
from millstream_runtime.models.linear.shares import rank_config
from millstream_runtime.models.linear.tensor_parallel import SINGLE_PROCESS, Ranks
from millstream_runtime.models.registry import load_model, load_model_config
from tests.support.engines import measure_evenly

VOCABULARY = 97
BLOCK_SIZE_TOKENS = 16
DECISION_MARGIN = 1e-3  # between the two best logits; far above float32's noise, or a test would be about ties


def write_family(folder: Path, *, seed: int = 0, **fields: Any) -> Any:
    """A sharded checkpoint of `fields["model_type"]` and its transformers model, with every parameter random.

    Norms and biases too: as zeros and ones, which transformers starts them with, they could be ignored unnoticed.
    """
    torch.manual_seed(seed)
    shape = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0} | fields
    config = CONFIG_MAPPING[shape.pop("model_type")](**shape, initializer_range=0.2)
    # "eager": SDPA would drop Gemma 2's soft cap, and the grouped product of experts knows no float64.
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager").eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.dim() == 1 and "inv_freq" not in name:
                tensor.add_(torch.randn_like(tensor) * 0.2)
    model.save_pretrained(folder, max_shard_size="40KB")
    return model


def with_fields(folder: Path, copy: Path, **fields: Any) -> Path:
    """A copy of a model folder with some fields of config.json changed."""
    shutil.copytree(folder, copy)
    path = copy / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return copy


def prompts_of(lengths: Sequence[int], seed: int = 5) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCABULARY) for _ in range(length)] for length in lengths]


def reference_answers(model: Any, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """transformers' own `generate`, greedy, one prompt at a time; every choice must be a clear one."""
    answers = []
    for prompt in prompts:
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.stack(out.logits).topk(2, dim=-1).values
        margin = (best[..., 0] - best[..., 1]).min()
        assert margin > DECISION_MARGIN, f"a tie within {margin:.1e} decides this answer; choose another seed"
        answers.append(out.sequences[0, len(prompt) :].tolist())
    return answers


def engine_answers(
    engine: Engine, prompts: list[list[int]], new_tokens: int, sampling: SamplingParams | None = None
) -> list[list[int]]:
    """All prompts at once, greedy by default; every block must be back afterwards."""
    sampling = sampling or SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    answers: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    for index, prompt in enumerate(prompts):
        engine.add_request(Request(str(index), prompt, sampling))
    while engine.has_work():
        for output in engine.step():
            assert output.token_id is not None
            answers[output.request_id].append(output.token_id)
    engine.check_integrity()
    assert engine.stats().kv_blocks_used == 0
    return list(answers.values())


def make_engine(folder: Path, **config: Any) -> Engine:
    settings = {"max_num_seqs": 4, "kv_cache_memory_bytes": 2 << 20} | config
    runtime_config = RuntimeConfig(model=str(folder), served_model_name="tiny", device=Device.CPU, **settings)
    engine = Engine(runtime_config, lambda phase, message: None)
    measure_evenly(engine)
    return engine


@torch.inference_mode()
def reference_logits(model: Any, prompt: list[int], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """transformers' logits of all positions. Only parameters are cast; angles stay float32, as by `from_pretrained`."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    logits: torch.Tensor = model(torch.tensor([prompt])).logits[0]
    return logits


@torch.inference_mode()
def model_logits(
    folder: Path,
    prompt: list[int],
    chunk_tokens: int,
    dtype: torch.dtype = torch.float64,
    ranks: Ranks = SINGLE_PROCESS,
) -> torch.Tensor:
    """This runtime's logits of every position, the prompt computed in chunks over a paged cache.

    With `ranks` its share of the work; the logits are rank 0's.
    """
    config = load_model_config(folder)
    model = load_model(config, folder, dtype, torch.device("cpu"), ranks)
    return logits_of(model, rank_config(config, ranks), prompt, chunk_tokens, dtype)


@torch.inference_mode()
def logits_of(
    model: Decoder, config: ModelConfig, prompt: list[int], chunk_tokens: int, dtype: torch.dtype
) -> torch.Tensor:
    """The logits of every position by a model that is loaded. `config`: of this rank."""
    num_blocks = -(-len(prompt) // BLOCK_SIZE_TOKENS)
    cache = KVCache(config, num_blocks, BLOCK_SIZE_TOKENS, dtype, torch.device("cpu"))
    offset = config.rotary_offset(len(prompt))
    logits = []
    for start in range(0, len(prompt), chunk_tokens):
        stop = min(start + chunk_tokens, len(prompt))
        positions = torch.arange(start, stop)
        chunk = AttentionChunk(stop - start, stop, range(num_blocks), is_contiguous=True)
        attention = TorchAttention(cache, positions, [chunk])
        logits.append(model.logits(model.forward(torch.tensor(prompt[start:stop]), positions + offset, attention)))
    return torch.cat(logits)


@torch.inference_mode()
def greedy_in_company(
    folder: Path, prompts: list[list[int]], new_tokens: int, ranks: Ranks = SINGLE_PROCESS
) -> torch.Tensor:
    """Greedy answers `[prompts, new_tokens]`, all prompts in each step, in float32 with packed weights; of rank 0."""
    dtype, device = torch.float32, torch.device("cpu")
    config = load_model_config(folder)
    model = load_model(config, folder, dtype, device, ranks)
    num_blocks = -(-(max(map(len, prompts)) + new_tokens) // BLOCK_SIZE_TOKENS)
    cache = KVCache(rank_config(config, ranks), num_blocks * len(prompts), BLOCK_SIZE_TOKENS, dtype, device)
    known, given = [list(one) for one in prompts], [list(one) for one in prompts]
    answers = torch.zeros(len(prompts), new_tokens, dtype=torch.long)
    for number in range(new_tokens):
        positions = [torch.arange(len(ids) - len(new), len(ids)) for ids, new in zip(known, given, strict=True)]
        slots = [one + place * num_blocks * BLOCK_SIZE_TOKENS for place, one in enumerate(positions)]
        chunks = [
            AttentionChunk(len(new), len(ids), range(place * num_blocks, (place + 1) * num_blocks), is_contiguous=True)
            for place, (ids, new) in enumerate(zip(known, given, strict=True))
        ]
        tokens = torch.tensor([token for new in given for token in new])
        residual = model.forward(tokens, torch.cat(positions), TorchAttention(cache, torch.cat(slots), chunks))
        logits = model.logits(residual[torch.tensor([len(new) for new in given]).cumsum(0) - 1])
        if ranks.rank == 0:
            answers[:, number] = logits.argmax(1)
        ranks.broadcast(answers)
        given = answers[:, number : number + 1].tolist()
        known = [ids + new for ids, new in zip(known, given, strict=True)]
    return answers
