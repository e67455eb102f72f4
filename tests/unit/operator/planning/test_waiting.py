"""Free GPUs first, then all that there are: what waits, what is preferred, and what is refused."""

from __future__ import annotations

from dataclasses import asdict, replace

from millstream_operator.catalog.gpu_names import parse_island
from millstream_operator.catalog.model_shape import Parameters
from millstream_operator.inventory.node_kinds import Inventory, inventory_of
from millstream_operator.planning.facts import CHOOSABLE, EVERYTHING, Facts
from millstream_operator.planning.facts_hash import facts_hash
from millstream_operator.planning.plan import Infeasible, Plan
from millstream_operator.planning.planner import decide
from millstream_runtime.config import CAPABILITIES
from tests.unit.operator.planning.cases import CASES, CATALOG, DEFAULTS, Case

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


def test_what_waits_and_runs_comes_before_what_is_free_and_cannot_run() -> None:
    """70B needs four A100 that share layers. Two nodes with two free ones would do as stages, which no runtime has.

    85 % of two are 136 GB, and the weights take 141.
    """
    share = "engine: {gpuMemoryUtilizationPercent: 85}"
    case = replace(CASES["no-memory-70b-on-one-a100"], spec=share, runtime=CAPABILITIES, choosable=CHOOSABLE)
    halves, whole = stock("A100-80GB:2", "A100-80GB:2"), stock("A100-80GB:4", "A100-80GB:4")
    found = decide(case.deployment(), DEFAULTS, replace(case.facts(), inventory=halves, capacity=whole))
    assert isinstance(found, Plan)
    assert (found.summary, found.waits, found.requires) == ("4×A100-80GB TP4 BF16", True, ())


def test_free_gpus_with_room_for_one_request_come_before_waiting_for_room_for_four() -> None:
    case = replace(CASES["no-memory-70b-on-one-a100"], runtime=CAPABILITIES, choosable=CHOOSABLE)
    known = replace(case.facts(), inventory=stock("A100-80GB:2"), capacity=stock("A100-80GB:4"))
    found = decide(case.deployment(), DEFAULTS, known)
    assert isinstance(found, Plan)
    assert (found.summary, found.waits) == ("2×A100-80GB TP2 BF16", False)


def test_waiting_comes_before_a_context_that_clients_would_notice() -> None:
    """80 % of an L4 hold fewer than the 16,384 tokens of RAG; the A100, which is taken, holds them."""
    spec = "workload: {profile: RAG}\nengine: {gpuMemoryUtilizationPercent: 80}"
    case = Case("meta-llama/Llama-3.1-8B-Instruct", spec=spec, runtime=CAPABILITIES, choosable=CHOOSABLE)
    known = replace(case.facts(), inventory=stock("L4:1"), capacity=stock("A100-80GB:1", "L4:1"))
    found = decide(case.deployment(), DEFAULTS, known)
    assert isinstance(found, Plan)
    assert (found.product, found.waits, found.engine.max_model_len_tokens) == ("A100-80GB", True, 16_384)


def test_stages_that_cannot_run_are_no_plan_where_a_fix_helps() -> None:
    """28 GB of weights fit on three L4 of 23 GB as stages alone: three nodes with one each are refused, with fixes."""
    spec = "quantization: {method: None}"
    case = Case("Qwen/Qwen2.5-14B-Instruct", spec=spec, runtime=CAPABILITIES, choosable=CHOOSABLE)
    three = replace(case.facts(), inventory=stock("L4:1", "L4:1", "L4:1"))
    found = decide(case.deployment(), DEFAULTS, three)
    assert isinstance(found, Infeasible)
    assert found.requires == ()
    assert "gpus" in {fix.field for fix in found.fixes}
    later = decide(case.deployment(), DEFAULTS, replace(three, choosable=EVERYTHING))
    assert isinstance(later, Plan)
    assert "PP" in later.summary, "--ignore-runtime-limits still plans it"


def test_what_no_fix_helps_is_shown_with_what_the_runtime_lacks() -> None:
    """6.5 TB in 16 bit, and half of it in FP8, fit on no eight GPUs of the catalogue."""
    case = Case("meta-llama/Llama-3.1-405B-Instruct", runtime=CAPABILITIES, choosable=CHOOSABLE)
    shape = case.facts().shape
    assert shape is not None
    eightfold = Parameters(**{name: 8 * count for name, count in asdict(shape.parameters).items()})
    large = replace(shape, num_layers=8 * shape.num_layers, parameters=eightfold)
    nodes = stock(*["B300-288GB:8"] * 4)
    found = decide(case.deployment(), DEFAULTS, replace(case.facts(), shape=large, inventory=nodes))
    assert isinstance(found, Plan)
    assert found.requires
    assert found.requires[0].startswith("pipelineParallelSize=")


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


def test_a_size_that_cannot_run_is_refused_with_what_helps() -> None:
    """Three nodes hold the three stages that the spec insists on, and no runtime of this version has stages."""
    spec = "parallelism: {pipeline: 3}"
    case = Case("meta-llama/Meta-Llama-3-8B-Instruct", ("L4:1",) * 3, spec, runtime=CAPABILITIES, choosable=CHOOSABLE)
    found = case.plan()
    assert isinstance(found, Infeasible)
    assert "pipelineParallelSize=3" in found.message
    assert "parallelism" in {fix.field for fix in found.fixes}
