"""The layout of each stored format."""

from __future__ import annotations

from millstream_runtime.quantization.awq import AwqLayout
from millstream_runtime.quantization.gguf import GgufLayout
from millstream_runtime.quantization.gptq import GptqLayout
from millstream_runtime.quantization.nf4 import Nf4Layout
from millstream_runtime.quantization.packed_integers import PackedIntegersLayout
from millstream_runtime.quantization.rounded_while_loading import RoundedWhileLoadingLayout
from millstream_runtime.quantization.scaled_codes import ScaledCodesLayout
from millstream_runtime.quantization.unquantized import UNQUANTIZED
from millstream_runtime.quantization.weight_layout import WeightLayout
from millstream_runtime.quantization_config.formats import (
    AwqFormat,
    GgufFormat,
    GptqFormat,
    Nf4Format,
    PackedIntegersFormat,
    RoundedWhileLoadingFormat,
    ScaledCodesFormat,
    StoredFormat,
)


def layout_for(stored: StoredFormat | None) -> WeightLayout:
    """Return the layout of modules in a format; None: 16 or 32 bit."""
    match stored:
        case AwqFormat():
            return AwqLayout(stored.group_size)
        case GptqFormat():
            return GptqLayout(stored.bits, stored.group_size, stored.act_order, stored.zeros_minus_one)
        case PackedIntegersFormat():
            return PackedIntegersLayout(stored)
        case GgufFormat():
            return GgufLayout(stored.type_name)
        case Nf4Format():
            return Nf4Layout(stored.double_quant)
        case RoundedWhileLoadingFormat():
            return RoundedWhileLoadingLayout()
        case ScaledCodesFormat():
            return ScaledCodesLayout(stored)
        case None:
            return UNQUANTIZED
