"""The engine's one promise: greedy tokens equal transformers', alone, in any batch, chunked or preempted."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from millstream_runtime.config import DType
from tests.support.engines import MakeEngine, WriteModel, generate, greedy, requests_for
from tests.support.small_pool import shrink_pool

NEW_TOKENS = 24
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SHAPES: dict[str, dict[str, Any]] = {
    "gqa-2": {},
    "gqa-3-tied": {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True},
    "one-kv-head": {"num_key_value_heads": 1},
    "no-gqa": {"num_key_value_heads": 4},
    "head-80": {"head_dim": 80},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "llama3-rope": {"rope_parameters": LLAMA3_ROPE},
}


def prompts_of(vocab_size: int, lengths: list[int], seed: int = 3) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def reference_answers(folder: Path, prompts: list[list[int]], new_tokens: int = NEW_TOKENS) -> list[list[int]]:
    """transformers, one prompt at a time, float32."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = []
    for prompt in prompts:
        ids = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        answers.append(ids[0, len(prompt) :].tolist())
    return answers


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_equals_transformers_in_a_batch_and_chunked(
    shape: str, write_model: WriteModel, make_engine: MakeEngine
) -> None:
    folder = write_model(**SHAPES[shape])
    prompts = prompts_of(199, [1, 5, 16, 17, 40, 97])
    expected = reference_answers(folder, prompts)
    batched = generate(make_engine(folder), requests_for(prompts, greedy(NEW_TOKENS)))
    assert list(batched.values()) == expected
    chunked = generate(make_engine(folder, max_num_batched_tokens=19), requests_for(prompts, greedy(NEW_TOKENS)))
    assert list(chunked.values()) == expected


def test_alone_in_any_batch_and_joining_late_give_the_same_tokens(
    write_model: WriteModel, make_engine: MakeEngine
) -> None:
    folder = write_model()
    prompts = prompts_of(199, [3, 30, 61, 12])
    expected = reference_answers(folder, prompts)
    engine = make_engine(folder)
    alone = [generate(engine, requests_for([prompt], greedy(NEW_TOKENS)))["0"] for prompt in prompts]
    assert alone == expected
    answers: dict[str, list[int]] = {str(index): [] for index in range(4)}
    waiting = requests_for(prompts, greedy(NEW_TOKENS))
    steps = 0
    while waiting or engine.has_work():
        if waiting and steps % 5 == 0:  # a request joins every fifth step, and leaves as it ends
            engine.add_request(waiting.pop())
        for output in engine.step():
            assert output.token_id is not None
            answers[output.request_id].append(output.token_id)
        steps += 1
    assert list(answers.values()) == expected


def test_preemption_changes_no_token(write_model: WriteModel, make_engine: MakeEngine) -> None:
    folder = write_model(max_position_embeddings=128)
    prompts = prompts_of(199, [20, 25, 30, 35, 40, 45])
    expected = reference_answers(folder, prompts, new_tokens=60)
    block_bytes = 2 * 2 * 2 * 12 * 4 * 16  # K and V, layers, KV heads, head size, float32, tokens
    # 8-token blocks would be 192 bytes a token; the smallest pool a config allows is 1 MiB, so shrink it by hand.
    engine = make_engine(folder, max_num_seqs=6)
    shrink_pool(engine, num_blocks=14)
    answers = generate(engine, requests_for(prompts, greedy(60)))
    stats = engine.stats()
    assert stats.num_preemptions_total > 0
    assert sum(stats.ended_by_preemptions.values()) == 6
    assert sum(times * count for times, count in stats.ended_by_preemptions.items()) == stats.num_preemptions_total
    assert engine.stats().kv_blocks_total * block_bytes < 1 << 20
    assert list(answers.values()) == expected


def test_scattered_blocks_change_no_token(write_model: WriteModel, make_engine: MakeEngine) -> None:
    """Sequences that outgrow their regions, as rows have them on a GPU; prompts long enough to need both."""
    folder = write_model()
    prompts = prompts_of(199, [70, 9, 80, 33])
    expected = reference_answers(folder, prompts)
    engine = make_engine(folder, max_num_seqs=8, max_num_batched_tokens=32)
    shrink_pool(engine, num_blocks=32)  # regions of 4 blocks = 64 tokens
    for request in requests_for(prompts, greedy(NEW_TOKENS)):
        engine.add_request(request)
    answers: dict[str, list[int]] = {str(index): [] for index in range(4)}
    scattered = False
    while engine.has_work():
        for output in engine.step():
            assert output.token_id is not None
            answers[output.request_id].append(output.token_id)
        scattered |= any(not one.blocks_are_contiguous for one in engine._scheduler.running)
    assert scattered, "this test must meet a block table that is not contiguous"
    assert list(answers.values()) == expected


def test_a_sharded_bf16_checkpoint_with_the_older_config_keys(
    tmp_path: Path, write_model: WriteModel, make_engine: MakeEngine
) -> None:
    import json

    folder = write_model(rope_parameters=LLAMA3_ROPE)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    fields = json.loads((tmp_path / "config.json").read_text())
    rope = fields.pop("rope_parameters")
    fields["rope_theta"] = rope.pop("rope_theta")
    fields["rope_scaling"] = rope
    fields["torch_dtype"] = fields.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(fields))
    prompts = prompts_of(199, [11, 50])
    # Exact numbers: `auto` rounds products of a bfloat16 checkpoint where the CPU multiplies such numbers.
    answers = generate(make_engine(tmp_path, dtype=DType.FLOAT32), requests_for(prompts, greedy(NEW_TOKENS)))
    assert list(answers.values()) == reference_answers(tmp_path, prompts)


def test_the_demo_model_answers_as_in_transformers(make_engine: MakeEngine) -> None:
    folder = Path(__file__).parents[3] / "models" / "demo-chat"
    if not (folder / "config.json").exists():
        pytest.skip("models/demo-chat is not in this checkout")
    prompts = prompts_of(2048, [7, 31, 90])
    # `auto` rounds products of its bfloat16 checkpoint where the CPU multiplies such numbers.
    engine = make_engine(folder, max_model_len=512, kv_cache_memory_bytes=64 << 20, dtype=DType.FLOAT32)
    answers = generate(engine, requests_for(prompts, greedy(48)))
    assert list(answers.values()) == reference_answers(folder, prompts, new_tokens=48)


def test_damaged_weights_are_refused(tmp_path: Path, write_model: WriteModel, make_engine: MakeEngine) -> None:
    from millstream_runtime.errors import RuntimeFailure

    source = write_model()
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 4] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeFailure, match=r"layers\.1\.mlp\.down_proj"):
        make_engine(tmp_path)
