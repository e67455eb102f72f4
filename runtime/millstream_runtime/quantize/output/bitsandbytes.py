"""bitsandbytes' NF4, as `transformers` saves it; see `quantization.nf4` for the tensors."""

from __future__ import annotations

from typing import Any

from millstream_runtime.quantization.nf4 import BLOCK, NF4_VALUES
from millstream_runtime.quantization_config.scheme import HEAD
from millstream_runtime.quantize.model_outline import LinearGroup, ModelOutline
from millstream_runtime.quantize.output.packing import ModuleChoice

FLOAT_BYTES, STATE_BYTES = 4, 96


class Nf4Packing:
    """Scales in float32, without double quantization."""

    def described(self) -> dict[str, object]:
        return {"bits": 4, "values": "NF4", "weights per scale": BLOCK}

    def fits(self, group: LinearGroup) -> bool:
        return group.num_inputs % 2 == 0

    def needs(self) -> str:
        return "inputs must be an even number"

    def planned_bytes(self, num_inputs: int, outputs: int) -> int:
        num_blocks = -(-num_inputs * outputs // BLOCK)
        return num_inputs * outputs // 2 + (num_blocks + len(NF4_VALUES)) * FLOAT_BYTES + STATE_BYTES

    def config(self, outline: ModelOutline, choice: ModuleChoice) -> dict[str, Any]:
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": False,
            "bnb_4bit_quant_storage": "uint8",
            "bnb_4bit_compute_dtype": "bfloat16",
            "llm_int8_skip_modules": [*choice.kept(outline), HEAD],
        }
