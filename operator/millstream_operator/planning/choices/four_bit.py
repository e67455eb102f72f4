"""Four bits beside 16: what they would save on the same GPUs, and what it takes to have them. Advice, never a choice.

16 bit is chosen, the model may be quantized -> the best placement in AWQ -> one rejected alternative, with figures
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.planning.choices.outcome import Outcome
from millstream_operator.planning.choices.placement import Choice, NoPlacement
from millstream_operator.planning.choices.placement_reasons import itl_text
from millstream_operator.planning.choices.quantization import FOUR_BIT_SUMMARY, quality_risk
from millstream_operator.planning.plan import Rejected
from millstream_operator.planning.resolved_spec import ResolvedSpec
from millstream_runtime.config import Capabilities

METHOD = "AWQ"
HOW = (
    ". To have it, set quantization.method AWQ with quantization.calibration and qualityGate, or name an AWQ "
    "checkpoint as model.source."
)
NOT_YET = ", and this version's runtime loads no AWQ weights on a GPU."


def may_advise(resolved: ResolvedSpec, shape: ModelShape) -> bool:
    """Whether four bits are worth a look: nothing is quantized or asked for, and the quality is known to hold."""
    return shape.quantization is None and resolved.method == "Auto" and quality_risk(resolved, shape) is None


def with_four_bits(
    rejected: Sequence[Rejected], best: Outcome, found: Choice | NoPlacement, runtime: Capabilities
) -> tuple[Rejected, ...]:
    """Return the alternatives with the figures of four bits. `found`: the same question asked for AWQ."""
    if isinstance(found, NoPlacement):
        return tuple(rejected)
    line = _line(best, found.best, runtime)
    return tuple(line if one.summary == FOUR_BIT_SUMMARY else one for one in rejected)


def _line(best: Outcome, four: Outcome, runtime: Capabilities) -> Rejected:
    gpus, fewer = best.candidate.gpus, four.candidate.gpus
    itl = f"predicted ITL {itl_text(four)}, the choice's {itl_text(best)}"
    if fewer < gpus:
        needs = f"Needs {fewer} GPU{'s' if fewer > 1 else ''} per replica where the choice takes {gpus}; {itl}."
        how = HOW if METHOD in runtime.quantization_methods else NOT_YET
        reason = f"{needs} 4 bit is not chosen by itself{how}"
    else:
        reason = f"4 bit needs as many GPUs per replica as the choice, which keeps the model's quality; {itl}."
    cost, prediction = four.cost, four.prediction
    return replace(
        Rejected(four.candidate.summary, reason, fewer),
        monthly_usd=cost.monthly_usd if cost else None,
        ttft_milliseconds=prediction.ttft_milliseconds if prediction else None,
        itl_microseconds=prediction.itl_microseconds if prediction else None,
    )
