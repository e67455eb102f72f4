"""Trees of drafts: heads fill them as defined, and what an accepted branch leaves in the pools is that of a chain."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaForCausalLM

from millstream_runtime.config import GovernorMode, KVCacheDType, RuntimeConfig, SpeculationMethod
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.medusa.medusa_shard import resolve_medusa
from millstream_runtime.engine.request import Request, SamplingParams
from millstream_runtime.engine.scheduling.sequence import Sequence
from millstream_runtime.engine.speculation.medusa import MedusaDrafter
from millstream_runtime.errors import FailureReason, RuntimeFailure
from tests.soak.schedules.constraints import ForbidsAThird
from tests.support.drafting_engines import MEDUSA_TREE, MakeDrafting, counts, medusa_heads_of, requests_of
from tests.support.engines import MakeEngine, WriteModel, generate, greedy
from tests.support.family_cases import CASES, Models, dense
from tests.support.small_pool import shrink_pool
from tests.support.tiny_families import VOCABULARY as FAMILY_VOCABULARY
from tests.support.tiny_families import prompts_of, write_family
from tests.support.tree_drafters import TREE, TREE_TEXT, OftenOnTheTree, count_moved

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.deep]
VOCABULARY = 199
MOST_RANKS = 1 + max(max(node) for node in TREE.nodes)


class Reference:
    """The most probable tokens of each head behind known tokens, from transformers' hidden states."""

    def __init__(self, target: Path, heads: Path) -> None:
        self._target = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self._tensors = load_file(heads / "model.safetensors")

    @torch.no_grad()
    def drafts(self, token_ids: list[int], count: int) -> list[int]:
        decoder = self._target.get_decoder()
        state = decoder(input_ids=torch.tensor([token_ids[:-1]])).last_hidden_state[0, -1]
        ranked = [self._logits(head, state).topk(MOST_RANKS).indices.tolist() for head in range(TREE.num_levels)]
        return [ranked[len(node) - 1][node[-1]] for node in TREE.nodes[:count]]

    def _logits(self, head: int, x: Tensor) -> Tensor:
        name = f"{head}.0.linear"
        x = x + F.silu(F.linear(x, self._tensors[f"{name}.weight"], self._tensors[f"{name}.bias"]))
        return F.linear(x, self._tensors[f"{head}.1.weight"])


def medusa_of(engine: Engine) -> MedusaDrafter:
    assert engine._drafting is not None
    assert isinstance(engine._drafting._drafter, MedusaDrafter)
    return engine._drafting._drafter


def replace_drafts(engine: Engine, knows: OftenOnTheTree, reference: Reference) -> list[str]:
    """Have drafts checked that often stand, and compare those of the heads; what differs is added to the list."""
    drafter, wrong = medusa_of(engine), list[str]()
    propose = drafter.propose

    def compared(wanted: Any) -> Any:
        for sequence, drafts in propose(wanted).items():
            expected = reference.drafts(sequence.token_ids, wanted[sequence])
            if isinstance(drafts, list) and drafts != expected:
                wrong.append(f"{sequence.request.request_id} at {len(sequence.token_ids)}: {drafts}, not {expected}")
        return knows.propose(wanted)

    drafter.propose = compared  # type: ignore[method-assign]
    return wrong


def test_heads_fill_the_tree_as_defined_and_change_no_token(
    tmp_path: Path, write_model: WriteModel, medusa_treed: MakeDrafting, make_engine: MakeEngine
) -> None:
    folder = write_model()
    engine = medusa_treed(folder)
    drafter, reference, wrong = medusa_of(engine), Reference(folder, tmp_path / "heads"), list[Any]()
    propose = drafter.propose

    def compared(wanted: Any) -> Any:
        answer = propose(wanted)
        for sequence, drafts in answer.items():
            if isinstance(drafts, list) and drafts != reference.drafts(sequence.token_ids, wanted[sequence]):
                wrong.append(drafts)
        return answer

    drafter.propose = compared  # type: ignore[method-assign]
    for sampling in (greedy(20), SamplingParams(20, temperature=1.0, seed=3, repetition_penalty=1.2)):
        asked = requests_of((21, 1, 40), sampling)
        assert generate(engine, asked) == generate(make_engine(folder), asked)
    assert wrong == []
    assert counts(engine).num_draft_tokens > 400


