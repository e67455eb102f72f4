"""A draft model beside its target: what it has computed is right whatever happens to the blocks, and it harms nobody.

A model that drafts for itself proposes the tokens that come, if and only if all its keys are right. So its acceptance
shows what prefix hits, preemptions, chunks, windows and evictions do to its pool.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from millstream_runtime.config import KVCacheDType
from millstream_runtime.engine import warm_up
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.request import Request, SamplingParams
from millstream_runtime.engine.scheduling.sequence import Sequence
from millstream_runtime.engine.speculation import catching_up
from millstream_runtime.engine.speculation.governor import Governor
from millstream_runtime.models.layers.attention import Attention, ReadRows
from tests.support.draft_pool import draft_model_of, wrong_draft_blocks
from tests.support.drafting_engines import MakeDrafting, counts, skipped
from tests.support.embedding import embedding_weight
from tests.support.engines import MakeEngine, WriteModel, generate, greedy
from tests.support.family_cases import CASES, LONGROPE, dense, rope
from tests.support.small_pool import shrink_pool
from tests.support.tiny_families import write_family
from tests.support.word_tokenizer import write_tokenizer

pytestmark = [pytest.mark.usefixtures("one_thread", "drafts_catch_up_by_fixed_chunks"), pytest.mark.deep]
VOCABULARY = 199


def prompts(lengths: tuple[int, ...], seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCABULARY) for _ in range(length)] for length in lengths]


def requests(lengths: tuple[int, ...], sampling: SamplingParams, name: str = "r") -> list[Request]:
    return [Request(f"{name}{index}", one, sampling) for index, one in enumerate(prompts(lengths))]


def all_stood(engine: Engine) -> bool:
    found = counts(engine)
    return 0 < found.num_draft_tokens == found.num_accepted_tokens


def test_a_model_knows_its_own_tokens(write_model: WriteModel, drafted: MakeDrafting, make_engine: MakeEngine) -> None:
    asked = requests((21, 1, 40), greedy(24))
    engine = drafted(write_model())
    assert generate(engine, asked) == generate(make_engine(write_model()), asked)
    assert all_stood(engine)
    assert counts(engine).accepted_per_position[4] > 0, "five tokens by default"
    assert set(skipped(engine)) <= {"at_limit"}
    wrong, num_compared = wrong_draft_blocks(engine)
    assert (wrong, num_compared) == ([], 2 + 1 + 3), "all full blocks of prompts and answers, but the last tokens"


def test_a_prefix_is_read_once_by_both(write_model: WriteModel, drafted: MakeDrafting) -> None:
    """The next turn finds the keys of the target in the prefix cache, and those of the draft model with them."""
    engine = drafted(write_model(), max_draft_tokens=4)
    (prompt,) = prompts((70,))
    answer = generate(engine, [Request("0", prompt, greedy(30))])["0"]
    read = draft_model_of(engine)._catching_up
    seen: list[int] = []
    read.observe = lambda num_tokens, seconds: seen.append(num_tokens)  # type: ignore[method-assign]
    generate(engine, [Request("1", [*prompt, *answer, 5, 6], greedy(12))])
    assert engine.stats().prefix_cache_hit_tokens_total == 96
    assert max(seen) <= 102 - 96 + 1, "the draft model reads what the cache did not know, and the first new token"
    assert all_stood(engine)


def test_a_prefix_that_was_cached_without_drafts_is_read_by_the_draft_model(
    write_model: WriteModel, drafted: MakeDrafting
) -> None:
    engine = drafted(write_model())
    (prompt,) = prompts((50,))
    assert engine._drafting is not None
    engine._drafting._steps_to_wait = 9  # as after a step without memory
    generate(engine, [Request("0", prompt, greedy(10))])
    assert skipped(engine) == {"out_of_memory": 9}
    assert draft_model_of(engine)._keys._hash_of == {}
    generate(engine, [Request("1", [*prompt, 3], greedy(20))])
    assert engine.stats().prefix_cache_hit_tokens_total == 48
    assert all_stood(engine)
    assert wrong_draft_blocks(engine) == ([], 4)


def test_a_long_prompt_is_read_in_chunks(
    write_model: WriteModel, drafted: MakeDrafting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catching_up, "FIRST_TOKENS", 32)
    engine = drafted(write_model())
    draft_model_of(engine)._catching_up.observe = lambda num_tokens, seconds: None  # type: ignore[method-assign]
    generate(engine, requests((100,), greedy(20)))
    assert skipped(engine)["catching_up"] == 3, "100 tokens take four chunks, and the last of them has a draft"
    assert all_stood(engine)


def test_what_ends_soon_is_not_read(
    write_model: WriteModel, drafted: MakeDrafting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catching_up, "FIRST_TOKENS", 64)
    engine = drafted(write_model(max_position_embeddings=1024), kv_cache_memory_bytes=4 << 20)
    generate(engine, requests((900,), greedy(4)))
    assert skipped(engine) == {"catching_up": 2, "at_limit": 1}
    assert draft_model_of(engine)._keys._hash_of == {}


def test_preemptions_and_evictions_leave_no_wrong_key(write_model: WriteModel, drafted: MakeDrafting) -> None:
    """A pool that is short for its requests, with a cache whose blocks go from one to the other."""
    engine = drafted(write_model())
    shrink_pool(engine, 17, enable_prefix_caching=True)
    asked = requests((30, 61, 45, 12, 77, 30), greedy(30))
    for turn in range(3):
        generate(engine, [replace(one, request_id=f"{turn}{one.request_id}") for one in asked])
        assert wrong_draft_blocks(engine)[0] == []
    assert engine.stats().num_preemptions_total > 0
    assert engine.stats().prefix_cache_hit_tokens_total > 0
    assert all_stood(engine)


@pytest.mark.parametrize("window", [11, 24])
def test_behind_a_window_the_draft_model_sees_what_the_target_keeps(
    window: int, tmp_path: Path, drafted: MakeDrafting
) -> None:
    """Blocks that it has passed are another request's. Of a longer prompt the draft model reads what is left."""
    write_family(tmp_path, **dense("mistral", sliding_window=window, vocab_size=VOCABULARY))
    engine = drafted(tmp_path, block_size_tokens=8)
    generate(engine, requests((3, 9), greedy(60)))
    assert all_stood(engine)
    asked = requests((3, 30, 60), greedy(50))
    for turn in range(2):
        generate(engine, [replace(one, request_id=f"{turn}{one.request_id}") for one in asked])
        wrong, num_compared = wrong_draft_blocks(engine)
        assert wrong == []
        assert num_compared > 0
    assert counts(engine).num_accepted_tokens > 0.8 * counts(engine).num_draft_tokens


