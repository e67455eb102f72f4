"""What one rank of several holds of the weights."""

from __future__ import annotations

from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.catalog.read_shape import read_shape
from millstream_operator.planning.sizing.weights import rank_weights, weight_format
from tests.support.known_models import known_config


def shape() -> ModelShape:
    """32 query heads and 8 key and value heads."""
    config = known_config("meta-llama/Meta-Llama-3-8B")
    assert config is not None
    return read_shape(config)


def test_ranks_that_share_a_kv_head_each_hold_its_projections() -> None:
    """16 ranks have copies of 8 heads, as the runtime loads them; all else is cut in 16 parts."""
    model = shape()
    plain = weight_format(model, "None")
    whole, part = (rank_weights(model, plain, ranks).linear_bytes for ranks in (1, 16))
    small_bytes = (model.parameters.norms + model.parameters.routers) * model.compute_bytes
    copied_bytes = model.kv_projection_parameters * model.compute_bytes
    assert part - small_bytes == (whole - small_bytes - copied_bytes) // 16 + copied_bytes // 8
