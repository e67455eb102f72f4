"""The condition `BelowPlan`: a pod has less KV cache than its plan promised. Pure.

Such a pod serves, with shorter requests or fewer at a time than planned. The figures are those of `status.memory`.
"""

from __future__ import annotations

from millstream_operator.diagnosis.conditions import BELOW_PLAN, Condition
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.status.memory_report import measured_memory
from millstream_operator.status.observation import Observation
from millstream_runtime.config import DEFAULT_BLOCK_SIZE_TOKENS
from millstream_runtime.kv_layout import MOST_BLOCKS

LEAST_PERCENT = 90  # of the planned bytes: below it the plan was not kept


def below_plan(observation: Observation) -> Condition | None:
    """Return the condition; None where the plan was kept, or either side is not known."""
    plan, measured = observation.revision.plan, measured_memory(observation)
    planned_bytes = (plan.get("memory") or {}).get("kvCacheBytes")
    if not planned_bytes or "kvCacheBytes" not in measured:
        return None
    held_bytes = measured["kvCacheBytes"] + measured.get("draftKvCacheBytes", 0)
    tokens, engine = measured.get("kvCacheTokens", 0), plan.get("engine") or {}
    if held_bytes * 100 >= planned_bytes * LEAST_PERCENT or tokens >= _most_tokens(engine):
        return None
    where, on_cpu = "GPU", plan.get("accelerator") == "CPU"
    do = "Another process may use the GPU; status.memory compares the parts, and a smaller engine.maxNumBatchedTokens"
    if on_cpu:
        where = "container"
        do = "Raise podTemplate.spec.containers[runtime].resources.limits.memory; a smaller engine.maxNumBatchedTokens"
    message = (
        f"The KV cache of a {where} is {held_bytes / 1e6:,.1f} MB, for {tokens:,} tokens; its plan promised "
        f"{planned_bytes / 1e6:,.1f} MB. {do} leaves more for it."
    )
    return Condition(BELOW_PLAN, True, Reason.KV_CACHE_BELOW_PLAN, message)


def _most_tokens(engine: dict[str, int]) -> int:
    """Tokens beyond which a pool is as large as the runtime makes one, however much memory there is."""
    by_blocks = MOST_BLOCKS * DEFAULT_BLOCK_SIZE_TOKENS
    length, requests = engine.get("maxModelLen"), engine.get("maxNumSeqs")
    return min(by_blocks, length * requests) if length and requests else by_blocks
