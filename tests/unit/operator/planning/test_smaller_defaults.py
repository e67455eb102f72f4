"""Defaults that shrink where the model fits nowhere with them: which ones, in which order, and what the plan says."""

from __future__ import annotations

from millstream_operator.planning.facts import CHOOSABLE
from millstream_operator.planning.plan import Infeasible, Plan
from millstream_runtime.config import CAPABILITIES
from tests.unit.operator.planning.cases import LLAMA_8B, LLAMA_70B, Case

LLAMA_8B_LONG = "meta-llama/Llama-3.1-8B-Instruct"
L4, A100 = ("L4:1",), ("A100-80GB:1",)


def plan_of(repository: str, gpus: tuple[str, ...], spec: str = "") -> Plan | Infeasible:
    return Case(repository, gpus, spec, runtime=CAPABILITIES, choosable=CHOOSABLE).plan()


def planned(repository: str, gpus: tuple[str, ...], spec: str = "") -> Plan:
    found = plan_of(repository, gpus, spec)
    assert isinstance(found, Plan), found
    return found


def why(plan: Plan, field: str) -> str:
    return " ".join(reason.reason for reason in plan.reasons if reason.field == field)


def tokens(plan: Plan) -> int:
    assert plan.predicted is not None
    return plan.predicted.kv_cache_tokens


def test_eight_billion_on_one_l4_hold_fewer_than_four_requests() -> None:
    """16.1 GB of weights leave 4.2 GB of an L4; four requests of 8,192 tokens of 131,072 bytes are 4.3 GB."""
    plan = planned(LLAMA_8B, L4)
    assert (plan.summary, plan.engine.max_model_len_tokens) == ("1×L4-24GB TP1 BF16", 8192)
    assert 8192 <= tokens(plan) < 4 * 8192
    assert "one request of 8,192 tokens" in why(plan, "memory")


def test_a_long_context_on_one_a100_needs_room_for_one_request() -> None:
    plan = planned(LLAMA_8B_LONG, A100, "engine: {maxModelLen: 131072}")
    assert 131_072 <= tokens(plan) < 4 * 131_072


def test_steps_shrink_next() -> None:
    """Tier Mid: steps of 32,768 tokens take gigabytes of an L4."""
    plan = planned(LLAMA_8B, L4, "tier: Mid")
    assert (plan.engine.max_num_batched_tokens, plan.engine.max_num_seqs) == (2048, 64)
    assert "2,048 instead of 32,768" in why(plan, "engine.maxNumBatchedTokens")


def test_steps_that_fit_stay_as_they_are() -> None:
    plan = planned(LLAMA_8B, A100, "tier: Mid")
    assert (plan.engine.max_num_batched_tokens, why(plan, "memory")) == (32768, "")


def test_the_context_shrinks_last_and_as_little_as_may_be() -> None:
    """80 % of an L4 hold 2.4 GB less than 90 %: fewer tokens than the 16,384 of RAG. Lengths are multiples of 256."""
    plan = planned(LLAMA_8B_LONG, L4, "workload: {profile: RAG}\nengine: {gpuMemoryUtilizationPercent: 80}")
    length = plan.engine.max_model_len_tokens
    assert length == tokens(plan) // 256 * 256 < 16_384
    assert f"{length:,} instead of 16,384" in why(plan, "engine.maxModelLen")
    assert plan.engine.gpu_memory_utilization_percent == 80, "given"


def test_what_the_spec_gives_does_not_shrink() -> None:
    found = plan_of(LLAMA_8B_LONG, L4, "engine: {maxModelLen: 65536}")
    assert isinstance(found, Infeasible)
    assert "65536 tokens need 8.6 GB" in found.message


def test_the_message_names_what_the_smallest_defaults_lack() -> None:
    found = plan_of(LLAMA_70B, A100)
    assert isinstance(found, Infeasible)
    assert "1280 tokens need" in found.message, "a usual request of 1,250 tokens"
