"""Why a placement is the one to take, in the words of `status.plan.reasons`. Pure."""

from __future__ import annotations

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.planning.choices.candidates import Outcome
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.plan import Plan, Reason
from millstream_operator.planning.resolved_spec import wishes_of


def placement_reasons(best: Outcome, deployment: LLMDeployment, facts: Facts) -> list[Reason]:
    candidate, shape = best.candidate, facts.shape
    assert shape is not None  # noqa: S101
    wishes = wishes_of(deployment.spec, shape)
    prediction = best.prediction
    pool = f"its KV pool holds {prediction.kv_cache_tokens:,} tokens" if prediction else ""
    need = f"at least {wishes.kv_floor_tokens:,} are wanted"
    if wishes.tensor is not None:
        why = f"spec.parallelism.tensor asks for {wishes.tensor}; {pool}."
    elif wishes.one_gpu:
        why = f"Tier Startup runs on one GPU; {pool}, {need}."
    else:
        why = f"The fewest GPUs that hold the model: {pool}, {need}."
    reasons = [Reason("parallelism.tensor", why)]
    if candidate.tensor > 1 and not candidate.stock.part.has_nvlink:
        reasons.append(
            Reason("parallelism.tensor", f"{candidate.stock.part.name} has no NVLink: layers are shared over PCIe.")
        )
    if candidate.pipeline > 1:
        reasons.append(Reason("parallelism.pipeline", "No tensor-parallel size in one island holds the model."))
    if wishes.has_load:
        reasons.append(
            Reason(
                "replicas",
                f"The load needs {best.replicas}, each 80 % busy; spec.replicas is {deployment.spec.replicas}.",
            )
        )
    if wishes.max_monthly_usd is not None and best.cost is not None:
        over = "over" if best.cost.monthly_usd > wishes.max_monthly_usd else "within"
        reasons.append(Reason("budget", f"${best.cost.monthly_usd:,} a month, {over} ${wishes.max_monthly_usd:,}."))
    return reasons


def engine_reasons(reasons: tuple[Reason, ...], best: Outcome, blind: Plan) -> list[Reason]:
    """Defaults that the latency objective made smaller say so."""
    shrunk = {
        "engine.maxNumBatchedTokens": (best.max_num_batched_tokens, blind.engine.max_num_batched_tokens),
        "engine.maxNumSeqs": (best.max_num_seqs, blind.engine.max_num_seqs),
    }
    found = []
    for reason in reasons:
        now, before = shrunk.get(reason.field, (0, 0))
        text = f"{now} instead of {before}, so that steps keep objectives.itl." if now < before else reason.reason
        found.append(Reason(reason.field, text))
    return found
