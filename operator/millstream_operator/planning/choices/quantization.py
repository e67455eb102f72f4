"""Choose the possible formats of weights and KV cache. A quantised checkpoint decides: lost bits do not come back.

Nothing is quantised silently where it hurts: code, mathematics and models under 13 billion parameters keep 16 bit (or
FP8) unless the spec names a method.
"""

from __future__ import annotations

from dataclasses import dataclass

from millstream_operator.api.workload import Profile
from millstream_operator.catalog.checkpoint_quantization import CheckpointQuantization
from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.planning.plan import PlanReason, Rejected
from millstream_operator.planning.resolved_spec import ResolvedSpec
from millstream_runtime.config import Capabilities
from millstream_runtime.quantization_config.scheme import ROUNDED_METHOD

SMALL_MODEL_PARAMETERS = 13_000_000_000
NEEDS_QUANTIZED_CHECKPOINT = ("AWQ", "GPTQ", "GGUF")
FOUR_BIT_SUMMARY = "AWQ weights"  # of the rejected alternative; `four_bit.py` puts figures in its place
ROUNDED_REASON = (
    f"The weights are rounded to {ROUNDED_METHOD} while they are loaded. No quality gate has judged the result: "
    "compare answers on your own data."
)
FOUR_BIT = ("AWQ", "GPTQ", "NF4", "RTN", "GGUF")


@dataclass(frozen=True, slots=True)
class Formats:
    """Methods to look at, the best for quality first. `problem`: the spec contradicts the checkpoint."""

    methods: tuple[str, ...]
    kv_cache: str
    reasons: tuple[PlanReason, ...]
    rejected: tuple[Rejected, ...] = ()
    problem: str | None = None


def choose_formats(
    resolved: ResolvedSpec, shape: ModelShape, choosable: Capabilities, runtime: Capabilities
) -> Formats:
    """Return the formats that spec and checkpoint allow.

    Args:
        choosable: what may be taken without being asked for.
        runtime: all that it can run.
    """
    kv_cache = "None" if resolved.kv_cache == "Auto" else resolved.kv_cache
    kv_reason = PlanReason(
        "kvCache",
        f"Keys and values stay in {8 * shape.compute_bytes} bit unless the spec names a format."
        if resolved.kv_cache == "Auto"
        else f"spec.quantization.kvCache asks for {kv_cache}.",
    )
    stored, asked = shape.quantization, resolved.method
    if stored is not None:
        problem = contradiction(asked, shape)
        groups = f", groups of {stored.group_size}" if stored.group_size else ""
        warning = _warning(stored.method, resolved, shape)
        whose = "The checkpoint's own quantization_config"
        if resolved.is_made:
            whose = "Made in the cluster with quantization.calibration"
        why = f"{whose}: {stored.bits} bit{groups}.{unnamed_method(stored, asked)}{warning}"
        return Formats((stored.named(asked),), kv_cache, (PlanReason("quantization", why), kv_reason), problem=problem)
    if is_plain_gguf(asked, shape):
        return Formats(("None",), kv_cache, (PlanReason("quantization", plain_gguf_reason(shape)), kv_reason))
    if asked != "Auto":
        rounded = f" {ROUNDED_REASON}" if may_round(resolved, runtime) and asked == ROUNDED_METHOD else ""
        why = f"spec.quantization.method asks for {asked}.{rounded}{_warning(asked, resolved, shape)}"
        problem = contradiction(asked, shape)
        return Formats((asked,), kv_cache, (PlanReason("quantization", why), kv_reason), problem=problem)
    online = ("FP8",) if "FP8" in choosable.online_quantization_methods else ()
    bits = f"{8 * shape.compute_bytes}-bit weights"
    why = f"The checkpoint holds {bits} and no method is named; the format that needs the fewest GPUs is taken."
    if shape.compute_bytes > 2:
        why = (
            "The runtime computes in FP32, because config.json names float32 or no dtype: twice the memory of 16 bit. "
            "No method is named; the format that needs the fewest GPUs is taken."
        )
    rejected = () if online else (Rejected("FP8 weights", _why_not_rounded(bits, resolved, runtime)),)
    return Formats(
        ("None", *online),
        kv_cache,
        (PlanReason("quantization", why), kv_reason),
        (*rejected, _four_bit(resolved, shape)),
    )


