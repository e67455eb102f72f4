"""Bytes of weights: by format, and by what one rank holds of them. Integers throughout, so plans never differ.

AWQ, GPTQ, RTN   bits a weight, and for each group of weights a 16-bit scale and a zero point of `bits`
FP8, INT8        one byte a weight and a 32-bit scale for each output, or for each block
NF4              4 bits a weight and a 32-bit scale for 64 weights (arXiv 2305.14314; double quantisation is undone when
                 it is loaded); where rows are no multiple of 64 long, scales of shorter groups
GGUF             the blocks of the file; where it is not known Q4_K_M: 4.85 bits a weight, as llama.cpp reports it
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from millstream_operator.catalog.checkpoint_quantization import (
    DEFAULT_GROUP_SIZE,
    gguf_quantized_bytes,
    gguf_quantized_elements,
)
from millstream_operator.catalog.model_shape import ModelShape

SCALE_BYTES = 2
NF4_BLOCK = 64


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How the linear layers are stored. Embeddings, head, norms and routers have the dtype that is computed in."""

    method: str = "None"
    bits: int = 16
    group_size: int | None = None
    millibits: int = 4850  # GGUF: thousandths of a bit a weight, scales included
    inputs_per_output: int = 4096  # FP8 and INT8: weights per scale; of the small models that a CPU serves, fewer


def weight_format(shape: ModelShape, method: str) -> WeightFormat:
    """The format of a method; a checkpoint that is stored in it already says its own bits and group."""
    stored = shape.quantization
    if stored is not None and stored.method == method == "GGUF":
        bits = 8 * gguf_quantized_bytes(stored.elements)
        return WeightFormat(method, stored.bits, None, bits * 1000 // gguf_quantized_elements(stored.elements))
    if stored is not None and stored.may_be(method):
        group_size = (
            gcd(NF4_BLOCK, shape.hidden_size, *shape.intermediate_sizes) if method == "NF4" else stored.group_size
        )
        return WeightFormat(method, stored.bits, group_size)
    if method == "GGUF" and stored is None and shape.is_gguf:
        return WeightFormat("None", 8 * shape.compute_bytes, None)  # a file of plain numbers
    if method in ("AWQ", "GPTQ", "RTN"):
        return WeightFormat(method, 4, DEFAULT_GROUP_SIZE)
    if method == "NF4":
        return WeightFormat(method, 4, NF4_BLOCK)
    if method in ("FP8", "INT8"):
        return WeightFormat(method, 8, None)
    if method == "GGUF":
        return WeightFormat(method, 4, None)
    return WeightFormat("None", 8 * shape.compute_bytes, None)


def linear_bytes(parameters: int, stored: WeightFormat) -> int:
    """Return the bytes of `parameters` weights of linear layers, scales and zero points included."""
    if stored.method == "GGUF":
        return parameters * stored.millibits // 8000
    if stored.method == "NF4":
        return parameters // 2 + parameters // (stored.group_size or NF4_BLOCK) * 4
    weights = parameters * stored.bits // 8
    if stored.method in ("AWQ", "GPTQ", "RTN", "INT8") and stored.group_size:
        groups = -(-parameters // stored.group_size)
        return weights + groups * SCALE_BYTES + groups * stored.bits // 8
    if stored.method in ("FP8", "INT8"):
        return weights + parameters // stored.inputs_per_output * 4
    return weights


def inputs_per_output(shape: ModelShape) -> int:
    """Return the inputs of a linear module, the mean over all outputs: an attention's modules read the hidden states,
    two of three of an MLP do, too."""
    hidden, parameters = shape.hidden_size, shape.parameters
    outputs = parameters.attention / hidden
    for weights, width in _mlp_weights(shape):
        outputs += weights * (2 * width + hidden) / (3 * width * hidden)
    return max(1, round(parameters.linear / outputs))


def inputs_of_modules(shape: ModelShape) -> int:
    """Return the inputs of all linear modules, of each module its own: what GPTQ's `g_idx` has a number for."""
    hidden = shape.hidden_size
    inputs = shape.num_layers * (3 * hidden + shape.num_heads * shape.head_size)
    return inputs + sum(
        weights // (3 * width * hidden) * (2 * hidden + width) for weights, width in _mlp_weights(shape)
    )


def _mlp_weights(shape: ModelShape) -> list[tuple[int, int]]:
    """Weights and width of the dense MLPs, and of the experts."""
    if not shape.intermediate_sizes:
        return []
    parameters = shape.parameters
    return [(parameters.mlp, shape.intermediate_sizes[0]), (parameters.experts, shape.intermediate_sizes[-1])]


@dataclass(frozen=True, slots=True)
class RankWeights:
    """What one GPU holds, in bytes. `experts_bytes` is the part of `linear_bytes` that belongs to routed experts."""

    linear_bytes: int
    experts_bytes: int
    embeddings_bytes: int
    head_bytes: int  # what one step reads of the embedding side: the head alone

    @property
    def total_bytes(self) -> int:
        return self.linear_bytes + self.embeddings_bytes


def rank_weights(shape: ModelShape, stored: WeightFormat, tensor: int = 1, pipeline: int = 1) -> RankWeights:
    """The fullest rank of `tensor` × `pipeline` GPUs."""
    p = shape.parameters
    copied = shape.kv_projection_parameters * shape.kv_heads_per_rank(tensor) // shape.num_kv_heads
    cut = p.linear - shape.kv_projection_parameters - shape.replicated_attention_parameters
    linear = -(-cut // tensor) + copied + shape.replicated_attention_parameters
    plain = _unquantized(shape, stored, linear)
    layers = -(-shape.num_layers // pipeline)  # of the fullest stage
    small_bytes = (p.norms + p.routers) * shape.compute_bytes
    rows = -(-shape.padded_vocab_size // tensor)
    table_bytes = rows * shape.hidden_size * shape.compute_bytes
    tables = 2 if p.head and pipeline == 1 else 1  # with several stages the first has the embedding, the last the head

    def of_stage(amount: int) -> int:
        return amount * layers // shape.num_layers

    return RankWeights(
        linear_bytes=of_stage(linear_bytes(linear - plain, stored) + plain * shape.compute_bytes + small_bytes),
        experts_bytes=of_stage(linear_bytes(p.experts // tensor, stored)),
        embeddings_bytes=tables * table_bytes,
        head_bytes=table_bytes,
    )


def _unquantized(shape: ModelShape, stored: WeightFormat, linear: int) -> int:
    """Of a rank's `linear` weights, those that the checkpoint keeps in its own width: the same share on each rank."""
    if shape.quantization is None or not shape.quantization.may_be(stored.method) or not shape.parameters.linear:
        return 0
    return -(-shape.unquantized_parameters * linear // shape.parameters.linear)
