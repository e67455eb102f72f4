"""An EAGLE head drafts what its definition says, whatever happens to blocks, and changes no token.

What is proposed is compared with transformers' layers, which read each sequence from its beginning. So a wrong hidden
state, key or position shows, wherever it comes from: prefix hits, preemptions, chunks, drafts that fell.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from millstream_runtime.config import GovernorMode, KVCacheDType
from millstream_runtime.engine import warm_up
from millstream_runtime.engine.request import Request
from millstream_runtime.engine.speculation import catching_up
from tests.support.drafting_engines import MakeDrafting, counts, requests_of, skipped
from tests.support.eagle_heads import (
    EagleReference,
    WriteHead,
    eagle_drafter_of,
    head_config,
    save_head,
    to_speculators,
    watch_drafts,
)
from tests.support.engines import MakeEngine, WriteModel, generate, greedy
from tests.support.family_cases import CASES, LONGROPE, dense, rope
from tests.support.small_pool import shrink_pool
from tests.support.tiny_families import write_family

pytestmark = [pytest.mark.usefixtures("one_thread", "drafts_catch_up_by_fixed_chunks"), pytest.mark.deep]


def knowing_pair(tmp_path: Path, write_model: WriteModel) -> tuple[Path, Path]:
    """A model whose next token follows from the last alone, and a head that knows the rule: all its drafts stand."""
    source, target, head = write_model(), tmp_path / "target", tmp_path / "head"
    target.mkdir()
    head.mkdir()
    tensors = load_file(source / "model.safetensors")
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = torch.zeros_like(tensors[name])
    save_head(target, {**_config(source)}, tensors)
    size = _config(source)["hidden_size"]
    shape = head_config(source)
    layer = {
        "self_attn.q_proj": (size, size),
        "self_attn.k_proj": (size // 2, size),
        "self_attn.v_proj": (size // 2, size),
        "self_attn.o_proj": (size, size),
        "mlp.gate_proj": (shape["intermediate_size"], size),
        "mlp.up_proj": (shape["intermediate_size"], size),
        "mlp.down_proj": (size, shape["intermediate_size"]),
    }
    known = {f"layers.0.{name}.weight": torch.zeros(sizes) for name, sizes in layer.items()}
    known["layers.0.post_attention_layernorm.weight"] = torch.ones(size)
    known["fc.weight"] = torch.cat((torch.eye(size), torch.zeros(size, size)), dim=1)
    save_head(head, shape, known)
    return target, head


def _config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_head_drafts_what_transformers_layers_do(
    num_layers: int, write_model: WriteModel, write_head: WriteHead, eagle_headed: MakeDrafting, make_engine: MakeEngine
) -> None:
    folder = write_model()
    head = write_head(folder, num_hidden_layers=num_layers)
    asked = requests_of((21, 1, 40), greedy(24))
    engine = eagle_headed(folder, head)
    wrong = watch_drafts(engine, EagleReference(folder, head))
    assert generate(engine, asked) == generate(make_engine(folder), asked)
    assert wrong == []
    assert counts(engine).num_draft_tokens > 60
    assert set(skipped(engine)) <= {"at_limit"}


def test_drafts_that_stand_are_read_with_the_targets_states(
    tmp_path: Path, write_model: WriteModel, eagle_headed: MakeDrafting, make_engine: MakeEngine
) -> None:
    """A head that knows its target: five drafts at a time stand, and the next ones are right again."""
    folder, head = knowing_pair(tmp_path, write_model)
    asked = requests_of((21, 1, 40), greedy(30))
    engine = eagle_headed(folder, head)
    wrong = watch_drafts(engine, EagleReference(folder, head))
    assert generate(engine, asked) == generate(make_engine(folder), asked)
    assert wrong == []
    found = counts(engine)
    assert 0 < found.num_draft_tokens == found.num_accepted_tokens
    assert found.accepted_per_position[4] > 0, "five tokens by default"


def test_both_layouts_are_one_head(
    tmp_path: Path, write_model: WriteModel, write_head: WriteHead, eagle_headed: MakeDrafting
) -> None:
    published = write_head(write_model())
    engine = eagle_headed(write_model(), to_speculators(published, tmp_path))
    wrong = watch_drafts(engine, EagleReference(write_model(), published))
    generate(engine, requests_of((21, 40), greedy(12)))
    assert wrong == []
    assert counts(engine).num_draft_tokens > 0


def test_a_cached_prefix_has_its_states_and_its_keys(
    write_model: WriteModel, write_head: WriteHead, eagle_headed: MakeDrafting
) -> None:
    engine = eagle_headed(write_model())
    wrong = watch_drafts(engine, EagleReference(write_model(), write_head(write_model())))
    (first,) = requests_of((70,), greedy(30))
    answer = generate(engine, [first])["r0"]
    seen: list[int] = []
    eagle_drafter_of(engine)._catching_up.observe = lambda num_tokens, seconds: seen.append(num_tokens)  # type: ignore[method-assign]
    generate(engine, [Request("1", [*first.prompt_token_ids, *answer, 5, 6], greedy(12))])
    assert engine.stats().prefix_cache_hit_tokens_total == 96
    assert max(seen) <= 102 - 96 + 1, "the head reads what the cache did not know, and the first new token"
    assert wrong == []


def test_a_prefix_that_was_cached_without_drafts_is_read_by_the_head(
    write_model: WriteModel, write_head: WriteHead, eagle_headed: MakeDrafting
) -> None:
    engine = eagle_headed(write_model())
    wrong = watch_drafts(engine, EagleReference(write_model(), write_head(write_model())))
    assert engine._drafting is not None
    engine._drafting._steps_to_wait = 9  # as after a step without memory
    (first,) = requests_of((50,), greedy(10))
    generate(engine, [first])
    assert skipped(engine) == {"out_of_memory": 9}
    generate(engine, [Request("1", [*first.prompt_token_ids, 3], greedy(20))])
    assert engine.stats().prefix_cache_hit_tokens_total == 48
    assert wrong == []
    assert counts(engine).num_draft_tokens > 0


def test_a_long_prompt_is_read_in_chunks(
    write_model: WriteModel, write_head: WriteHead, eagle_headed: MakeDrafting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catching_up, "FIRST_TOKENS", 32)
    engine = eagle_headed(write_model())
    wrong = watch_drafts(engine, EagleReference(write_model(), write_head(write_model())))
    eagle_drafter_of(engine)._catching_up.observe = lambda num_tokens, seconds: None  # type: ignore[method-assign]
    generate(engine, requests_of((100,), greedy(20)))
    assert skipped(engine)["catching_up"] == 3, "100 tokens take four chunks, and the last of them has a draft"
    assert wrong == []


def test_preemptions_and_evictions_leave_no_wrong_draft(
    write_model: WriteModel, write_head: WriteHead, eagle_headed: MakeDrafting
) -> None:
    """A pool that is short for its requests, with a cache whose blocks go from one to the other."""
    engine = eagle_headed(write_model())
    shrink_pool(engine, 17, enable_prefix_caching=True)
    wrong = watch_drafts(engine, EagleReference(write_model(), write_head(write_model())))
    asked = requests_of((30, 61, 45, 12, 77, 30), greedy(30))
    for turn in range(2):
        generate(engine, [replace(one, request_id=f"{turn}{one.request_id}") for one in asked])
    assert engine.stats().num_preemptions_total > 0
    assert engine.stats().prefix_cache_hit_tokens_total > 0
    assert wrong == []


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_windows_and_groups_of_layers(
    family: str, tmp_path: Path, write_head: WriteHead, eagle_headed: MakeDrafting, make_engine: MakeEngine
) -> None:
    """Blocks that a window has passed are another request's: the head sees what is left."""
    config = dense("mistral", sliding_window=24, vocab_size=199) if family == "mistral" else CASES["gemma3"].config
    write_family(tmp_path, **config)
    more = {"enable_hybrid_kv_cache_manager": True} if family == "gemma3" else {}
    engine = eagle_headed(tmp_path, write_head(tmp_path), block_size_tokens=8, **more)
    assert (len(engine._blocks.windows) > 1) == bool(more)
    asked = [Request(str(size), [3 + place % 60 for place in range(size)], greedy(40)) for size in (3, 30, 60)]
    for turn in range(2):
        again = [replace(one, request_id=f"{turn}{one.request_id}") for one in asked]
        assert generate(engine, again) == generate(make_engine(tmp_path, block_size_tokens=8), again)
    assert counts(engine).num_draft_tokens > 100
    assert set(skipped(engine)) <= {"at_limit"}


