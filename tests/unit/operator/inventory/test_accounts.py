"""What is free for whom: nodes, less what pods hold, less what others are promised; own pods count as free."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from millstream_operator.catalog.gpu import load_catalog
from millstream_operator.inventory.accounts import GpuAccounts
from millstream_operator.inventory.demands import Demands, read_taints
from millstream_operator.inventory.node_kinds import Inventory
from millstream_operator.inventory.nodes import SPLIT, GpuNode
from millstream_operator.inventory.packing import Free, Want, without_promised
from millstream_operator.inventory.pods import GpuPod

CATALOG = load_catalog()
L4, A100 = "NVIDIA-L4", "NVIDIA-A100-SXM4-80GB"
ME, OTHER = ("team", "me"), ("team", "other")


def node(name: str, product: str = L4, gpus: int = 4, **changes: Any) -> GpuNode:
    return GpuNode(name, product, gpus, **changes)


def accounts(*nodes: GpuNode) -> GpuAccounts:
    made = GpuAccounts(CATALOG)
    made.replace_nodes(nodes)
    return made


def shown(inventory: Inventory) -> dict[tuple[str, int], int]:
    return {(kind.part.name, kind.gpus): kind.nodes for kind in inventory.kinds}


def test_what_pods_of_others_hold_is_not_free_and_is_again_when_they_end() -> None:
    one = accounts(node("a"), node("b"))
    one.put_pod("p", GpuPod("p", "a", 3))
    assert shown(one.free(ME)) == {("L4-24GB", 1): 1, ("L4-24GB", 4): 1}
    one.put_pod("p", None)
    assert shown(one.free(ME)) == {("L4-24GB", 4): 2}


def test_own_pods_and_promises_count_as_free_for_the_own_next_plan_alone() -> None:
    one = accounts(node("a"))
    one.put_pod("p", GpuPod("p", "a", 2, ME, "r"))
    one.promise(ME, Want(1, "L4-24GB"), 1)
    assert shown(one.free(ME)) == {("L4-24GB", 4): 1}
    assert shown(one.free(OTHER)) == {("L4-24GB", 1): 1}


def test_spare_gpus_are_free_in_addition_to_the_own_pods() -> None:
    one = accounts(node("a"))
    one.put_pod("p", GpuPod("p", "a", 3, ME, "r"))
    assert shown(one.free(ME, give_up=False)) == {("L4-24GB", 1): 1}


def test_the_same_pod_reported_twice_counts_once() -> None:
    one = accounts(node("a"))
    assert one.put_pod("p", GpuPod("p", "a", 2, ME)) == {ME}
    assert one.put_pod("p", GpuPod("p", "a", 2, ME)) == set()
    assert shown(one.free(OTHER)) == {("L4-24GB", 2): 1}
    assert one.replace_pods([]) == {ME}, "a listing finds what no watch delivered"
    assert shown(one.free(OTHER)) == {("L4-24GB", 4): 1}


def test_pods_are_counted_by_owner_and_revision() -> None:
    one = accounts(node("a"))
    one.replace_pods(
        [GpuPod("p", "a", 1, ME, "new"), GpuPod("q", "a", 1, ME, "old"), GpuPod("r", "a", 1, OTHER, "new")]
    )
    assert (one.bound(ME), one.bound(ME, "new"), one.bound(("team", "nobody"))) == (2, 1, 0)


def test_a_promise_replaces_the_one_before_and_ends() -> None:
    one = accounts(node("a"))
    one.promise(OTHER, Want(2, "L4-24GB"), 1)
    one.promise(OTHER, Want(1, "L4-24GB"), 1)
    assert shown(one.free(ME)) == {("L4-24GB", 3): 1}
    one.promise(OTHER, None, 0)
    assert shown(one.free(ME)) == {("L4-24GB", 4): 1}
    assert not one._wanted


def test_capacity_is_all_that_there_is_free_or_not_and_where_a_node_is_away() -> None:
    one = accounts(node("a"), node("b", away="it is cordoned"))
    one.put_pod("p", GpuPod("p", "a", 4))
    assert shown(one.capacity()) == {("L4-24GB", 4): 2}
    assert shown(one.free(ME)) == {}


def test_a_node_that_reboots_is_no_change_of_the_cluster_and_one_that_goes_is() -> None:
    one = accounts(node("a"), node("b"))
    before = one.generation
    one.put_node("a", node("a", away="it is not Ready"))
    one.put_pod("p", GpuPod("p", "b", 1))
    assert one.generation == before
    one.put_node("a", None)
    assert one.generation > before


def test_nodes_that_the_pods_may_not_go_to_are_neither_free_nor_there() -> None:
    dedicated = read_taints([{"key": "dedicated", "value": "x", "effect": "NoSchedule"}])
    one = accounts(node("a", taints=dedicated), node("b", labels={"zone": "b"}), node("c", labels={"zone": "c"}))
    in_zone_b = Demands(node_selector=frozenset({("zone", "b")}))
    assert shown(one.free(ME)) == {("L4-24GB", 4): 2}
    assert shown(one.free(ME, in_zone_b)) == shown(one.capacity(in_zone_b)) == {("L4-24GB", 4): 1}


def test_unusable_nodes_are_named_with_their_reason() -> None:
    one = accounts(node("a", product=""), node("b", unfit=SPLIT))
    assert shown(one.capacity()) == {}
    sentences = sorted(left_out.sentence for left_out in one.capacity().refused)
    assert "Node a is left out: no label" in sentences[0]
    assert "Node b is left out: GPUs split by MIG" in sentences[1]


def test_another_catalogue_is_looked_up_anew() -> None:
    one = accounts(node("a"))
    assert one.capacity().kinds[0].part.hourly_milli_usd != 123
    one.use_catalog(load_catalog({"L4-24GB": {"listPriceUSDPerHour": 0.123}}))
    assert one.capacity().kinds[0].part.hourly_milli_usd == 123
    assert one.free(ME).kinds[0].part.hourly_milli_usd == 123


# Packing


def taken(free: dict[tuple[str, int], int], *wanted: tuple[Want, int]) -> dict[tuple[str, int], int]:
    return dict(without_promised(Free(free), wanted))


def test_each_is_taken_from_the_node_that_it_fills_best() -> None:
    assert taken({("L4", 8): 1, ("L4", 2): 1}, (Want(2, "L4"), 1)) == {("L4", 8): 1}
    assert taken({("L4", 8): 2}, (Want(3, "L4"), 3)) == {("L4", 2): 1, ("L4", 5): 1}
    assert taken({("L4", 8): 1}, (Want(1, "L4"), 2), (Want(4, "L4"), 1)) == {("L4", 2): 1}


def test_what_does_not_fit_takes_nothing() -> None:
    assert taken({("L4", 3): 2}, (Want(4, "L4"), 1)) == {("L4", 3): 2}
    assert taken({("L4", 1): 1}, (Want(1, "L4"), 1000)) == {}


def test_a_want_of_any_part_takes_where_most_is_left_after_those_that_insist() -> None:
    assert taken({("A", 4): 1, ("B", 3): 1}, (Want(1, None), 1), (Want(2, "A"), 1)) == {("A", 2): 1, ("B", 2): 1}


SIZES = st.integers(1, 8)


@given(
    st.dictionaries(SIZES, st.integers(1, 5), max_size=5),
    st.lists(st.tuples(SIZES, st.integers(0, 20)), max_size=5),
)
def test_as_many_are_taken_as_by_hand_one_after_the_other(nodes: dict[int, int], wants: list[tuple[int, int]]) -> None:
    by_hand = sorted(size for size, count in nodes.items() for _ in range(count))
    for gpus, times in sorted(wants, reverse=True):
        for _ in range(times):
            fitting = [size for size in by_hand if size >= gpus]
            if fitting:
                by_hand.remove(min(fitting))
                by_hand.append(min(fitting) - gpus)
    left = taken({("P", size): count for size, count in nodes.items()}, *((Want(g, "P"), t) for g, t in wants))
    assert sorted(size for (_, size), count in left.items() for _ in range(count)) == sorted(s for s in by_hand if s)


def test_a_random_history_ends_in_the_same_accounts_as_its_last_state() -> None:
    draw = random.Random(7)
    lived = accounts(*(node(f"n{number}") for number in range(5)))
    pods: dict[str, GpuPod] = {}
    for _ in range(500):
        uid = f"p{draw.randrange(12)}"
        pod = GpuPod(
            uid, f"n{draw.randrange(5)}", draw.randint(1, 2), draw.choice([None, ME, OTHER]), draw.choice("xy")
        )
        if draw.random() < 0.3:
            pods.pop(uid, None)
            lived.put_pod(uid, None)
        else:
            pods[uid] = pod
            lived.put_pod(uid, pod)
    fresh = accounts(*(node(f"n{number}") for number in range(5)))
    fresh.replace_pods(pods.values())
    for owner in (ME, OTHER, ("team", "nobody")):
        assert lived.free(owner) == fresh.free(owner)
        assert lived.bound(owner, "x") == fresh.bound(owner, "x")
