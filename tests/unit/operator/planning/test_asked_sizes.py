"""A tensor-parallel size that the spec asks for and that is refused: the message names all that rules it out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millstream_operator.catalog.gpu_names import parse_island
from millstream_operator.inventory.node_kinds import inventory_of
from millstream_operator.planning.plan import Infeasible, Plan
from millstream_operator.planning.planner import decide
from tests.unit.operator.planning.cases import CATALOG, DEFAULTS, LLAMA_8B, LLAMA_70B, Case, infeasible

FALCON = "tiiuae/falcon-7b"  # 71 attention heads
HEADS_71 = "2 does not divide the model's 71 attention heads (the model allows 1)"
IN_ONE_NODE = "the GPUs that share a layer are in one node"
ONE_L4 = f"{IN_ONE_NODE}, and no node has more than 1 L4-24GB."


def refused(case: Case) -> Infeasible:
    found = case.plan()
    assert isinstance(found, Infeasible)
    assert found.constraint == "parallelism"
    return found


@pytest.mark.parametrize(
    ("repository", "gpus", "tensor", "said"),
    [
        (FALCON, ("L4:2",), 2, f"parallelism.tensor is 2: {HEADS_71}."),
        (
            FALCON,
            ("L4:1",),
            2,
            f"parallelism.tensor is 2: {HEADS_71}; {ONE_L4}",
        ),
        (LLAMA_8B, ("L4:1",), 2, f"parallelism.tensor is 2: {ONE_L4}"),
        (
            LLAMA_8B,
            ("L4:1", "L4:1"),
            2,
            f"parallelism.tensor is 2: {ONE_L4}",
        ),
        (LLAMA_70B, (), 16, f"parallelism.tensor is 16: {IN_ONE_NODE}, and a usual machine has 4 A10-24GB."),
    ],
    ids=["heads", "heads and the node", "the node", "two nodes", "the catalogue"],
)
def test_the_message_names_every_cause(repository: str, gpus: tuple[str, ...], tensor: int, said: str) -> None:
    found = refused(infeasible(repository, gpus, f"parallelism: {{tensor: {tensor}}}"))
    assert found.message.startswith(said)
    assert "free" not in said, "no GPU of these is taken"


@pytest.mark.parametrize(
    ("repository", "gpus", "asked", "sizes"),
    [(LLAMA_70B, ("A100-80GB:4",), 3, {"2", "4"}), (LLAMA_8B, ("L4:1", "L4:1"), 2, {"1"})],
)
def test_a_size_that_the_message_leaves_is_offered(
    repository: str, gpus: tuple[str, ...], asked: int, sizes: set[str]
) -> None:
    found = refused(infeasible(repository, gpus, f"parallelism: {{tensor: {asked}}}\nengine: {{maxModelLen: 4096}}"))
    assert {fix.value for fix in found.fixes if fix.field == "parallelism.tensor"} == sizes


def test_gpus_that_others_hold_are_called_free_or_not() -> None:
    """In a cluster whose L4 are taken but for one, next to A100 that are free."""
    case = infeasible(LLAMA_8B, ("L4:1", "A100-80GB:4"), "parallelism: {tensor: 4}\nengine: {maxModelLen: 4096}")
    capacity = inventory_of([parse_island(CATALOG, text) for text in ("L4:4", "A100-80GB:4")])
    found = decide(case.deployment(), DEFAULTS, replace(case.facts(), capacity=capacity))
    assert isinstance(found, Plan), found.message
    assert found.product == "A100-80GB"
    said = {line.reason for line in found.rejected if "L4" in line.summary}
    assert said == {f"parallelism.tensor is 4: {IN_ONE_NODE}, and no node has more than 1 free L4-24GB."}


def test_a_cluster_that_has_no_node_of_the_size_is_not_said_to_be_busy() -> None:
    """One L4 in each node, and one of them taken: to wait for it would not help."""
    case = infeasible(LLAMA_8B, ("L4:1",), "parallelism: {tensor: 2}")
    capacity = inventory_of([parse_island(CATALOG, text) for text in ("L4:1", "L4:1")])
    found = decide(case.deployment(), DEFAULTS, replace(case.facts(), capacity=capacity))
    assert isinstance(found, Infeasible)
    assert ONE_L4 in found.message
