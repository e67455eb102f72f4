"""Why a placement is the one to take, in the words of `status.plan.reasons`. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from millstream_operator.catalog.efficiencies import efficiencies
from millstream_operator.planning.calibration import NO_CORRECTION, UNCHANGED_PERMILLE, Calibration, Correction
from millstream_operator.planning.choices.outcome import Outcome
from millstream_operator.planning.measurement import parts_of
from millstream_operator.planning.plan import PlanReason, Rejected
from millstream_operator.planning.resolved_spec import ResolvedSpec
from millstream_operator.planning.sizing.cost import price_caveat
from millstream_operator.planning.sizing.roofline import Prediction


def placement_reasons(
    best: Outcome, rejected: Sequence[Rejected], resolved: ResolvedSpec, spec_replicas: int
) -> list[PlanReason]:
    candidate = best.candidate
    prediction = best.prediction
    pool = f"its KV pool holds {prediction.kv_cache_tokens:,} tokens" if prediction else ""
    need = f"at least {resolved.kv_floor_tokens:,} are wanted"
    if resolved.tensor is not None:
        why = f"spec.parallelism.tensor asks for {resolved.tensor}; {pool}."
    elif resolved.one_gpu:
        why = f"Tier Startup runs on one GPU; {pool}, {need}."
    else:
        fewer = any(other.gpus_per_replica < candidate.gpus and other.monthly_usd is not None for other in rejected)
        gpus = f"{candidate.stock.part.name}, the cheapest product," if fewer else "GPUs"
        why = f"The fewest {gpus} that hold the model: {pool}, {need}."
    reasons = [PlanReason("parallelism.tensor", why)]
    if candidate.tensor > 1:
        reasons.append(PlanReason("parallelism.tensor", f"{_links(best)} predicted ITL {itl_text(best)}."))
    if candidate.pipeline > 1:
        reasons.append(PlanReason("parallelism.pipeline", "No tensor-parallel size in one node holds the model."))
    if resolved.has_load:
        reasons.append(
            PlanReason(
                "replicas",
                f"The load needs {best.replicas}, each 80 % busy; spec.replicas is {spec_replicas}.",
            )
        )
    if resolved.max_monthly_usd is not None and best.cost is not None:
        over = "over" if best.cost.monthly_usd > resolved.max_monthly_usd else "within"
        caveat = price_caveat(candidate.stock.part) if resolved.budget_is_enforced else ""
        words = f"${best.cost.monthly_usd:,} a month, {over} ${resolved.max_monthly_usd:,}.{caveat}"
        reasons.append(PlanReason("budget", words))
    return reasons


def _links(best: Outcome) -> str:
    """What the ranks talk over."""
    candidate, part = best.candidate, best.candidate.stock.part
    if not candidate.over_pcie:
        return f"All-reduces go over NVLink inside one island of {part.name};"
    if part.has_nvlink:
        island = f"NVLink joins {part.nvlink_island_size} {part.name}"
        return f"{island}, so all-reduces of {candidate.tensor} go over PCIe, the slowest link;"
    return f"{part.name} has no NVLink: layers are shared over PCIe;"


def itl_text(outcome: Outcome) -> str:
    """The predicted time between tokens of a busy replica, and with how many requests: layouts differ in that."""
    prediction = outcome.prediction
    assert prediction is not None  # noqa: S101 - the caller predicted
    requests = f"{prediction.concurrent_sequences} request{'s' if prediction.concurrent_sequences != 1 else ''}"
    return f"{prediction.itl_microseconds / 1000:.1f} ms with {requests} at once"


def engine_reasons(resolved: ResolvedSpec, best: Outcome) -> list[PlanReason]:
    """Limits that the latency objective made smaller say so."""
    shrunk = {
        "engine.maxNumBatchedTokens": (best.max_num_batched_tokens, resolved.max_num_batched_tokens),
        "engine.maxNumSeqs": (best.max_num_seqs, resolved.max_num_seqs),
    }
    found = []
    for reason in resolved.reasons:
        now, before = shrunk.get(reason.field, (0, 0))
        text = f"{now} instead of {before}, so that steps keep objectives.itl." if now < before else reason.reason
        found.append(PlanReason(reason.field, text))
    return found


def rate_reasons(best: Outcome) -> list[PlanReason]:
    """Whose rates predict, where the part was measured; nothing where they are assumed, as for all others."""
    part = best.candidate.stock.part.name
    if best.prediction is None or (found := efficiencies().of(part)).basis != "measured":
        return []
    return [PlanReason("predicted", f"By rates that were measured on {part}: {found.source}.")]


def calibration_reasons(best: Outcome, calibration: Calibration) -> list[PlanReason]:
    """What was measured of this placement, beside what was predicted; nothing where nothing was measured."""
    candidate, ledger = best.candidate, best.ledger
    correction = calibration.correction(candidate.stock.part.name, candidate.method, candidate.tensor)
    if candidate.pipeline > 1 or ledger is None or correction == NO_CORRECTION:
        return []
    words = []
    for part, corrected_bytes in parts_of(ledger).items():
        if (permille := correction.permille(part)) != UNCHANGED_PERMILLE:
            predicted_bytes = corrected_bytes * 1000 // permille
            bytes_words = f"{corrected_bytes / 1e9:.2f} GB, predicted {predicted_bytes / 1e9:.2f} GB"
            words.append(f"{part} {bytes_words} (× {permille / 1000:.2f})")
    where = f"{candidate.stock.part.name} TP{candidate.tensor}"
    reasons = [PlanReason("memory", f"Corrected by what this image measured on {where}: {'; '.join(words)}.")]
    times = _time_words(correction, best.prediction) if best.prediction is not None and correction.has_steps else ""
    said = [PlanReason("predicted", f"Corrected by what this image measured on {where}: {times}.")] if times else []
    return (reasons if words else []) + said


def _time_words(correction: Correction, prediction: Prediction) -> str:
    """Return the predicted latencies, each with its factor over the roofline."""
    running, itl = prediction.concurrent_sequences, prediction.itl_microseconds / 1000
    return (
        f"ITL {itl:.1f} ms with {running} requests (a step without its KV cache: the roofline's × "
        f"{correction.decode_factor(running):.2f}; of one request × {correction.decode_factor(1):.2f}), "
        f"TTFT {prediction.ttft_milliseconds} ms (× {correction.prefill_factor:.2f})"
    )
