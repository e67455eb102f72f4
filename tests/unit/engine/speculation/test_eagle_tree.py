"""A tree of an EAGLE head's drafts is what its definition says, whatever happens to blocks, and changes no token.

How a step checks a tree, and what it leaves in the target's pools, is that of every tree: see test_draft_tree.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from millstream_runtime.config import GovernorMode, RuntimeConfig, SpeculationMethod
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.request import SamplingParams
from millstream_runtime.errors import FailureReason, InvalidConfigError, RuntimeFailure
from tests.support.drafting_engines import MakeDrafting, counts, requests_of
from tests.support.eagle3_heads import DRAFT_VOCAB_SIZE, Eagle3Reference, write_eagle3_head
from tests.support.eagle_heads import EagleReference, WriteHead, eagle_drafter_of
from tests.support.engines import MakeEngine, WriteModel, generate, greedy
from tests.support.small_pool import shrink_pool
from tests.support.tree_drafters import TREE, OftenOnTheTree, count_moved

pytestmark = [pytest.mark.usefixtures("one_thread", "drafts_catch_up_by_fixed_chunks"), pytest.mark.deep]
VOCABULARY = 199


class Reference(Protocol):
    def ranked(self, token_ids: list[int], path: list[int], count: int) -> list[int]: ...


def tree_of(reference: Reference, token_ids: list[int], count: int) -> list[int]:
    """The first `count` nodes, each path computed by itself."""
    found: dict[tuple[int, ...], list[int]] = {(): []}  # a path's tokens by its node
    for node in TREE.nodes[:count]:
        before = found[node[:-1]]
        found[node] = [*before, reference.ranked(token_ids, before, node[-1] + 1)[-1]]
    return [found[node][-1] for node in TREE.nodes[:count]]


def watch_trees(engine: Engine, reference: Reference, checked: OftenOnTheTree | None = None) -> list[str]:
    """Compare all that the head proposes with `reference`; what differs is added to the list. `checked`: checks those
    drafts in the place of the head's."""
    drafter, wrong = eagle_drafter_of(engine), list[str]()
    propose = drafter.propose

    def compared(wanted: Any) -> Any:
        answer = propose(wanted)
        for sequence, drafts in answer.items():
            if isinstance(drafts, list):
                expected = tree_of(reference, sequence.token_ids, wanted[sequence])
                if drafts != expected:
                    wrong.append(f"{sequence.request.request_id}: {drafts}, not {expected}")
        return answer if checked is None else checked.propose(wanted)

    drafter.propose = compared  # type: ignore[method-assign]
    return wrong


@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_head_fills_the_tree_as_defined_and_changes_no_token(
    num_layers: int, write_model: WriteModel, write_head: WriteHead, eagle_treed: MakeDrafting, make_engine: MakeEngine
) -> None:
    folder = write_model()
    head = write_head(folder, num_hidden_layers=num_layers)
    engine = eagle_treed(folder, head)
    wrong = watch_trees(engine, EagleReference(folder, head))
    for sampling in (greedy(16), SamplingParams(16, temperature=1.0, seed=3, repetition_penalty=1.2)):
        asked = requests_of((21, 1, 40), sampling)
        assert generate(engine, asked) == generate(make_engine(folder), asked)
    assert wrong == []
    assert counts(engine).num_draft_tokens > 300
    assert len(counts(engine).accepted_per_position) == TREE.num_levels


def test_an_eagle_3_head_ranks_the_tokens_of_its_own_vocabulary(
    tmp_path: Path, write_model: WriteModel, eagle_treed: MakeDrafting, make_engine: MakeEngine
) -> None:
    folder = write_model(num_hidden_layers=4)
    head = write_eagle3_head(tmp_path, folder)
    engine, asked = eagle_treed(folder, head), requests_of((21, 40), greedy(16))
    wrong = watch_trees(engine, Eagle3Reference(folder, head))
    assert generate(engine, asked) == generate(make_engine(folder), asked)
    assert wrong == []
    assert counts(engine).num_draft_tokens > 200


