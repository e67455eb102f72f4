"""`quantization_config` of a config.json -> how the checkpoint's weights are stored.

Both spellings of the field are read (`bits` | `w_bit`, `group_size` | `q_group_size`). A checkpoint that is already
quantised decides: nothing can give back the bits that it lost. What cannot be planned right is refused by name: formats
of 4-bit floating point (NVFP4, MXFP4), and layers in several formats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from millstream_operator.catalog.config_fields import ConfigFields, UnsupportedModelError
from millstream_runtime.errors import RuntimeFailure
from millstream_runtime.gguf.block_types import BLOCK_TYPES
from millstream_runtime.quantization_config.formats import ALSO_MADE_BY, INTEGER_METHODS, compressed_integers
from millstream_runtime.quantization_config.scheme import KEPT_FIELDS, TARGETS_OF_GPTQ, read_scheme
from millstream_runtime.quantization_config.settings import UnsupportedFormatError

DEFAULT_GROUP_SIZE = 128
MAX_PROBLEM_LENGTH = 100  # it becomes an item of status.plan.requires, of at most 128 characters
INSTEAD = "use the model's checkpoint in 16 bit or FP8"
FOUR_BIT_FLOATS = {"nvfp4": "NVFP4", "mxfp4": "MXFP4", "fp4": "FP4"}
Pattern = tuple[str, int | None]  # a module's name or pattern, and how many modules it stands for (None: not said)


@dataclass(frozen=True, slots=True)
class CheckpointQuantization:
    """`method` as the API names it; `group_size` counts weights along the input dimension, None: a row or block.

    `block_size`: rows and columns of a block that has a scale. `kept`: modules in 16 bit. `targets`: the quantised
    modules; empty: all linear layers. `double_quant`: the scales of NF4 are quantised, too.
    `problem`: why the runtime does not load the format; None: it does, if it loads the method.
    """

    method: str  # AWQ | GPTQ | FP8 | INT8 | NF4 | RTN | GGUF
    bits: int
    group_size: int | None
    block_size: tuple[int, int] | None = field(default=None, repr=False)
    kept: tuple[Pattern, ...] = field(default=(), repr=False)
    targets: tuple[Pattern, ...] = field(default=(), repr=False)
    double_quant: bool = field(default=False, repr=False)
    elements: tuple[tuple[str, int], ...] = field(default=(), repr=False)  # GGUF: how many linear weights of which type
    problem: str | None = field(default=None, repr=False)  # a field and its value
    made_by: tuple[str, ...] = field(default=(), repr=False)  # methods besides `method` that may have made it
    stored_as: str = field(default="", repr=False)  # in words, where `method` is a guess

    def may_be(self, method: str) -> bool:
        """Whether a spec may name `method`: how numbers are stored need not say which method chose them."""
        return method == self.method or method in self.made_by

    def named(self, asked: str) -> str:
        """The method that a plan names: the spec's own, where the checkpoint of 4 bits does not say it."""
        return asked if self.stored_as and self.bits == 4 and asked in self.made_by else self.method

    @property
    def words(self) -> str:
        """As what it is stored, for messages."""
        return self.stored_as or self.method


def read_quantization(config: Mapping[str, Any], source: str = "config.json") -> CheckpointQuantization | None:
    """None for a checkpoint of plain 16- or 32-bit weights.

    Raises:
        UnsupportedModelError: a method, or a mixture of formats, that the planner does not know.
        ConfigError: a number out of its range.
    """
    outer = ConfigFields(config, source)
    given = {one: outer.mapping(one) for one in ("quantization_config", "compression_config")}
    name, found = next(((name, values) for name, values in given.items() if values), (None, None))
    if name is None or found is None:
        return None
    quantization = _read(ConfigFields(found, source, f"{name}."), found)
    try:
        read_scheme(found, source)
    except UnsupportedFormatError as problem:
        return replace(quantization, problem=problem.what[:MAX_PROBLEM_LENGTH])
    except RuntimeFailure as problem:
        return replace(quantization, problem=problem.message[:MAX_PROBLEM_LENGTH])
    return quantization


