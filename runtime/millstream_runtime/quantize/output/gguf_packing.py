"""GGUF's block types as a format of `millstream quantize`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from millstream_runtime.gguf.block_types import BLOCK_TYPES, BlockType
from millstream_runtime.quantize.model_outline import LinearGroup, ModelOutline
from millstream_runtime.quantize.output.packing import ModuleChoice
from millstream_runtime.quantize.settings import GGUF_TYPES


@dataclass(frozen=True, slots=True)
class GgufPacking:
    """`type_name`: of a type that `methods/gguf_rounding.py` makes."""

    type_name: str

    @property
    def kind(self) -> BlockType:
        return BLOCK_TYPES[self.type_name]

    def described(self) -> dict[str, object]:
        return {"type of the layers": self.type_name}

    def fits(self, group: LinearGroup) -> bool:
        return group.num_inputs % self.kind.block_elements == 0

    def needs(self) -> str:
        others = [name for name in GGUF_TYPES if BLOCK_TYPES[name].block_elements < self.kind.block_elements]
        smaller = "".join(f"; --gguf-type {name}: of {BLOCK_TYPES[name].block_elements}" for name in others)
        return f"inputs must be a multiple of {self.kind.block_elements}{smaller}"

    def planned_bytes(self, num_inputs: int, outputs: int) -> int:
        return outputs * self.kind.row_bytes(num_inputs)

    def config(self, outline: ModelOutline, choice: ModuleChoice) -> dict[str, Any]:
        """Not written to any file, since the file says each tensor's type; what tells one job from another."""
        return {"quant_method": "gguf", "type": self.type_name, "kept": list(choice.unfit)}