def test_states_of_branches_that_stood_are_where_heads_read_them(
    tmp_path: Path, write_model: WriteModel, medusa_treed: MakeDrafting, make_engine: MakeEngine
) -> None:
    """Through preemptions, and in blocks that the cache had."""
    folder, asked = write_model(), requests_of((30, 61, 45, 12, 77, 30), greedy(20))
    answers = generate(make_engine(folder), asked)
    engine = medusa_treed(folder)
    shrink_pool(engine, 17, enable_prefix_caching=True)
    moved = count_moved(engine)
    knows = OftenOnTheTree.about(asked, answers, VOCABULARY)
    wrong = replace_drafts(engine, knows, Reference(folder, tmp_path / "heads"))
    for turn in range(2):
        found = generate(engine, [replace(one, request_id=f"{turn}{one.request_id}") for one in asked])
        assert [*found.values()] == [*answers.values()]
    assert engine.stats().num_preemptions_total > 0
    assert engine.stats().prefix_cache_hit_tokens_total > 0
    assert len(moved) > 20
    assert wrong == []


def keys_of(engine: Engine, num_tokens: int) -> list[Tensor]:
    """Of each layer, what the pool keeps of the first tokens of the only request."""
    (sequence,) = engine._scheduler.running
    cache = engine._runner._forward._cache
    tables = [sequence.block_table, *(table.block_table for table in sequence.other_tables)]
    block = cache.block_size_tokens
    found = []
    for layer, group in enumerate(cache.layout.group_of):
        table = tables[group]
        slots = [table[place // block] * block + place % block for place in range(num_tokens)]
        found.append(cache.heads[layer][:, slots])
    return found


@pytest.mark.parametrize("kv_cache_dtype", KVCacheDType)
def test_keys_of_branches_that_stood_are_those_of_a_prompt(
    kv_cache_dtype: KVCacheDType, write_model: WriteModel, medusa_treed: MakeDrafting, make_engine: MakeEngine
) -> None:
    (asked,) = requests_of((21,), greedy(60))
    config: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype, "block_size_tokens": 8}
    answer = generate(make_engine(write_model(), **config), [asked])["r0"]
    knows = OftenOnTheTree({tuple(asked.prompt_token_ids): answer}, VOCABULARY)
    engine = medusa_treed(write_model(), drafter=knows, **config)
    moved = count_moved(engine)
    engine.add_request(asked)
    while len(moved) < 6 and engine.has_work():
        engine.step()
    (sequence,) = engine._scheduler.running
    assert sequence.token_ids[21:] == answer[: len(sequence.token_ids) - 21]
    plain = make_engine(write_model(), **config)
    plain.add_request(Request("plain", sequence.token_ids, greedy(5)))
    plain.step()
    num_tokens = sequence.num_computed_tokens
    for branch, prompt in zip(keys_of(engine, num_tokens), keys_of(plain, num_tokens), strict=True):
        if kv_cache_dtype is KVCacheDType.AUTO:
            torch.testing.assert_close(branch, prompt, rtol=1e-4, atol=1e-5)
        else:  # the last bit of a number may decide a code
            assert (branch == prompt).double().mean() > 0.98


@pytest.mark.matrix("caching")
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("family", CASES)
def test_every_family_answers_as_without(
    family: str, caching: bool, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, make_engine: MakeEngine
) -> None:
    """Windows, groups of layers with tables of their own, latents, soft caps and biases."""
    folder = Models(tmp_path_factory.mktemp("families")).folder(family)
    prompts = prompts_of((15, 18, 31))
    sampling = SamplingParams(16, temperature=0.0, ignore_eos=True)
    asked = [Request(str(index), prompt, sampling) for index, prompt in enumerate(prompts)]
    config: dict[str, Any] = {"enable_prefix_caching": caching, "block_size_tokens": 8}
    answers = generate(make_engine(folder, **config), asked)
    heads = medusa_heads_of(folder, tmp_path)
    engine = make_engine(
        folder,
        drafter=OftenOnTheTree.about(asked, answers, FAMILY_VOCABULARY),
        **(MEDUSA_TREE | {"draft_model": str(heads)} | config),
    )
    moved = count_moved(engine)
    for turn in range(2):
        found = generate(engine, [replace(one, request_id=f"{turn}{one.request_id}") for one in asked])
        assert [*found.values()] == [*answers.values()]
    assert moved
    assert (engine.stats().prefix_cache_hit_tokens_total > 0) is caching


@pytest.mark.parametrize("hybrid", [False, True])
def test_windows_that_pass_blocks(
    hybrid: bool, tmp_path: Path, medusa_treed: MakeDrafting, make_engine: MakeEngine
) -> None:
    config = CASES["gemma3"].config if hybrid else dense("mistral", sliding_window=24, vocab_size=199)
    write_family(tmp_path, **config)
    more: dict[str, Any] = {"block_size_tokens": 8, "enable_hybrid_kv_cache_manager": hybrid}
    asked = [Request(str(size), [3 + place % 60 for place in range(size)], greedy(40)) for size in (3, 30, 60)]
    answers = generate(make_engine(tmp_path, block_size_tokens=8), asked)
    vocabulary = json.loads((tmp_path / "config.json").read_text())["vocab_size"]
    engine = medusa_treed(tmp_path, drafter=OftenOnTheTree.about(asked, answers, vocabulary), **more)
    moved = count_moved(engine)
    assert generate(engine, asked) == answers
    assert len(moved) > 10


def test_the_last_tokens_of_the_context_have_room(
    write_model: WriteModel, medusa_treed: MakeDrafting, make_engine: MakeEngine
) -> None:
    """The branches of a tree, one after another, would be longer than the context."""
    asked = requests_of((21, 30), SamplingParams(200, temperature=0.0, ignore_eos=True))
    answers = generate(make_engine(write_model(), max_model_len=64), asked)
    assert [len(one) for one in answers.values()] == [43, 34]
    engine = medusa_treed(write_model(), max_model_len=64)
    knows = OftenOnTheTree.about(asked, answers, VOCABULARY)
    medusa_of(engine).propose = knows.propose  # type: ignore[method-assign]
    longest = 0
    table_blocks = engine._scheduler.apply

    def applied(plan: Any) -> Any:
        nonlocal longest
        chunks = table_blocks(plan)
        longest = max([longest, *(len(one.block_table) for one, _ in chunks)])
        return chunks

    engine._scheduler.apply = applied  # type: ignore[method-assign]
    assert generate(engine, asked) == answers
    assert longest == 64 // 16


def test_a_check_with_nan_is_computed_again_without_drafts(
    write_model: WriteModel, medusa_treed: MakeDrafting, make_engine: MakeEngine
) -> None:
    asked = requests_of((21, 40), greedy(30))
    answers = generate(make_engine(write_model()), asked)
    knows = OftenOnTheTree.about(asked, answers, VOCABULARY)
    engine = medusa_treed(write_model(), drafter=knows)
    model = engine._runner._forward.model
    logits, spoiled = model.logits, list[int]()

    def spoil_a_branch(residual: Tensor) -> Tensor:
        found = logits(residual)
        if len(residual) > len(TREE.nodes) and len(spoiled) < 1 and counts(engine).num_checks > 3:
            spoiled.append(len(residual))
            found[5] = torch.nan
        return found

    model.logits = spoil_a_branch  # type: ignore[method-assign]
    assert generate(engine, asked) == answers
    assert spoiled
    assert counts(engine).skipped["not_finite"] > 3
    assert engine.stats().kv_blocks_used == 0


def test_logprobs_are_those_of_the_tokens_that_stood(
    write_model: WriteModel, medusa_treed: MakeDrafting, make_engine: MakeEngine
) -> None:
    sampling = SamplingParams(30, temperature=0.8, seed=5, logprobs=3, min_tokens=9, frequency_penalty=0.4)
    asked = requests_of((21,), sampling)

    def outputs(engine: Engine) -> list[Any]:
        engine.add_request(asked[0])
        found = []
        while engine.has_work():
            found += engine.step()
        return found

    expected = outputs(make_engine(write_model()))
    knows = OftenOnTheTree.about(asked, {"r0": [one.token_id for one in expected]}, VOCABULARY)
    engine = medusa_treed(write_model(), drafter=knows)
    found = outputs(engine)
    assert [one.token_id for one in found] == [one.token_id for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-4)
        assert [token for token, _ in one.logprobs.top] == [token for token, _ in other.logprobs.top]
    assert counts(engine).num_accepted_tokens > 5


def test_processors_are_given_the_tokens_of_their_own_branch(
    write_model: WriteModel, medusa_treed: MakeDrafting, make_engine: MakeEngine
) -> None:
    asked = requests_of((21, 40), SamplingParams(40, temperature=0.8, seed=5, ignore_eos=True))

    def constrained(engine: Engine) -> Engine:
        engine.processors_for = lambda request: (ForbidsAThird(),)
        return engine

    answers = generate(constrained(make_engine(write_model())), asked)
    engine = constrained(medusa_treed(write_model(), drafter=OftenOnTheTree.about(asked, answers, VOCABULARY)))
    moved = count_moved(engine)
    assert generate(engine, asked) == answers
    assert len(moved) > 5


def test_the_warm_up_and_the_governor_deal_in_levels(write_model: WriteModel, medusa_treed: MakeDrafting) -> None:
    engine = medusa_treed(write_model(), speculation_governor=GovernorMode.OBSERVE)
    engine.warm_up()
    assert counts(engine).num_draft_tokens == 0, "checks of the warm-up count nowhere"
    generate(engine, requests_of((21, 1, 40), greedy(20)))
    found = counts(engine)
    assert len(found.accepted_per_position) == TREE.num_levels
    assert found.num_draft_tokens > 5 * found.num_checks
    assert found.governor is not None
    assert len(found.governor.tokens_by_length) == TREE.num_levels + 1
    assert engine.stats().kv_blocks_used == 0


def test_more_levels_than_heads_are_refused(
    tmp_path: Path, write_model: WriteModel, medusa_treed: MakeDrafting
) -> None:
    with pytest.raises(RuntimeFailure) as caught:
        medusa_treed(write_model(), draft_tree="[(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]")
    assert caught.value.reason is FailureReason.INVALID_CONFIG
    assert f"--draft-tree has 4 levels, and {tmp_path / 'heads'} has 3 heads" in caught.value.message
    assert "leave out the nodes of more than 3 ranks" in caught.value.message


@pytest.mark.parametrize(
    ("device", "ranks", "said"),
    [
        ("cuda", 1, "does not have on cuda; leave {} out, or serve the model on a CPU (--device cpu)"),
        ("cpu", 2, "does not have with --tensor-parallel-size 2; leave that out, or {}."),
    ],
)
def test_a_gpu_and_several_ranks_are_refused(device: str, ranks: int, said: str) -> None:
    config = RuntimeConfig(
        model="/m",
        served_model_name="m",
        speculation_method=SpeculationMethod.MEDUSA,
        draft_model="/heads",
        draft_tree=TREE_TEXT,
        tensor_parallel_size=ranks,
    )
    target: Any = SimpleNamespace(device=torch.device(device))
    with pytest.raises(RuntimeFailure) as caught:
        resolve_medusa(config, target)
    assert caught.value.reason is FailureReason.UNSUPPORTED_BY_RUNTIME
    assert caught.value.message.startswith("--speculation-method is Medusa, which this version ")
    flags = "--speculation-method, --draft-model and --draft-tree"
    assert said.format(flags) in caught.value.message


def test_a_rank_that_the_vocabulary_lacks_is_refused(write_model: WriteModel, medusa_treed: MakeDrafting) -> None:
    with pytest.raises(RuntimeFailure) as caught:
        medusa_treed(write_model(vocab_size=40), draft_tree="[(40,)]")
    assert "--draft-tree names the rank 40, and " in caught.value.message
    assert "has 40 tokens; leave out the nodes with ranks above 39." in caught.value.message


def test_a_drafter_asked_for_a_part_of_the_tree(write_model: WriteModel, medusa_treed: MakeDrafting) -> None:
    """Requests share the drafts of a step, so each may have a start of the tree."""
    engine = medusa_treed(write_model(), max_num_seqs=20)
    drafter, asked = medusa_of(engine), list[dict[Sequence, int]]()
    propose = drafter.propose

    def noted(wanted: Any) -> Any:
        asked.append(dict(wanted))
        answer = propose(wanted)
        assert all(len(drafts) == wanted[one] for one, drafts in answer.items() if isinstance(drafts, list))
        return answer

    drafter.propose = noted  # type: ignore[method-assign]
    generate(engine, requests_of(tuple(range(5, 25)), greedy(6)))
    assert max(sum(one.values()) for one in asked) <= 64
    assert min(max(one.values()) for one in asked) < 4, "64 drafts among 20 requests"