def _read(fields: ConfigFields, found: Mapping[str, Any]) -> CheckpointQuantization:
    source, name = fields.source, fields.prefix.rstrip(".")
    method = str(found.get("quant_method", "")).lower()
    _refuse_four_bit_floats(fields, method, str(found.get("quant_algo", "")), str(found.get("format", "")))
    kept = tuple(pattern for listed in KEPT_FIELDS for pattern in _patterns(found.get(listed)))
    if method in ("awq", "gptq"):
        bits = _first(fields, 4, "bits", "w_bit")
        group = _group(fields, _first(fields, DEFAULT_GROUP_SIZE, "group_size", "q_group_size"))
        targets = tuple(_patterns(found.get(TARGETS_OF_GPTQ))) if method == "gptq" else ()
        made_by = ALSO_MADE_BY[method.upper()]
        return CheckpointQuantization(method.upper(), bits, group, kept=kept, targets=targets, made_by=made_by)
    if method in ("fp8", "fbgemm_fp8"):
        return CheckpointQuantization("FP8", 8, None, _block(fields, "weight_block_size"), kept)
    if method == "bitsandbytes":
        if not fields.flag("load_in_4bit"):
            return CheckpointQuantization("INT8", 8, None, kept=kept)
        double = fields.flag("bnb_4bit_use_double_quant")
        return CheckpointQuantization("NF4", 4, 64, kept=kept, double_quant=double)
    if method == "gguf":
        return _gguf(fields)
    if method in ("compressed-tensors", "sparseml"):
        return _compressed_tensors(fields, kept)
    raise UnsupportedModelError(
        f"{source}: {name}.quant_method is {method[:60] or 'missing'!r}; known are awq, gptq, fp8, bitsandbytes, "
        f"compressed-tensors and gguf, or {INSTEAD}."
    )


def _gguf(fields: ConfigFields) -> CheckpointQuantization:
    """What an inspection makes of the file's table of tensors. `bits`: the mean with scales, rounded."""
    given = fields.mapping("elements") or {}
    elements = tuple((name, given[name]) for name in sorted(given) if name in BLOCK_TYPES)
    is_readable = len(elements) == len(given) and all(type(one) is int and 0 < one < 1 << 48 for _, one in elements)
    quantized = gguf_quantized_elements(elements) if is_readable else 0
    if not quantized:
        known = ", ".join(BLOCK_TYPES)
        raise fields.contradiction(f"{fields.prefix}elements is {str(given)[:60]}; it must count weights by {known}")
    return CheckpointQuantization(
        "GGUF", round(gguf_quantized_bytes(elements) * 8 / quantized), None, elements=elements
    )


def gguf_quantized_elements(elements: Sequence[tuple[str, int]]) -> int:
    """Weights in blocks; the others are plain numbers."""
    return sum(count for name, count in elements if BLOCK_TYPES[name].is_quantized)


def gguf_quantized_bytes(elements: Sequence[tuple[str, int]]) -> int:
    """Of the weights in blocks."""
    return sum(BLOCK_TYPES[name].row_bytes(count) for name, count in elements if BLOCK_TYPES[name].is_quantized)


def _refuse_four_bit_floats(fields: ConfigFields, *words: str) -> None:
    """NVFP4 and MXFP4 have half the bytes of FP8 and other scales: to count them as FP8 is wrong twice."""
    for word in words:
        for mark, name in FOUR_BIT_FLOATS.items():
            if mark in word.lower().replace("_", "").replace("-", ""):
                where = f"{fields.source}: {fields.prefix.rstrip('.')}"
                raise UnsupportedModelError(f"{where} is {name}, which this version does not read; {INSTEAD}.")


