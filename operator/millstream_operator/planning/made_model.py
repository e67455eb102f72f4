"""A model that the cluster quantizes itself: where it is written, and what it is like before it is there. Pure.

    spec.quantization.calibration, method AWQ     16-bit source -> /models/quantized/awq-0123456789 in model.cache

The folder is named by what it is made from, so that another source, method or dataset makes another folder, and a spec
that goes back finds the one that it had. The plan is made for the folder before it exists, by the shape of the source.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.model import ModelSource
from millstream_operator.api.spec import LLMDeploymentSpec
from millstream_operator.catalog.checkpoint_quantization import CheckpointQuantization
from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.sizing.weights import (
    NF4_BLOCK,
    inputs_of_modules,
    inputs_per_output,
    linear_bytes,
    weight_format,
)
from millstream_runtime.gguf.block_types import BLOCK_TYPES

QUANTIZED_FOLDER = "quantized"
HASH_LENGTH = 10
GROUP_SIZES = (128, 64, 32)  # tried in this order by `millstream quantize`
# spec.quantization.method -> what `millstream quantize` writes: RTN is written as AWQ.
STORED_AS: Mapping[str, str] = {"RTN": "AWQ"} | {one: one for one in ("AWQ", "GPTQ", "INT8", "FP8", "NF4", "GGUF")}
BITS = {"AWQ": 4, "GPTQ": 4, "INT8": 8, "FP8": 8, "NF4": 4, "GGUF": 4}
GROUP_INDEX_BYTES = 4  # of an input, in GPTQ's files
GGUF_TYPE = "Q4_K"  # of `millstream quantize --method gguf`
GGUF_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # that it writes


def made_method(spec: LLMDeploymentSpec) -> str | None:
    """Return the method that the cluster quantizes with; None where the source is served as it is."""
    quantization = spec.quantization
    method = quantization.method if quantization is not None else None
    if quantization is None or quantization.calibration is None or method is None:
        return None
    return method.value if method in STORED_AS else None


def asked_method(spec: LLMDeploymentSpec) -> str:
    """Return the format of the weights that the spec asks for, as a checkpoint stores it; `Auto`: it names none."""
    asked = ((spec.quantization.method if spec.quantization else None) or "Auto") + ""
    return STORED_AS[asked] if made_method(spec) is not None else asked


def made_path(owner: LLMDeployment, revision: str | None) -> str:
    """Return the folder below the model root. `revision`: what the source was resolved to."""
    method = made_method(owner.spec) or ""
    assert owner.spec.quantization is not None  # noqa: S101 - asked only where there is a method
    dataset = owner.spec.quantization.calibration
    named = {
        "source": named_source(owner, owner.spec.model.source, revision),
        "method": method,
        "dataset": dataset.model_dump(mode="json", by_alias=True, exclude_none=True) if dataset is not None else None,
    }
    return f"{QUANTIZED_FOLDER}/{method.lower()}-{digest(named)}"


def named_source(owner: LLMDeployment, source: ModelSource, revision: str | None) -> dict[str, Any]:
    """Return what names the weights of a source: not its token, and for a folder of the image the image."""
    named: dict[str, Any] = source.model_dump(mode="json", by_alias=True, exclude_none=True)
    named.get("huggingFace", {}).pop("tokenSecretRef", None)
    named.get("image", {}).pop("pullPolicy", None)
    if source.local is not None and owner.spec.runtime is not None and owner.spec.runtime.image is not None:
        named["runtimeImage"] = owner.spec.runtime.image
    return named | ({"revision": revision} if revision is not None else {})


def digest(named: object) -> str:
    """Return ten hex digits: equal for equal contents, on every machine."""
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:HASH_LENGTH]


def as_made(spec: LLMDeploymentSpec, facts: Facts) -> Facts:
    """Return the facts of the model as the pods will load it; unchanged where it is served as it is in the source."""
    method, shape = made_method(spec), facts.shape
    if method is None or facts.is_made or shape is None or shape.quantization is not None:
        return facts
    made = replace(_as_stored(shape, STORED_AS[method]), gguf_left_out="")
    return replace(facts, shape=made, checkpoint_bytes=None, is_made=True)


def _as_stored(shape: ModelShape, stored: str) -> ModelShape:
    """Return the shape in a format of `BITS`."""
    bits = BITS[stored]
    if stored == "GGUF":
        blocks = _gguf_elements(shape)
        quantization = CheckpointQuantization(stored, bits, None, elements=((GGUF_TYPE, blocks),))
        return replace(shape, quantization=quantization, unquantized_parameters=shape.parameters.linear - blocks)
    group = _group_size(shape) if stored in ("AWQ", "GPTQ") else None
    return replace(shape, quantization=CheckpointQuantization(stored, bits, NF4_BLOCK if stored == "NF4" else group))


def _gguf_elements(shape: ModelShape) -> int:
    """Return the weights of layers whose inputs are whole blocks; the others keep their type."""
    block, p = BLOCK_TYPES[GGUF_TYPE].block_elements, shape.parameters
    output = (p.attention - shape.kv_projection_parameters) // 2  # the output projection is as large as that of queries
    attention_width, mlp_width = shape.num_heads * shape.head_size, max(shape.intermediate_sizes)
    of_hidden = p.linear - output - p.mlp // 3
    parts = ((shape.hidden_size, of_hidden), (attention_width, output), (mlp_width, p.mlp // 3))
    return sum(count for inputs, count in parts if inputs % block == 0)


def as_four_bit(shape: ModelShape) -> ModelShape:
    """Return the shape of what `millstream quantize --method awq` makes of a model of 16 or 32 bits."""
    return replace(shape, quantization=CheckpointQuantization("AWQ", BITS["AWQ"], _group_size(shape)))


def made_problem(spec: LLMDeploymentSpec, facts: Facts) -> str | None:
    """Return why the source cannot be quantized; None where it can, or is not to be."""
    shape, method = facts.shape, made_method(spec)
    if method is None or facts.is_made or shape is None:
        return None
    stored = shape.quantization
    if stored is None and shape.is_gguf:
        return (
            "quantization.calibration quantizes *.safetensors, and the source is a GGUF file. Leave calibration out, "
            "or name the source that it was made from"
        )
    if stored is None:
        return _gguf_problem(shape) if method == "GGUF" else None
    words = stored.stored_as or f"{stored.method} with {stored.bits} bits"
    return (
        f"quantization.calibration quantizes a source of 16 or 32 bits, and this one is stored as {words}. "
        "Leave calibration out, or name the source that it was made from"
    )


def _gguf_problem(shape: ModelShape) -> str | None:
    """Return why no GGUF file is written of the model, which the Job would find out after its download."""
    if shape.family not in GGUF_FAMILIES:
        return (
            f"quantization.method GGUF makes files of {', '.join(GGUF_FAMILIES)}, and this model is a {shape.family}. "
            "Choose another method"
        )
    if any(window is not None for window, _ in shape.windowed_layers):
        return "quantization.method GGUF makes no file of a model with sliding windows. Choose another method"
    if _gguf_elements(shape) == 0:
        return (
            f"quantization.method GGUF packs layers whose inputs are multiples of "
            f"{BLOCK_TYPES[GGUF_TYPE].block_elements}, and this model has none. Choose another method"
        )
    return None


def weights_file_bytes(shape: ModelShape) -> int:
    """Return the bytes of a checkpoint's tensors: packed linear layers, the rest as in the source.

    Files hold what memory does not: GPTQ's `g_idx`, which numbers the group of each input, in any order of inputs.
    """
    if shape.quantization is None:
        return shape.parameters.total * shape.weight_bytes
    method = shape.quantization.method
    quantized = shape.parameters.linear - shape.unquantized_parameters
    rest_bytes = (shape.parameters.total - quantized) * shape.weight_bytes
    stored = replace(weight_format(shape, method), inputs_per_output=inputs_per_output(shape))
    index_bytes = GROUP_INDEX_BYTES * inputs_of_modules(shape) if method == "GPTQ" else 0
    return rest_bytes + linear_bytes(quantized, stored) + index_bytes


def _group_size(shape: ModelShape) -> int | None:
    """As `millstream quantize` chooses it: the largest that divides the inputs of every layer."""
    widths = (shape.hidden_size, shape.num_heads * shape.head_size, *shape.intermediate_sizes)
    common = math.gcd(*widths)
    return next((size for size in GROUP_SIZES if common % size == 0), GROUP_SIZES[-1])