def may_round(resolved: ResolvedSpec, runtime: Capabilities) -> bool:
    """Whether the runtime would round 16 bits to FP8 while it loads them. A quality gate needs a folder to judge."""
    return ROUNDED_METHOD in runtime.rounded_quantization_methods and not resolved.is_made and not resolved.is_judged


def _why_not_rounded(bits: str, resolved: ResolvedSpec, runtime: Capabilities) -> str:
    if not may_round(resolved, runtime):
        return f"This runtime cannot bring {bits} into {ROUNDED_METHOD}."
    return (
        f"The {bits} can be rounded to {ROUNDED_METHOD} while they are loaded. No quality gate judges that, so it is "
        f"not chosen by itself: set quantization.method {ROUNDED_METHOD} to have it."
    )


def contradiction(asked: str, shape: ModelShape) -> str | None:
    """Return why the spec's method cannot be had of this checkpoint; None where nothing contradicts it."""
    if asked == "GGUF" and shape.gguf_left_out:
        start = "spec.quantization.method is GGUF, but the source holds *.safetensors, too"
        return f"{start}, and {gguf_left_out(shape)}"
    if shape.quantization is None or asked == "Auto" or shape.quantization.may_be(asked):
        return None
    return f"spec.quantization.method is {asked}, but the checkpoint is stored as {shape.quantization.words}"


def is_plain_gguf(asked: str, shape: ModelShape) -> bool:
    """Whether the spec asks for a GGUF file, and its weights are not quantized: then 16 or 32 bits are served."""
    return asked == "GGUF" and shape.is_gguf and shape.quantization is None


def plain_gguf_reason(shape: ModelShape) -> str:
    bits = 8 * shape.weight_bytes
    return f"spec.quantization.method asks for GGUF, and the weights of the GGUF file are of {bits} bit."


def gguf_left_out(shape: ModelShape) -> str:
    """Return that a GGUF file is not served, and how to serve it: the end of a sentence."""
    return (
        f"these are served, not {shape.gguf_left_out}. To serve that file, put it into a folder or image of its own, "
        "or name it in a repository as org/name:Q4_K_M, by a word of its name"
    )


def unnamed_method(stored: CheckpointQuantization, asked: str) -> str:
    """Return what a reason adds where a checkpoint does not say by which method it was made; "" where it does."""
    if not stored.stored_as:
        return ""
    named = stored.named(asked)
    origin = "spec.quantization.method says" if named == asked else "the plan calls them"
    return f" They are {stored.stored_as}; which method made them is not written there, and {origin} {named}."


def quality_risk(resolved: ResolvedSpec, shape: ModelShape) -> str | None:
    """Return why four bits may cost quality; None where they are known not to."""
    if resolved.profile in (Profile.CODE, Profile.MATH):
        return f"profile {resolved.profile}"
    if shape.parameters.total < SMALL_MODEL_PARAMETERS:
        return "models under 13 billion parameters"
    return None


def _four_bit(resolved: ResolvedSpec, shape: ModelShape) -> Rejected:
    if (why := quality_risk(resolved, shape)) is not None:
        return Rejected(FOUR_BIT_SUMMARY, f"4 bit costs quality with {why}; name quantization.method to have it.")
    return Rejected(FOUR_BIT_SUMMARY, "Needs a quantized checkpoint: name one as model.source.")


def _warning(method: str, resolved: ResolvedSpec, shape: ModelShape) -> str:
    why = quality_risk(resolved, shape)
    if why is None or method not in FOUR_BIT:
        return ""
    return f" Warning: 4 bit costs quality with {why}; compare answers on your own data."
