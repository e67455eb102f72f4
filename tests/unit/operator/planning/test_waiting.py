"""Free GPUs first, then all that there are: what waits, what is preferred, and what is refused."""

from __future__ import annotations

from dataclasses import replace

from millstream_operator.catalog.gpu_names import parse_island
from millstream_operator.inventory.node_kinds import Inventory, inventory_of
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.facts_hash import facts_hash
from millstream_operator.planning.plan import Infeasible, Plan
from millstream_operator.planning.planner import decide
from tests.unit.operator.planning.cases import CASES, CATALOG, DEFAULTS

CASE = CASES["8b-awq-startup-a100-40gb"]  # 8B in 4 bit: any of these holds it
OWNER = CASE.deployment()


def stock(*islands: str) -> Inventory:
    return inventory_of(parse_island(CATALOG, text) for text in islands)


def facts(free: Inventory, everything: Inventory) -> Facts:
    return replace(CASE.facts(), inventory=free, capacity=everything)


def planned(free: Inventory, everything: Inventory) -> Plan:
    found = decide(OWNER, DEFAULTS, facts(free, everything))
    assert isinstance(found, Plan)
    return found


def test_what_is_free_comes_before_what_is_better_and_taken() -> None:
    plan = planned(stock("A100-40GB:1"), stock("A100-40GB:1", "L4:4"))
    assert (plan.product, plan.waits, plan.preferred) == ("A100-40GB", False, "1×L4-24GB TP1 AWQ")


def test_the_preferred_plan_is_not_named_where_it_is_the_plan() -> None:
    plan = planned(stock("L4:1"), stock("A100-40GB:1", "L4:4"))
    assert (plan.product, plan.waits, plan.preferred) == ("L4-24GB", False, None)


def test_where_nothing_is_free_it_waits_for_the_cheapest() -> None:
    plan = planned(stock(), stock("A100-40GB:1", "L4:4"))
    assert (plan.product, plan.waits, plan.preferred) == ("L4-24GB", True, None)
    assert (plan.reasons[0].field, "room for 0 now" in plan.reasons[0].reason) == ("inventory", True)


def test_what_would_not_fit_an_empty_cluster_is_infeasible_on_all_its_gpus() -> None:
    case = CASES["no-memory-70b-on-one-a100"]
    known = replace(case.facts(), inventory=stock(), capacity=stock("A100-80GB:1"))
    found = decide(case.deployment(), DEFAULTS, known)
    assert isinstance(found, Infeasible)
    assert found.constraint == "memory"
    assert any(fix.value == "A100-80GB:4" for fix in found.fixes)


def test_without_explanations_the_choice_is_the_same() -> None:
    known = facts(stock("A100-40GB:1"), stock("A100-40GB:1", "L4:4", "T4:1"))
    long, short = decide(OWNER, DEFAULTS, known), decide(OWNER, DEFAULTS, known, explain=False)
    assert isinstance(long, Plan)
    assert isinstance(short, Plan)
    assert replace(long, rejected=()) == replace(short, rejected=())


def test_the_hash_of_facts_is_of_all_gpus_of_prices_and_of_the_shape() -> None:
    everything = stock("A100-40GB:1", "L4:4")
    base = facts_hash(facts(stock("L4:1"), everything))
    assert facts_hash(facts(stock(), everything)) == base
    assert facts_hash(facts(stock("L4:1"), stock("L4:4"))) != base
    assert (
        facts_hash(replace(facts(stock(), everything), shape=CASES["no-memory-70b-on-one-a100"].facts().shape)) != base
    )
    assert planned(stock("L4:1"), everything).facts_hash == base