def test_a_head_goes_on_where_the_targets_angles_change(
    tmp_path: Path, write_head: WriteHead, eagle_headed: MakeDrafting, make_engine: MakeEngine
) -> None:
    longrope = rope("longrope", partial_rotary_factor=0.5, **LONGROPE)
    write_family(tmp_path, **dense("phi3", original_max_position_embeddings=20, rope_parameters=longrope))
    engine, asked = eagle_headed(tmp_path, write_head(tmp_path)), [Request("0", [*range(2, 14)], greedy(16))]
    assert generate(engine, asked) == generate(make_engine(tmp_path), asked)
    assert counts(engine).num_draft_tokens > 30, "its own angles do not change"
    assert set(skipped(engine)) <= {"at_limit"}


def test_a_short_context_stops_drafts_and_nothing_else(
    write_model: WriteModel, write_head: WriteHead, eagle_headed: MakeDrafting, make_engine: MakeEngine
) -> None:
    asked = requests_of((30,), greedy(60))
    engine = eagle_headed(write_model(), write_head(write_model(), max_position_embeddings=48))
    assert generate(engine, asked) == generate(make_engine(write_model()), asked)
    assert counts(engine).num_draft_tokens > 0
    assert skipped(engine)["draft_context"] >= 40


@pytest.mark.parametrize("stored", [KVCacheDType.AUTO, KVCacheDType.INT8])
def test_keys_and_states_are_counted(
    stored: KVCacheDType, write_model: WriteModel, eagle_headed: MakeDrafting, make_engine: MakeEngine
) -> None:
    engine, alone = (
        eagle_headed(write_model(), kv_cache_dtype=stored),
        make_engine(write_model(), kv_cache_dtype=stored),
    )
    use = engine.memory_use
    assert use.draft_weights_bytes is not None
    assert use.draft_kv_cache_bytes is not None
    assert 0 < use.draft_weights_bytes < use.weights_bytes
    heads, slots = 2 * 3, use.kv_cache_tokens
    key_bytes = heads * 8 * 4 if stored is KVCacheDType.AUTO else heads * (8 + 2)
    assert use.draft_kv_cache_bytes == slots * (key_bytes + 48 * 4)
    assert use.kv_cache_bytes + use.draft_kv_cache_bytes <= 1 << 20
    assert use.kv_cache_tokens < alone.memory_use.kv_cache_tokens
    generate(engine, requests_of((21, 40), greedy(24)))
    assert counts(engine).num_draft_tokens > 0