def test_groups_of_layers_share_the_table_that_reads_furthest(tmp_path: Path, drafted: MakeDrafting) -> None:
    write_family(tmp_path, **CASES["gemma3"].config)
    assert len(drafted(tmp_path)._blocks.windows) == 1, "a draft model would waste the blocks of other groups"
    engine = drafted(tmp_path, enable_hybrid_kv_cache_manager=True)
    assert len(engine._blocks.windows) > 1
    generate(engine, [Request("0", [3 + index % 60 for index in range(50)], greedy(30))])
    assert all_stood(engine)
    assert wrong_draft_blocks(engine)[0] == []


@pytest.mark.parametrize("stored", [KVCacheDType.INT8, KVCacheDType.FP8])
def test_a_quantized_pool_is_quantized_for_both(
    stored: KVCacheDType, write_model: WriteModel, drafted: MakeDrafting
) -> None:
    plain, engine = drafted(write_model()).memory_use, drafted(write_model(), kv_cache_dtype=stored)
    assert plain.draft_kv_cache_bytes is not None
    use = engine.memory_use
    assert use.draft_kv_cache_bytes == use.kv_cache_bytes, "the same shape, of the same memory"
    assert use.kv_cache_tokens > 1.8 * plain.kv_cache_tokens
    generate(engine, requests((21, 40), greedy(24)))
    assert counts(engine).num_accepted_tokens > 0.8 * counts(engine).num_draft_tokens


