"""Weights of 16 and 32 bits that the runtime rounds to FP8 while it loads them: where, and what the model takes then.

    quantization.method FP8, a source of 16 or 32 bits, neither calibration nor qualityGate -> one byte per weight

A quality gate judges a folder, and there is none, so a spec with a gate names a quantized source or has one made.
"""

from __future__ import annotations

from dataclasses import replace

from millstream_operator.api.spec import LLMDeploymentSpec
from millstream_operator.catalog.checkpoint_quantization import CheckpointQuantization
from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.planning.choices.cpu_dtype import as_held
from millstream_operator.planning.made_model import BITS, asked_method, made_method
from millstream_runtime.config import Capabilities
from millstream_runtime.quantization_config.scheme import ROUNDED_METHOD


def is_judged(spec: LLMDeploymentSpec) -> bool:
    """Whether a quality gate must pass before a model of the spec serves."""
    return spec.quantization is not None and spec.quantization.quality_gate is not None


def is_rounded(spec: LLMDeploymentSpec, shape: ModelShape, runtime: Capabilities) -> bool:
    """Whether the runtime rounds the weights while it loads them."""
    return shape.quantization is None and may_be_rounded(spec, runtime)


def may_be_rounded(spec: LLMDeploymentSpec, runtime: Capabilities) -> bool:
    """Whether the runtime rounds them if the source has 16 or 32 bits."""
    return (
        asked_method(spec) == ROUNDED_METHOD
        and ROUNDED_METHOD in runtime.rounded_quantization_methods
        and made_method(spec) is None
        and not is_judged(spec)
    )


def as_loaded(spec: LLMDeploymentSpec, shape: ModelShape, runtime: Capabilities) -> ModelShape:
    """Return the shape with its weights as the runtime holds them; the same where it holds what is stored."""
    shape = as_held(spec, shape, runtime)
    if not is_rounded(spec, shape, runtime):
        return shape
    stored = CheckpointQuantization(ROUNDED_METHOD, BITS[ROUNDED_METHOD], None)
    # MLA's `kv_b_proj` is not computed as a linear layer, so it keeps its type.
    return replace(shape, quantization=stored, unquantized_parameters=shape.latent_up_parameters)