def test_nan_ends_the_drafts_of_its_request(
    write_model: WriteModel, eagle_headed: MakeDrafting, make_engine: MakeEngine
) -> None:
    asked = requests_of((21, 40), greedy(20))
    expected = generate(make_engine(write_model()), asked)
    engine = eagle_headed(write_model())
    drafter = eagle_drafter_of(engine)
    forward, compute = drafter._forward, drafter._forward.forward
    passes = 0

    def spoil_one(token_ids: list[int], states: torch.Tensor, chunks: Any) -> torch.Tensor:
        nonlocal passes
        passes += 1
        if passes == 4:
            states[0] = torch.nan
        return compute(token_ids, states, chunks)

    forward.forward = spoil_one  # type: ignore[method-assign]
    assert generate(engine, asked) == expected
    assert skipped(engine)["draft_not_finite"] > 10
    assert counts(engine).num_draft_tokens > 20, "of the other request"
    assert all(bool(layer.isfinite().all()) for layer in forward._cache.heads)


@pytest.mark.parametrize("error", [ZeroDivisionError, MemoryError])
def test_a_failing_head_is_no_harm(
    error: type[Exception],
    write_model: WriteModel,
    write_head: WriteHead,
    eagle_headed: MakeDrafting,
    make_engine: MakeEngine,
) -> None:
    """An error ends drafting; without memory it waits and goes on, with keys that are right."""
    asked = requests_of((21, 40), greedy(90))
    engine = eagle_headed(write_model())
    drafter = eagle_drafter_of(engine)
    wrong = watch_drafts(engine, EagleReference(write_model(), write_head(write_model())))
    compute, passes = drafter._forward.head.forward, 0

    def fail_once(*inputs: Any) -> torch.Tensor:
        nonlocal passes
        passes += 1
        if passes == 4:
            raise error("a secret prompt")
        return compute(*inputs)

    drafter._forward.head.forward = fail_once  # type: ignore[method-assign, assignment]
    assert generate(engine, asked) == generate(make_engine(write_model()), asked)
    assert wrong == []
    if error is MemoryError:
        assert skipped(engine)["out_of_memory"] > 60
        assert passes > 4
    else:
        assert skipped(engine)["drafter_failed"] > 60
        assert passes == 4


def test_cancelled_requests_leave_no_progress(write_model: WriteModel, eagle_headed: MakeDrafting) -> None:
    engine = eagle_headed(write_model())
    for one in requests_of((21, 30), greedy(40)):
        engine.add_request(one)
    for _ in range(4):
        engine.step()
    keys = eagle_drafter_of(engine)._keys
    assert len(keys._progress) == 2
    for name in ("r0", "r1"):
        engine.abort(name)
    engine.step()
    engine.check_integrity()
    assert keys._progress == {}


def test_the_warm_up_drafts(
    write_model: WriteModel, eagle_headed: MakeDrafting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_up, "MOST_DRAFTS_SECONDS", 1e9)  # however long a busy machine takes
    engine = eagle_headed(write_model(), speculation_governor=GovernorMode.ENFORCE)
    seen: list[int] = []
    compute = eagle_drafter_of(engine)._forward.forward

    def note(token_ids: list[int], states: torch.Tensor, chunks: Any) -> torch.Tensor:
        seen.append(len(token_ids))
        return compute(token_ids, states, chunks)

    eagle_drafter_of(engine)._forward.forward = note  # type: ignore[method-assign]
    engine.warm_up()
    assert max(seen) >= 4
    assert counts(engine).num_draft_tokens == 0, "they count nowhere"