def test_the_pools_share_the_memory(write_model: WriteModel, drafted: MakeDrafting, make_engine: MakeEngine) -> None:
    alone, small = make_engine(write_model()), write_model(num_hidden_layers=1, intermediate_size=16)
    use = drafted(write_model(), small).memory_use
    assert use.draft_weights_bytes is not None
    assert use.draft_kv_cache_bytes is not None
    assert 0 < use.draft_weights_bytes < use.weights_bytes
    assert use.draft_kv_cache_bytes * 2 == use.kv_cache_bytes, "one layer beside two"
    assert use.kv_cache_bytes + use.draft_kv_cache_bytes <= 1 << 20
    assert use.kv_cache_tokens < alone.memory_use.kv_cache_tokens
    assert "draft_weights_bytes" not in alone.memory_use.measured()


def test_a_short_context_stops_drafts_and_nothing_else(
    write_model: WriteModel, drafted: MakeDrafting, make_engine: MakeEngine
) -> None:
    short = write_model(max_position_embeddings=48)
    asked = requests((30,), greedy(60))
    engine = drafted(write_model(), short)
    assert generate(engine, asked) == generate(make_engine(write_model()), asked)
    assert counts(engine).num_draft_tokens > 0
    assert all_stood(engine)
    assert skipped(engine)["draft_context"] == 40, "every token from the 50th to the last but one"


def test_a_draft_model_stops_where_its_angles_change(tmp_path: Path, drafted: MakeDrafting) -> None:
    config = dense(
        "phi3",
        original_max_position_embeddings=20,
        rope_parameters=rope("longrope", partial_rotary_factor=0.5, **LONGROPE),
    )
    write_family(tmp_path, **config)
    engine = drafted(tmp_path)
    generate(engine, [Request("0", [2 + index for index in range(12)], greedy(16))])
    assert all_stood(engine)
    assert skipped(engine)["draft_context"] == 5, "of those behind the 20 tokens; the first is no decode"


def test_a_token_that_the_draft_model_lacks_ends_its_drafts(
    write_model: WriteModel, drafted: MakeDrafting, make_engine: MakeEngine
) -> None:
    """Embeddings may be padded to another size: such ids look up nothing."""
    large, small = write_model(vocab_size=224, pad_token_id=2), write_model(pad_token_id=2)
    for folder in (large, small):
        write_tokenizer(folder, VOCABULARY)
    asked = [
        Request("biased", [5] * 20, greedy(10, logit_bias=((210, 1e4),))),
        Request("prompted", [223, 4, 5], greedy(10)),
        Request("plain", [6, 7, 8, 9], greedy(10, logit_bias=((210, -1e4), (223, -1e4)))),
    ]
    engine = drafted(large, small)
    assert generate(engine, asked) == generate(make_engine(large), asked)
    assert skipped(engine)["draft_vocabulary"] >= 9
    assert skipped(engine).get("drafter_failed", 0) == 0
    assert counts(engine).num_draft_tokens > 0


def test_nan_ends_the_drafts_of_its_request(
    write_model: WriteModel, drafted: MakeDrafting, make_engine: MakeEngine
) -> None:
    sick, asked = 7, [Request("sick", [7, 3, 4], greedy(20)), Request("well", [5] * 20, greedy(20))]
    expected = generate(make_engine(write_model()), asked)
    assert all(sick not in answer for answer in expected.values())
    engine = drafted(write_model())
    embedding_weight(draft_model_of(engine)._forward.model)[sick] = torch.nan
    assert generate(engine, asked) == expected
    assert skipped(engine)["draft_not_finite"] == 18
    assert counts(engine).num_draft_tokens > 0
    for layer in draft_model_of(engine)._forward._cache.heads:
        assert bool(layer.isfinite().all())


