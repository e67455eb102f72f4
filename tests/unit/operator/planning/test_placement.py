"""Which product is chosen: the cheapest one that meets what is asked, with the defaults that fit on it."""

from __future__ import annotations

from millstream_operator.planning.facts import CHOOSABLE
from millstream_operator.planning.plan import Plan
from millstream_runtime.config import CAPABILITIES
from tests.unit.operator.planning.cases import LLAMA_8B, LLAMA_70B_AWQ, Case

LLAMA_8B_LONG = "meta-llama/Llama-3.1-8B-Instruct"


def planned(repository: str, gpus: tuple[str, ...], spec: str = "") -> Plan:
    found = Case(repository, gpus, spec, runtime=CAPABILITIES, choosable=CHOOSABLE).plan()
    assert isinstance(found, Plan), found
    return found


def why(plan: Plan, field: str) -> str:
    return " ".join(reason.reason for reason in plan.reasons if reason.field == field)


def test_a_cheap_gpu_with_room_for_one_request_comes_before_a_dear_one_with_room_for_four() -> None:
    plan = planned(LLAMA_8B, ("L4:1", "H100:1"))
    assert (plan.product, plan.engine.max_model_len_tokens) == ("L4-24GB", 8192)
    assert "4, the default, fit on no L4-24GB" in why(plan, "memory")
    assert any(
        rejected.summary == "1×H100-80GB TP1 BF16" and "Costs $" in rejected.reason for rejected in plan.rejected
    )


def test_what_is_asked_for_comes_before_the_price() -> None:
    """An L4 takes some 60 ms for each token of 8B in 16 bits: 16.1 GB at 300 GB/s."""
    plan = planned(LLAMA_8B, ("L4:1", "H100:1"), "objectives: {itl: {p95: 20ms}}")
    assert (plan.product, why(plan, "memory")) == ("H100-80GB", "")


def test_a_context_of_the_usual_length_comes_before_the_price() -> None:
    """80 % of an L4 hold fewer than the 16,384 tokens of RAG: a client would notice a shorter context."""
    spec = "workload: {profile: RAG}\nengine: {gpuMemoryUtilizationPercent: 80}"
    plan = planned(LLAMA_8B_LONG, ("L4:1", "A100-80GB:1"), spec)
    assert (plan.product, plan.engine.max_model_len_tokens) == ("A100-80GB", 16_384)


def test_more_of_a_cheap_gpu_come_before_one_dear_one() -> None:
    """70B in 4 bits: two A40 at $0.44 an hour cost less than one H100 at $6.88."""
    plan = planned(LLAMA_70B_AWQ, ("A40:2", "H100:1"))
    assert plan.summary == "2×A40-48GB TP2 AWQ"