def _compressed_tensors(fields: ConfigFields, kept: tuple[Pattern, ...]) -> CheckpointQuantization:
    groups = {str(name): group for name, group in (fields.mapping("config_groups") or {}).items()}
    read = {name: _of_group(fields, name, group) for name, group in groups.items()}
    formats = list(dict.fromkeys((one.method, one.bits, one.group_size, one.block_size) for one in read.values()))
    where = f"{fields.source}: {fields.prefix}config_groups"
    if not formats:
        raise UnsupportedModelError(f"{where} is missing, so the format of the weights is not known; {INSTEAD}.")
    if len(formats) > 1:
        words = " and ".join(f"{method} of {bits} bit" for method, bits, *_ in formats[:4])
        raise UnsupportedModelError(
            f"{where} holds layers in {len(formats)} formats ({words}); a model in one format is read: {INSTEAD}."
        )
    targets = tuple(pattern for one in read.values() for pattern in one.targets)
    method, bits, group_size, block = formats[0]
    found = CheckpointQuantization(method, bits, group_size, block, kept, targets)
    if method == "FP8":
        return found
    return replace(found, made_by=INTEGER_METHODS, stored_as=compressed_integers(bits))


def _of_group(fields: ConfigFields, name: str, group: object) -> CheckpointQuantization:
    where = f"{fields.prefix}config_groups."
    group = ConfigFields({name[:60]: group}, fields.source, where).mapping(name[:60]) or {}
    values = ConfigFields(group, fields.source, f"{where}{name[:60]}.").mapping("weights")
    if values is None:
        raise UnsupportedModelError(
            f"{fields.source}: {where}{name[:60]}.weights is missing or null, so the format of these weights is not "
            f"known; {INSTEAD}."
        )
    inner = ConfigFields(values, fields.source, f"{where}{name[:60]}.weights.")
    bits, kind = inner.integer("num_bits", 8), inner.text("type", "int")
    _refuse_four_bit_floats(fields, str(group.get("format", "")))
    if kind == "float" and bits == 4:
        _refuse_four_bit_floats(fields, "fp4")
    targets = tuple(_patterns(group.get("targets")))
    if kind == "float" and bits == 8:
        return CheckpointQuantization("FP8", 8, None, _block(inner, "block_structure"), targets=targets)
    if kind == "int" and bits == 4:
        default = -1 if inner.text("strategy") == "channel" else DEFAULT_GROUP_SIZE
        group_size = _group(inner, inner.integer("group_size", default))
        return CheckpointQuantization("GPTQ", 4, group_size, targets=targets)
    if kind == "int" and bits == 8:
        group_size = _group(inner, inner.integer("group_size", 1)) if values.get("group_size") else None
        return CheckpointQuantization("INT8", 8, group_size, targets=targets)
    raise UnsupportedModelError(
        f"{fields.source}: {inner.prefix.rstrip('.')} is {kind[:20]} of {bits} bit; known are int of 4 and 8 bit and "
        f"float of 8 bit, or {INSTEAD}."
    )


def _first(fields: ConfigFields, default: int, *names: str) -> int:
    """The first of `names` that is given."""
    given = next((name for name in names if fields.values.get(name) is not None), None)
    return default if given is None else fields.integer(given)


def _group(fields: ConfigFields, size: int) -> int | None:
    """-1 means one group per row; 0 means nothing."""
    if size == 0:
        raise fields.contradiction(f"{fields.prefix}group_size is 0; it must be -1 (one group per row) or 1 and more")
    return size if size > 0 else None


def _block(fields: ConfigFields, name: str) -> tuple[int, int] | None:
    value = fields.values.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise fields.contradiction(
            f"{fields.prefix}{name} is {str(value)[:60]}; it must be rows and columns of a block"
        )
    return fields.checked(name, value[0]), fields.checked(name, value[1])


def _patterns(value: object) -> list[Pattern]:
    """A name, a list of names or of such lists; or `{name: how often}`, as `millstream inspect` shortens a long one."""
    listed = value if isinstance(value, list) else [value]
    return [found for one in listed for inner in (one if isinstance(one, list) else [one]) for found in _named(inner)]


def _named(value: object) -> list[Pattern]:
    if isinstance(value, Mapping):
        return [(str(name), count if type(count) is int and count > 0 else None) for name, count in value.items()]
    return [] if value is None else [(str(value), None)]
