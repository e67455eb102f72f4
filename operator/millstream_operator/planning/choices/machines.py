"""What a candidate means for sizing: the target model, and the draft model, on the GPUs of one replica."""

from __future__ import annotations

import functools
from dataclasses import replace

from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.planning.choices.candidates import Candidate, Question, correction_for
from millstream_operator.planning.sizing.memory_ledger import draft_token_bytes, kv_bytes_per_token
from millstream_operator.planning.sizing.roofline import Machine
from millstream_operator.planning.sizing.tensor_parallel import tensor_parallel_problem
from millstream_operator.planning.sizing.weights import RankWeights, rank_weights, weight_format


def target_machine(question: Question, candidate: Candidate) -> Machine:
    shape = question.shape
    layers = -(-shape.num_layers // candidate.pipeline)
    return Machine(
        part=candidate.stock.part,
        shape=shape,
        weights=_weights(shape, candidate.method, candidate.tensor, candidate.pipeline),
        method=candidate.method,
        tensor=candidate.tensor,
        pipeline=candidate.pipeline,
        kv_bytes=kv_bytes_per_token(shape, candidate.kv_cache, candidate.tensor, layers),
        over_nvlink=not candidate.over_pcie,
        correction=correction_for(question, candidate),
    )


def draft_machine(question: Question, candidate: Candidate) -> Machine | None:
    """The draft runs on the target's ranks where its heads allow it, else whole on every rank."""
    shape = question.draft_shape
    if question.speculation.method not in ("DraftModel", "EAGLE", "Medusa"):
        return None
    if shape is None:  # EAGLE and Medusa without a shape: a head of about one decoder layer of the target
        shape = _one_layer(question.shape)
    elif shape.draft_head is not None:
        shape = replace(shape, dtype=question.shape.dtype)  # a head computes as its target does
    method = question.draft_method or (shape.quantization.method if shape.quantization else "None")
    group = weight_format(shape, method).group_size
    shared = tensor_parallel_problem(shape, candidate.tensor, group) is None
    tensor = candidate.tensor if shared else 1
    return Machine(
        part=candidate.stock.part,
        shape=shape,
        weights=_weights(shape, method, tensor, 1),
        method=method,
        tensor=tensor,
        pipeline=1,
        kv_bytes=draft_token_bytes(shape, candidate.kv_cache, tensor),
        over_nvlink=candidate.stock.part.has_nvlink and tensor <= candidate.stock.island_size,
    )


@functools.lru_cache(maxsize=64)
def _one_layer(shape: ModelShape) -> ModelShape:
    p, layers = shape.parameters, shape.num_layers
    parameters = replace(
        p,
        embedding=0,
        head=0,
        attention=p.attention // layers,
        mlp=(p.mlp + p.experts) // layers,
        experts=0,
        routers=0,
        norms=p.norms // layers,
    )
    return replace(
        shape,
        num_layers=1,
        windowed_layers=(),
        parameters=parameters,
        vocab_size=1,
        num_experts=0,
        num_experts_per_token=0,
        kv_projection_parameters=shape.kv_projection_parameters // layers,
        replicated_attention_parameters=shape.replicated_attention_parameters // layers,
        quantization=None,
    )


@functools.lru_cache(maxsize=4096)
def _weights(shape: ModelShape, method: str, tensor: int, pipeline: int) -> RankWeights:
    return rank_weights(shape, weight_format(shape, method), tensor, pipeline)
