"""A budget that is enforced on an estimated price: the plan and the refusal say so."""

from __future__ import annotations

from dataclasses import replace

from millstream_operator.catalog.gpu import load_catalog
from millstream_operator.inventory.node_kinds import inventory_of
from millstream_operator.planning.facts import CHOOSABLE
from millstream_operator.planning.plan import Infeasible, Plan
from millstream_operator.planning.planner import decide
from millstream_runtime.config import CAPABILITIES
from tests.unit.operator.planning.cases import DEFAULTS, LLAMA_8B_AWQ, Case

SAID = "The price of A30-24GB is estimated (no large cloud lists it)"


def decided(budget: str, **own: object) -> Plan | Infeasible:
    """8B on one A30 at 0.50 dollars an hour: 365 a month. `own`: fields of a catalogue of one's own."""
    case = Case(LLAMA_8B_AWQ, ("A30:1",), f"budget: {{{budget}}}", runtime=CAPABILITIES, choosable=CHOOSABLE)
    catalog = load_catalog({"A30-24GB": own} if own else None)
    part = catalog.get("A30")
    assert part is not None
    return decide(
        case.deployment(), DEFAULTS, replace(case.facts(), catalog=catalog, inventory=inventory_of([(part, 1)]))
    )


def budget_reason(found: Plan | Infeasible) -> str:
    assert isinstance(found, Plan)
    return " ".join(reason.reason for reason in found.reasons if reason.field == "budget")


def test_an_enforced_budget_on_an_estimated_price_says_so() -> None:
    reason = budget_reason(decided("maxMonthlyUSD: 400"))
    assert reason.startswith("$365 a month, within $400. ")
    assert SAID in reason
    assert "catalog.gpus" in reason


def test_a_refusal_by_an_estimated_price_says_so() -> None:
    found = decided("maxMonthlyUSD: 300")
    assert isinstance(found, Infeasible)
    assert found.message.startswith("Costs $365 a month, and budget.maxMonthlyUSD is 300. ")
    assert SAID in found.message


def test_a_budget_that_only_observes_and_a_price_of_ones_own_need_no_word() -> None:
    assert "estimated" not in budget_reason(decided("maxMonthlyUSD: 400, enforcement: Observe"))
    assert budget_reason(decided("maxMonthlyUSD: 400", listPriceUSDPerHour=0.5)) == "$365 a month, within $400."


def test_a_spot_price_is_named_with_its_date() -> None:
    own = {"listPriceUSDPerHour": 0.5, "priceBasis": "spot", "priceDate": "2026-11-29"}
    assert "of 2026-11-29 is a spot price" in budget_reason(decided("maxMonthlyUSD: 400", **own))


def test_gpus_that_cost_nothing_are_within_any_budget() -> None:
    """As those of one's own may be. A million tokens cost nothing either."""
    found = decided("maxMonthlyUSD: 1", listPriceUSDPerHour=0)
    assert budget_reason(found) == "$0 a month, within $1."
    assert isinstance(found, Plan)
    assert found.cost is not None
    assert (found.cost.hourly_milli_usd, found.cost.monthly_usd, found.cost.per_million_tokens_milli_usd) == (0, 0, 0)


def test_of_a_gpu_that_costs_nothing_and_one_that_costs_little_the_first_is_taken() -> None:
    case = Case(LLAMA_8B_AWQ, ("A30:1", "H100:1"), "replicas: 1", runtime=CAPABILITIES, choosable=CHOOSABLE)
    assert planned_product(case, None) == "A30-24GB"
    assert planned_product(case, {"H100-80GB": {"listPriceUSDPerHour": 0}}) == "H100-80GB"


def planned_product(case: Case, own: dict[str, dict[str, object]] | None) -> str | None:
    """The GPU of the plan with prices of one's own."""
    catalog = load_catalog(own)
    parts = [part for part in (catalog.get(name) for name in ("A30", "H100")) if part is not None]
    known = replace(case.facts(), catalog=catalog, inventory=inventory_of((part, 1) for part in parts))
    found = decide(case.deployment(), DEFAULTS, known)
    assert isinstance(found, Plan)
    return found.product


def test_a_budget_pays_for_the_fewest_replicas_of_an_autoscaler() -> None:
    """An A30 costs $365 a month, so three cost $1,095; a budget of $800 pays for two."""
    spec = "budget: {maxMonthlyUSD: 800}\nautoscaling: {minReplicas: 3, maxReplicas: 4}"
    case = Case(LLAMA_8B_AWQ, ("A30:1",) * 4, spec, runtime=CAPABILITIES, choosable=CHOOSABLE)
    found = case.plan()
    assert isinstance(found, Infeasible)
    assert found.constraint == "budget"
    assert "for autoscaling.minReplicas 3" in found.message
    fields = {fix.field for fix in found.fixes}
    assert "budget.maxMonthlyUSD" in fields
    assert ("autoscaling.minReplicas", "2") in [(fix.field, fix.value) for fix in found.fixes]
