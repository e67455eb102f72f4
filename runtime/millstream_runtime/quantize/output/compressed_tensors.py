"""compressed-tensors' 8-bit formats, as llm-compressor writes them: `int-quantized` and `float-quantized`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from millstream_runtime.quantization_config.scheme import HEAD
from millstream_runtime.quantize.model_outline import LinearGroup, ModelOutline
from millstream_runtime.quantize.output.packing import ModuleChoice

SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class EightBitPacking:
    """`has_static_inputs`: the file has a scale for the activations of each module, and one for each weight."""

    is_float: bool
    has_static_inputs: bool

    def fits(self, group: LinearGroup) -> bool:
        return True

    def needs(self) -> str:
        return "sizes may be any"

    def planned_bytes(self, num_inputs: int, outputs: int) -> int:
        return num_inputs * outputs + SCALE_BYTES * (2 if self.has_static_inputs else outputs)

    def described(self) -> dict[str, object]:
        activations = "static scale per module" if self.has_static_inputs else "scaled per token by the server"
        scales = "per tensor" if self.has_static_inputs else "per output"
        return {"bits": 8, "scales of weights": scales, "activations": f"8 bits, {activations}"}

    def config(self, outline: ModelOutline, choice: ModuleChoice) -> dict[str, Any]:
        number = {"num_bits": 8, "type": "float" if self.is_float else "int", "symmetric": True}
        static = self.has_static_inputs
        group = {
            "targets": ["Linear"],
            "weights": number | {"strategy": "tensor" if static else "channel", "dynamic": False},
            "input_activations": number | {"strategy": "tensor" if static else "token", "dynamic": not static},
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized" if self.is_float else "int-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": [HEAD, *(f"re:.*{re.escape(one)}$" for one in (*choice.unfit, *choice.others))],
            "kv_cache_scheme": None,
        }
