"""`quantization_config` of a config.json -> which modules are stored in which format. No torch: the operator reads it.

The planner refuses for a CPU what this refuses. Keys are read under all their spellings (`bits` | `w_bit`, `group_size`
| `q_group_size`, `modules_to_not_convert` | `ignored_layers` | `ignore` | `llm_int8_skip_modules`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from millstream_runtime.gguf.block_types import BLOCK_TYPES
from millstream_runtime.quantization_config import module_patterns
from millstream_runtime.quantization_config.compressed_tensors import read_groups
from millstream_runtime.quantization_config.formats import (
    ALSO_MADE_BY,
    INTEGER_METHODS,
    AwqFormat,
    GgufFormat,
    GptqFormat,
    Nf4Format,
    PackedIntegersFormat,
    RoundedWhileLoadingFormat,
    ScaledCodesFormat,
    StoredFormat,
    compressed_integers,
)
from millstream_runtime.quantization_config.settings import Settings

HEAD = "lm_head"
KEPT_FIELDS = ("ignore", "ignored_layers", "modules_to_not_convert", "llm_int8_skip_modules")
TARGETS_OF_GPTQ = "modules_in_block_to_quantize"
BITSANDBYTES_RANGE = 127.0  # SCB is the largest weight of a row
DEFAULT_OUTLIER_THRESHOLD = 6.0  # of bitsandbytes
ROUNDED_METHOD = "FP8"  # what weights of 16 and 32 bits can be rounded to while they are loaded


@dataclass(frozen=True, slots=True)
class QuantizationScheme:
    """How the linear layers of one checkpoint are stored."""

    method: str  # as the API names it: AWQ | GPTQ | FP8 | INT8 | NF4 | GGUF
    format: StoredFormat
    kept: tuple[str, ...] = ()  # modules of 16 bit: see `module_patterns`
    targets: tuple[str, ...] = ()  # the quantized modules; empty: all linear layers
    about: str = ""  # what the user is told when it is loaded
    by_module: Mapping[str, StoredFormat] | None = None  # where each has its own (GGUF); the others are 16 or 32 bit
    made_by: tuple[str, ...] = ()  # methods of the API besides `method` that may have made numbers stored so
    stored_as: str = ""  # in words, where `method` is a guess; "": weights of `method`

    def may_be(self, method: str) -> bool:
        """Whether the spec may call it so: how numbers are stored need not say which method chose them."""
        return method == self.method or method in self.made_by

    @property
    def is_rounded_while_loading(self) -> bool:
        """Whether the files hold 16 or 32 bits, which become `method` when they are loaded."""
        return isinstance(self.format, RoundedWhileLoadingFormat)

    @property
    def words(self) -> str:
        """What it holds, for messages."""
        return self.stored_as or f"{self.method} weights"

    def format_of(self, module: str) -> StoredFormat | None:
        """Of a linear layer by its name in the checkpoint; None: 16 or 32 bit."""
        if self.by_module is not None:
            return self.by_module.get(module)
        if module == HEAD or module_patterns.is_named(module, self.kept):
            return None
        return self.format if not self.targets or module_patterns.is_named(module, self.targets) else None


def read_scheme(quantization: Mapping[str, Any], source: str) -> QuantizationScheme:
    """Return the scheme of a `quantization_config`. `source`: the file, for messages.

    Lists of modules may be lists, or `{name: how often}` as `millstream inspect` shortens them.

    Raises:
        RuntimeFailure: UnsupportedByRuntime or CheckpointInvalid, with field and value.
    """
    settings = Settings(quantization, source, "quantization_config.")
    method = settings.text("quant_method")
    if method not in _READERS:
        raise settings.unsupported("quant_method", method or "missing", ", ".join(_READERS))
    scheme = _READERS[method](settings, settings.names(*KEPT_FIELDS))
    named = (*scheme.kept, *scheme.targets)
    if len(named) > module_patterns.MAX_PATTERNS:
        most = module_patterns.MAX_PATTERNS
        raise settings.invalid("ignore", f"a list of {len(named)} modules; at most {most} are read")
    if (pattern := module_patterns.unreadable(named)) is not None:
        raise settings.unsupported("ignore", pattern, "names of modules, and patterns of literals, `.*` and `(a|b)`")
    return scheme


def rounded_while_loading() -> QuantizationScheme:
    """Return the scheme of a model of 16 or 32 bits whose linear layers are rounded when they are loaded."""
    about = "weights of 16 or 32 bits are rounded while they are loaded, and no quality gate has judged the result"
    return QuantizationScheme(ROUNDED_METHOD, RoundedWhileLoadingFormat(), about=about)


def _read_awq(settings: Settings, kept: tuple[str, ...]) -> QuantizationScheme:
    settings.one_of(("bits", "w_bit"), (4,), default=4)
    version = settings.text("version") or "gemm"
    if version != "gemm":
        raise settings.unsupported("version", version, "gemm")
    settings.flag("zero_point", default=True)  # where it is false `qzeros` are there too, all 8 (gptqmodel)
    return QuantizationScheme("AWQ", AwqFormat(settings.group_size()), kept, made_by=ALSO_MADE_BY["AWQ"])


def _read_gptq(settings: Settings, kept: tuple[str, ...]) -> QuantizationScheme:
    bits = settings.one_of(("bits", "w_bit"), (4, 8))
    packing = settings.text("checkpoint_format") or settings.text("format") or "gptq"
    if packing not in ("gptq", "gptq_v2"):
        raise settings.unsupported("checkpoint_format", packing, "gptq, gptq_v2")
    for field in ("is_marlin_format", "lm_head"):
        if settings.flag(field, default=False):
            raise settings.unsupported(field, True, "false")
    if settings.given("dynamic"):
        raise settings.unsupported("dynamic", settings.given("dynamic"), "one setting for all modules")
    stored = GptqFormat(bits, settings.group_size(), settings.flag("desc_act", default=False), packing == "gptq")
    targets = settings.names(TARGETS_OF_GPTQ)
    return QuantizationScheme("GPTQ", stored, kept, targets, made_by=ALSO_MADE_BY["GPTQ"])


def _read_fp8(settings: Settings, kept: tuple[str, ...]) -> QuantizationScheme:
    """One scale per tensor, or per block of `weight_block_size`. The scheme of activations does not matter here."""
    number = settings.text("fmt") or "e4m3"
    if number not in ("e4m3", "float8_e4m3fn"):
        raise settings.unsupported("fmt", number, "e4m3")
    block = settings.block("weight_block_size")
    if block is None:
        return QuantizationScheme("FP8", ScaledCodesFormat(True, None, None, "weight_scale"), kept)
    return QuantizationScheme("FP8", ScaledCodesFormat(True, *block, "weight_scale_inv"), kept)


def _read_fbgemm_fp8(settings: Settings, kept: tuple[str, ...]) -> QuantizationScheme:
    """One scale per output."""
    return QuantizationScheme("FP8", ScaledCodesFormat(True, 1, None, "weight_scale"), kept)


def _read_bitsandbytes(settings: Settings, kept: tuple[str, ...]) -> QuantizationScheme:
    if settings.flag("load_in_4bit", default=False):
        return _read_nf4(settings, kept)
    threshold = settings.number("llm_int8_threshold", default=DEFAULT_OUTLIER_THRESHOLD)
    about = f"activations are not quantized, so llm_int8_threshold {threshold:g} sets no outliers apart"
    stored = ScaledCodesFormat(False, 1, None, "SCB", BITSANDBYTES_RANGE)
    return QuantizationScheme("INT8", stored, kept, about=about)


def _read_nf4(settings: Settings, kept: tuple[str, ...]) -> QuantizationScheme:
    if settings.flag("load_in_8bit", default=False):
        raise settings.invalid("load_in_8bit", "true, and load_in_4bit too; the weights are stored in one of them")
    for field, supported in (("bnb_4bit_quant_type", "nf4"), ("bnb_4bit_quant_storage", "uint8")):
        if (found := settings.text(field) or supported) != supported:
            raise settings.unsupported(field, found, supported)
    stored = Nf4Format(settings.flag("bnb_4bit_use_double_quant", default=False))
    return QuantizationScheme("NF4", stored, kept)


def _read_gguf(settings: Settings, kept: tuple[str, ...]) -> QuantizationScheme:
    """What `gguf.config_values` makes of a file's tensors; `modules` is left out of an inspection's answer."""
    modules = settings.words("modules", tuple(BLOCK_TYPES))
    elements = settings.counts("elements", tuple(BLOCK_TYPES))
    if not elements:
        raise settings.invalid("elements", "missing; it must say how many weights are stored in which type")
    most = max(elements, key=lambda name: elements[name])
    by_module = {module: GgufFormat(name) for module, name in modules.items()}
    return QuantizationScheme("GGUF", GgufFormat(most), by_module=by_module)


def _read_compressed_tensors(settings: Settings, kept: tuple[str, ...]) -> QuantizationScheme:
    method, stored, targets = read_groups(settings)
    scheme = QuantizationScheme(method, stored, kept, targets)
    if isinstance(stored, PackedIntegersFormat) or (isinstance(stored, ScaledCodesFormat) and not stored.is_float):
        bits = stored.bits if isinstance(stored, PackedIntegersFormat) else 8
        scheme = replace(scheme, made_by=INTEGER_METHODS, stored_as=compressed_integers(bits))
    if module_patterns.is_named(HEAD, targets) and not module_patterns.is_named(HEAD, kept):
        raise settings.unsupported("ignore", [*kept], f"lists with {HEAD}: a quantized output head is not read")
    return scheme


_READERS: dict[str, Callable[[Settings, tuple[str, ...]], QuantizationScheme]] = {
    "awq": _read_awq,
    "gptq": _read_gptq,
    "fp8": _read_fp8,
    "fbgemm_fp8": _read_fbgemm_fp8,
    "bitsandbytes": _read_bitsandbytes,
    "gguf": _read_gguf,
    "compressed-tensors": _read_compressed_tensors,
}
