"""`config_groups` of compressed-tensors, what llm-compressor writes: one format for all groups. No torch.

    pack-quantized     integers of 4 or 8 bits in words; scales by output or group
    int-quantized      int8; scales by tensor, output or group. Activations of 8 bits in all groups or in none
    float-quantized    float8_e4m3; scales by tensor, output or block
    naive-quantized    either of these two, by the type of the weights: what llm-compressor wrote in 2024

Refused: sparse weights, NVFP4, MXFP4, and groups in different formats.
"""

from __future__ import annotations

from dataclasses import replace

from millstream_runtime.quantization_config.formats import PackedIntegersFormat, ScaledCodesFormat, StoredFormat
from millstream_runtime.quantization_config.settings import Settings

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
STRATEGIES = ("tensor", "channel", "group", "block")
NO_ORDER = ("", "weight", "static", "none")  # of `actorder`: the inputs keep their order in the file


def read_groups(settings: Settings) -> tuple[str, StoredFormat, tuple[str, ...]]:
    """Return the API's method, the format, and the modules that the groups name.

    Raises:
        RuntimeFailure: UnsupportedByRuntime or CheckpointInvalid, with field and value.
    """
    sparsity = settings.section("sparsity_config")
    if sparsity is not None and sparsity.text("format") not in ("", "dense"):
        raise sparsity.unsupported("format", sparsity.text("format"), "dense")
    groups = settings.sections("config_groups")
    if not groups:
        raise settings.invalid("config_groups", "missing; it must say how weights are stored")
    found = [_read_group(group, group.text("format") or settings.text("format")) for group in groups]
    if any(one != found[0] for one in found[1:]):
        raise settings.unsupported("config_groups", "in several formats", "one format for all layers")
    targets = tuple(name for group in groups for name in group.names("targets"))
    method, stored = found[0]
    if isinstance(stored, ScaledCodesFormat) and not stored.is_float and all(map(_has_int8_activations, groups)):
        stored = replace(stored, has_int8_activations=True)
    return method, stored, targets


def _read_group(group: Settings, packing: str) -> tuple[str, StoredFormat]:
    if packing not in FORMATS:
        raise group.unsupported("format", packing or "missing", ", ".join(FORMATS))
    weights = group.section("weights")
    if weights is None:
        raise group.invalid("weights", "missing; it must say how weights are stored")
    if packing == "naive-quantized":
        packing = "float-quantized" if weights.text("type") == "float" else "int-quantized"
    is_float = packing == "float-quantized"
    if weights.text("type") not in (("float",) if is_float else ("int", "")):
        raise weights.unsupported("type", weights.text("type"), "float" if is_float else "int")
    bits = weights.one_of(("num_bits",), (4, 8) if packing == "pack-quantized" else (8,))
    symmetric = weights.flag("symmetric", default=True)
    strategy = weights.text("strategy") or ("group" if weights.given("group_size") else "tensor")
    if packing == "pack-quantized":
        return _packed(weights, bits, strategy, symmetric)
    if not symmetric:
        raise weights.unsupported("symmetric", False, "true")
    return ("FP8" if is_float else "INT8"), _scaled(weights, strategy, is_float)


def _has_int8_activations(group: Settings) -> bool:
    activations = group.section("input_activations")
    return activations is not None and activations.text("type") in ("int", "") and activations.given("num_bits") == 8


def _packed(weights: Settings, bits: int, strategy: str, symmetric: bool) -> tuple[str, StoredFormat]:
    if strategy not in ("channel", "group"):
        raise weights.unsupported("strategy", strategy, "channel, group")
    order = weights.given("actorder")
    by_group = order is True or (isinstance(order, str) and order.lower() == "group")
    if not by_group and order not in (None, False) and str(order).lower() not in NO_ORDER:
        raise weights.unsupported("actorder", order, "group, weight, static")
    size = weights.group_size() if strategy == "group" else None
    return ("GPTQ" if bits == 4 else "INT8"), PackedIntegersFormat(bits, size, by_group, symmetric)


def _scaled(weights: Settings, strategy: str, is_float: bool) -> ScaledCodesFormat:
    if strategy not in STRATEGIES or (strategy == "block") > is_float:
        raise weights.unsupported("strategy", strategy, ", ".join(STRATEGIES if is_float else STRATEGIES[:3]))
    if strategy == "block":
        block = weights.block("block_structure")
        if block is None:
            raise weights.invalid("block_structure", "missing; it must be rows and columns of a block")
        return ScaledCodesFormat(is_float, *block, "weight_scale")
    outputs = None if strategy == "tensor" else 1
    return ScaledCodesFormat(is_float, outputs, weights.group_size() if strategy == "group" else None, "weight_scale")
