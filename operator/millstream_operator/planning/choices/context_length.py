"""Whether the model allows requests of the length that a spec asks for, on a GPU and on a CPU alike."""

from __future__ import annotations

from millstream_operator.api.spec import Engine, LLMDeploymentSpec
from millstream_operator.catalog.model_shape import ModelShape


def length_problem(spec: LLMDeploymentSpec, shape: ModelShape) -> str | None:
    """Return why `engine.maxModelLen` is too long for the model, as the runtime would at boot; None where it is not."""
    asked, longest = (spec.engine or Engine()).max_model_len, shape.longest_context_tokens
    if asked is None or asked <= longest:
        return None
    return f"engine.maxModelLen is {asked}, and the model allows {longest} tokens"
