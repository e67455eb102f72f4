"""The code and the format of the method that was asked for."""

from __future__ import annotations

from millstream_runtime.quantize.methods.eight_bit import Fp8, Int8
from millstream_runtime.quantize.methods.four_bit import Awq, Gptq, RoundToNearest
from millstream_runtime.quantize.methods.gguf_rounding import GgufBlocks
from millstream_runtime.quantize.methods.layer_method import LayerMethod
from millstream_runtime.quantize.methods.nf4_rounding import Nf4
from millstream_runtime.quantize.output.bitsandbytes import Nf4Packing
from millstream_runtime.quantize.output.compressed_tensors import EightBitPacking
from millstream_runtime.quantize.output.gguf_packing import GgufPacking
from millstream_runtime.quantize.output.packing import AwqPacking, GptqPacking
from millstream_runtime.quantize.settings import ActivationScheme, Method, QuantizeSettings


def method_for(settings: QuantizeSettings, group_size: int) -> LayerMethod:
    """Return what quantizes layers; its `packing` is the format. `group_size`: for methods of 4 bits."""
    match settings.method:
        case Method.RTN:
            return RoundToNearest(AwqPacking(group_size))
        case Method.AWQ:
            return Awq(AwqPacking(group_size))
        case Method.GPTQ:
            return Gptq(GptqPacking(group_size, settings.act_order))
        case Method.INT8:
            return Int8(EightBitPacking(is_float=False, has_static_inputs=False))
        case Method.FP8:
            is_static = settings.activation_scheme is ActivationScheme.STATIC
            return Fp8(EightBitPacking(is_float=True, has_static_inputs=is_static))
        case Method.NF4:
            return Nf4(Nf4Packing())
        case Method.GGUF:
            return GgufBlocks(GgufPacking(settings.gguf_type))
