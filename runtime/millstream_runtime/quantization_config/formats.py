"""How a linear layer's weight can be stored, as far as the runtime loads it. Facts only, no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AwqFormat:
    """AutoAWQ's GEMM packing (Lin et al. 2023, arXiv 2306.00978): 4 bits, zero points. `group_size` None: a column."""

    group_size: int | None


@dataclass(frozen=True, slots=True)
class GptqFormat:
    """AutoGPTQ's and gptqmodel's packing (Frantar et al. 2022, arXiv 2210.17323)."""

    bits: int  # 4 or 8
    group_size: int | None  # None: one group per column
    act_order: bool  # `g_idx` must be there
    zeros_minus_one: bool  # the first version of the format stores zero points minus one


@dataclass(frozen=True, slots=True)
class PackedIntegersFormat:
    """compressed-tensors' `pack-quantized`."""

    bits: int  # 4 or 8
    group_size: int | None  # None: one group per output
    act_order: bool  # `weight_g_idx` must be there
    symmetric: bool  # no zero points


@dataclass(frozen=True, slots=True)
class GgufFormat:
    """Blocks of GGUF."""

    type_name: str  # of `gguf.block_types`


@dataclass(frozen=True, slots=True)
class Nf4Format:
    """bitsandbytes' NF4, blocks of 64 (Dettmers et al. 2023, arXiv 2305.14314)."""

    double_quant: bool  # scales are stored in 8 bits


@dataclass(frozen=True, slots=True)
class ScaledCodesFormat:
    """One 8-bit code per weight, and scales."""

    is_float: bool  # float8_e4m3; else int8
    scaled_outputs: int | None  # outputs that share a scale; 1: each has its own, None: all share one
    scaled_inputs: int | None  # inputs that share a scale; None: all
    scale_name: str  # the tensor, after the module's name
    scale_divisor: float = 1.0
    has_int8_activations: bool = False  # inputs are meant to be int8, too


@dataclass(frozen=True, slots=True)
class RoundedWhileLoadingFormat:
    """16 or 32 bits in the file, which become float8_e4m3 with a scale per output when they are loaded."""


# Methods of the API that make integers. Formats that are named after none of them do not say which it was.
INTEGER_METHODS = ("AWQ", "GPTQ", "RTN")
# As what a method may be stored that has no format of its own: `millstream quantize --method rtn` writes AWQ's.
ALSO_MADE_BY = {"AWQ": ("RTN",), "GPTQ": ("RTN",)}


def compressed_integers(bits: int) -> str:
    """The name of what compressed-tensors stores, for people."""
    *others, last = INTEGER_METHODS if bits == 4 else (f"INT{bits}", *INTEGER_METHODS)
    return f"{bits}-bit integers of compressed-tensors ({', '.join(others)} or {last})"


StoredFormat = (
    AwqFormat
    | GgufFormat
    | GptqFormat
    | PackedIntegersFormat
    | Nf4Format
    | RoundedWhileLoadingFormat
    | ScaledCodesFormat
)