def test_behind_branches_that_stood_the_head_reads_the_states_of_their_tokens(
    write_model: WriteModel, write_head: WriteHead, eagle_treed: MakeDrafting, make_engine: MakeEngine
) -> None:
    """Through preemptions, and in blocks that the cache had."""
    folder, asked = write_model(), requests_of((30, 61, 45, 12, 77, 30), greedy(20))
    answers = generate(make_engine(folder), asked)
    head = write_head(folder)
    engine = eagle_treed(folder, head)
    shrink_pool(engine, 17, enable_prefix_caching=True)
    moved = count_moved(engine)
    wrong = watch_trees(engine, EagleReference(folder, head), OftenOnTheTree.about(asked, answers, VOCABULARY))
    for turn in range(2):
        found = generate(engine, [replace(one, request_id=f"{turn}{one.request_id}") for one in asked])
        assert [*found.values()] == [*answers.values()]
    assert engine.stats().num_preemptions_total > 0
    assert engine.stats().prefix_cache_hit_tokens_total > 0
    assert len(moved) > 20
    assert wrong == []


def test_requests_that_share_the_drafts_of_a_step_have_a_part_of_the_tree_each(
    write_model: WriteModel, write_head: WriteHead, eagle_treed: MakeDrafting, make_engine: MakeEngine
) -> None:
    folder, asked = write_model(), requests_of(tuple(range(5, 25)), greedy(6))
    engine = eagle_treed(folder, write_head(folder), max_num_seqs=20)
    wrong = watch_trees(engine, EagleReference(folder, write_head(folder)))
    assert generate(engine, asked) == generate(make_engine(folder, max_num_seqs=20), asked)
    assert wrong == []


def test_nan_ends_the_drafts_of_its_request(
    write_model: WriteModel, write_head: WriteHead, eagle_treed: MakeDrafting, make_engine: MakeEngine
) -> None:
    folder, asked = write_model(), requests_of((21, 40), greedy(24))
    engine = eagle_treed(folder, write_head(folder))
    forward = eagle_drafter_of(engine)._forward
    compute, num_passes = forward.forward, 0

    def spoiled(token_ids: Any, states: Any, chunks: Any) -> torch.Tensor:
        nonlocal num_passes
        num_passes += 1
        found = compute(token_ids, states, chunks)
        if num_passes == 5:
            assert chunks[0].parents, "a pass over branches"
            found[1] = torch.nan
        return found

    forward.forward = spoiled  # type: ignore[method-assign]
    assert generate(engine, asked) == generate(make_engine(folder), asked)
    assert counts(engine).skipped["draft_not_finite"] > 3
    assert counts(engine).num_checks > 10, "the other request drafts on"
    assert engine.stats().kv_blocks_used == 0


def test_the_warm_up_and_the_governor_deal_in_levels(
    write_model: WriteModel, write_head: WriteHead, eagle_treed: MakeDrafting
) -> None:
    engine = eagle_treed(write_model(), write_head(write_model()), speculation_governor=GovernorMode.OBSERVE)
    engine.warm_up()
    generate(engine, requests_of((21, 1, 40), greedy(20)))
    found = counts(engine)
    assert len(found.accepted_per_position) == TREE.num_levels
    assert found.governor is not None
    assert len(found.governor.tokens_by_length) == TREE.num_levels + 1
    assert engine.stats().kv_blocks_used == 0


def test_a_rank_that_the_head_does_not_propose_is_refused(
    tmp_path: Path, write_model: WriteModel, eagle_treed: MakeDrafting
) -> None:
    folder = write_model(num_hidden_layers=4)
    with pytest.raises(RuntimeFailure) as caught:
        eagle_treed(folder, write_eagle3_head(tmp_path, folder), draft_tree=f"[({DRAFT_VOCAB_SIZE},)]")
    assert caught.value.reason is FailureReason.INVALID_CONFIG
    said = f"--draft-tree names the rank {DRAFT_VOCAB_SIZE}, and {tmp_path} proposes {DRAFT_VOCAB_SIZE} tokens; "
    assert caught.value.message == f"{said}leave out the nodes with ranks above {DRAFT_VOCAB_SIZE - 1}."


def test_a_draft_model_proposes_no_tree() -> None:
    with pytest.raises(InvalidConfigError, match="set it to EAGLE or Medusa, whose heads alone propose trees"):
        RuntimeConfig(
            model="/m",
            served_model_name="m",
            speculation_method=SpeculationMethod.DRAFT_MODEL,
            draft_model="/draft",
            draft_tree="[(0,)]",
        )