@pytest.mark.parametrize("error", [ZeroDivisionError, MemoryError])
def test_a_failing_draft_model_is_no_harm(
    error: type[Exception], write_model: WriteModel, drafted: MakeDrafting, make_engine: MakeEngine
) -> None:
    """An error ends drafting; without memory it waits and goes on, with keys that are right."""
    asked = requests((21, 40), greedy(120))
    expected = generate(make_engine(write_model()), asked)
    engine = drafted(write_model())
    forward, passes = draft_model_of(engine)._forward, 0
    compute = forward.model.forward

    def fail_once(
        token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention, read: ReadRows | None = None
    ) -> torch.Tensor:
        nonlocal passes
        passes += 1
        if passes == 4:
            compute(token_ids, positions, attention, num_layers=1)
            raise error("a secret prompt")
        return compute(token_ids, positions, attention, read=read)

    forward.model.forward = fail_once  # type: ignore[method-assign, assignment]
    assert generate(engine, asked) == expected
    if error is MemoryError:
        assert skipped(engine)["out_of_memory"] > 60
        assert all_stood(engine)
        assert passes > 4
        assert wrong_draft_blocks(engine)[0] == []
    else:
        assert skipped(engine)["drafter_failed"] > 60
        assert passes == 4


def test_sampled_requests_draft_too(write_model: WriteModel, drafted: MakeDrafting, make_engine: MakeEngine) -> None:
    sampling = SamplingParams(24, temperature=0.3, top_p=0.9, seed=5, repetition_penalty=1.1, ignore_eos=True)
    engine, asked = drafted(write_model()), requests((21, 1, 40), sampling)
    assert generate(engine, asked) == generate(make_engine(write_model()), asked)
    assert counts(engine).num_accepted_tokens > 0


def test_cancelled_requests_leave_no_progress(write_model: WriteModel, drafted: MakeDrafting) -> None:
    engine = drafted(write_model())
    for one in requests((21, 30), greedy(40)):
        engine.add_request(one)
    for _ in range(4):
        engine.step()
    keys = draft_model_of(engine)._keys
    assert len(keys._progress) == 2
    for name in ("r0", "r1"):
        engine.abort(name)
    engine.step()
    engine.check_integrity()
    assert keys._progress == {}
    assert engine.stats().kv_blocks_used == 0


def test_the_warm_up_drafts_with_every_number_of_drafts(
    write_model: WriteModel, drafted: MakeDrafting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_up, "MOST_DRAFTS_SECONDS", 1e9)  # however long a busy machine takes
    engine = drafted(write_model(), max_draft_tokens=3)
    seen: list[int] = []
    assert engine._drafting is not None
    count = engine._drafting.count

    def see(sequence: Sequence, drafts: Seq[int], num_accepted: int) -> None:
        seen.append(len(drafts))
        count(sequence, drafts, num_accepted)

    engine._drafting.count = see  # type: ignore[method-assign]
    engine.warm_up()
    assert {1, 2, 3} <= set(seen)
    governor = engine._drafting.lengths.governor
    assert isinstance(governor, Governor)
    assert all(governor._bucket(1).costs.is_timed(length) for length in range(4))
    assert all(governor._bucket(4).costs.is_timed(length) for length in (0, 1, 3)), "with the time of drafting"
    assert (counts(engine).num_draft_tokens, skipped(engine)) == (0, {}), "no user's"
    seen.clear()
    generate(engine, [Request("heartbeat", [1, 2, 3], greedy(8), is_heartbeat=True)])
    assert seen == [], "heartbeats of an idle engine are as short as they were"
