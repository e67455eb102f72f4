"""The dtype in which a replica on a CPU holds weights that no format quantises. Pure.

    engine.dtype                                        what it names
    16-bit checkpoint, an image whose runtime can       its own 16 bits; products and all between layers are float32
    float32 checkpoint, any other image, not inspected  float32

A runtime holds 16 bits only if its boot configuration names them, so a plan of an earlier operator, whose boot.json
says `auto`, keeps float32 for as long as its pods live. Keys and values are float32, or as `quantization.kvCache`
says.
"""

from __future__ import annotations

from dataclasses import replace

from millstream_operator.api.spec import Accelerator, AcceleratorType, Engine, LLMDeploymentSpec, Runtime
from millstream_operator.catalog.model_shape import ModelShape
from millstream_runtime.config import Capabilities, DType

WIDEST = "FP32"
_NAMES = {DType.FLOAT32: WIDEST, DType.BFLOAT16: "BF16", DType.FLOAT16: "FP16"}


def asked_dtype(spec: LLMDeploymentSpec) -> DType | None:
    """Return what `engine.dtype` names; None where it is absent or auto."""
    asked = (spec.engine or Engine()).dtype
    return None if asked is DType.AUTO else asked


def missing_dtype(spec: LLMDeploymentSpec, runtime: Capabilities) -> str | None:
    """Return the dtype that the spec asks for and this runtime does not hold; None where it lacks nothing."""
    asked = asked_dtype(spec)
    return None if asked is None or _NAMES[asked] in runtime.cpu_weight_dtypes else _NAMES[asked]


def cpu_dtype(spec: LLMDeploymentSpec, shape: ModelShape | None, runtime: Capabilities) -> str:
    """Return the dtype of weights on a CPU: BF16, FP16 or FP32.

    Of an image that the spec names it is not known whether its runtime widens 16 bits, so it is planned with float32.
    What a GGUF file does not quantise is counted in float32 in any case: that is the most that it takes.
    """
    if shape is not None and shape.is_gguf:
        return WIDEST
    if (asked := asked_dtype(spec)) is not None:
        return _NAMES[asked]
    if shape is None or (spec.runtime or Runtime()).image is not None:
        return WIDEST
    return shape.dtype if shape.dtype in runtime.cpu_weight_dtypes else WIDEST


def as_held(spec: LLMDeploymentSpec, shape: ModelShape, runtime: Capabilities) -> ModelShape:
    """Return the shape of a model with the dtype in which its weights are held; the same on a GPU."""
    return replace(shape, dtype=cpu_dtype(spec, shape, runtime)) if _is_on_cpu(spec) else shape


def draft_as_held(
    spec: LLMDeploymentSpec, target: ModelShape | None, draft: ModelShape, runtime: Capabilities
) -> ModelShape:
    """Return the shape of a draft with the dtype in which its weights are held; the same on a GPU.

    A draft model follows its own checkpoint where its target is held in 16 bits. A draft head reads the target's hidden
    states, which are float32.
    """
    if not _is_on_cpu(spec):
        return draft
    is_wide = draft.draft_head is not None or draft.is_gguf or cpu_dtype(spec, target, runtime) == WIDEST
    return replace(draft, dtype=WIDEST if is_wide or draft.dtype not in runtime.cpu_weight_dtypes else draft.dtype)


def _is_on_cpu(spec: LLMDeploymentSpec) -> bool:
    return (spec.accelerator or Accelerator()).type is AcceleratorType.CPU
