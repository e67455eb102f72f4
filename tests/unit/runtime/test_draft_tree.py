"""Trees of drafts: what is read, what is refused, and which path of one stands."""

from __future__ import annotations

import pytest

from millstream_runtime.config import RuntimeConfig, SpeculationMethod
from millstream_runtime.draft_tree import MAX_DEPTH, MAX_NODES, DraftTree, depths
from millstream_runtime.engine.scheduling.step_plan import MOST_STEP_DRAFTS
from millstream_runtime.errors import InvalidConfigError
from millstream_runtime.models.medusa.medusa_heads import MAX_HEADS

TREE = DraftTree.parse(" [(1, 0), (0,), (1,), (0,1,), (0, 0), (0, 1, 2)]\n")


def test_nodes_are_ordered_so_that_every_start_of_them_is_a_tree() -> None:
    assert TREE.nodes == ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 2))
    assert TREE.parents == (-1, -1, 0, 0, 1, 3)
    assert depths(TREE.parents) == [1, 1, 2, 2, 2, 3]
    assert [TREE.path(node) for node in (-1, 0, 4, 5)] == [[], [0], [1, 4], [0, 3, 5]]
    assert all(parent < node for node, parent in enumerate(TREE.parents))


def test_levels_and_nodes() -> None:
    assert TREE.num_levels == 3
    assert [TREE.num_nodes(levels, 64) for levels in (0, 1, 2, 3, 4)] == [0, 2, 5, 6, 6]
    assert TREE.num_nodes(3, 4) == 4
    assert [TREE.levels_of(nodes) for nodes in (0, 1, 2, 3, 5, 6, 64)] == [0, 1, 1, 2, 2, 3, 3]


def test_a_chain_is_a_tree() -> None:
    chain = DraftTree.chain(3)
    assert chain == DraftTree.parse("[(0,), (0, 0), (0, 0, 0)]")
    assert chain.parents == (-1, 0, 1)
    assert chain.accepted([7, 8, 9], [7, 8, 1, 2]) == [0, 1]


@pytest.mark.parametrize(
    ("draws", "path"),
    [
        ([10, 13, 0, 0, 15, 0, 0], [0, 3, 5]),
        ([10, 12, 5, 15, 15, 0, 0], [0, 2]),
        ([11, 13, 14, 0, 0, 15, 0], [1, 4]),
        ([12, 13, 14, 0, 15, 0, 0], []),  # a draft of the second level does not stand on the first
        ([10, 14, 0, 0, 0, 0, 0], [0]),  # nor one of another branch
        ([None, 12, 0, 0, 0, 0, 0], []),
    ],
)
def test_the_path_that_stands(draws: list[int | None], path: list[int]) -> None:
    assert TREE.accepted([10, 11, 12, 13, 14, 15], draws) == path


def test_of_two_equal_siblings_the_first_stands() -> None:
    assert DraftTree.parse("[(0,), (1,), (1, 0)]").accepted([5, 5, 6], [5, 6, 6, 6]) == [0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it must be a list of tuples of ranks, such as"),
        ("[]", "it must be a list of tuples"),
        ("[[0], [0, 0]]", "it must be a list of tuples"),
        ("[(0)]", "it must be a list of tuples"),
        ("[(-1,)]", "it must be a list of tuples"),
        ("[(1 0,)]", "it must be a list of tuples"),  # not rank 10
        ("[(0,), (0, 1\n2)]", "it must be a list of tuples"),
        ("[(\u0663,)]", "it must be a list of tuples"),  # an Arabic 3
        ("[(100,)]", "each rank 0 to 99"),
        ("[(0,)] + [(1,)]", "it must be a list of tuples"),
        ("[(0,), __import__('os')]", "it must be a list of tuples"),
        ("[" + "(0,)," * 9000 + "]", "it must be a list of tuples"),
        ("[(0,), (0,)]", "has the node (0,) twice; name it once"),
        ("[(0,), (1, 0)]", "has the node (1, 0), but not (1,), which comes before it; add that one"),
        ("[(0, 0)]", "has the node (0, 0), but not (0,)"),
        (str([(rank,) for rank in range(MAX_NODES + 1)]), "has 65 nodes, the deepest 1 levels down; there may be 64"),
        (str(list(DraftTree.chain(MAX_DEPTH + 1).nodes)), "has 17 nodes, the deepest 17 levels down"),
    ],
)
def test_what_is_no_tree_is_refused_by_the_flag(text: str, said: str) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        config_of(draft_tree=text)
    assert str(caught.value).startswith("--draft-tree ")
    assert said in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"speculation_method": SpeculationMethod.DRAFT_MODEL},
            "but --speculation-method is DraftModel; set it to EAGLE or Medusa",
        ),
        ({"speculation_method": SpeculationMethod.N_GRAM, "draft_model": None}, "but --speculation-method is NGram"),
        ({"speculation_method": SpeculationMethod.DISABLED, "draft_model": None}, "leave --draft-tree out"),
        ({"max_draft_tokens": 4}, "--max-draft-tokens is 4, but --draft-tree says which tokens are proposed"),
    ],
)
def test_what_proposes_no_trees_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        config_of(draft_tree="[(0,)]", **change)
    assert said in str(caught.value)


def test_the_limits_are_those_of_a_step_and_of_heads() -> None:
    assert MAX_NODES == MOST_STEP_DRAFTS
    assert MAX_DEPTH == MAX_HEADS
    assert config_of(draft_tree="[(0,), (1,), (1, 0)]").draft_tokens == 3


def config_of(**change: object) -> RuntimeConfig:
    given: dict[str, object] = {"speculation_method": SpeculationMethod.MEDUSA, "draft_model": "/heads"}
    return RuntimeConfig(model="/m", served_model_name="m", **(given | change))  # type: ignore[arg-type]
