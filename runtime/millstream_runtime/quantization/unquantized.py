"""Weights of 16 and 32 bits: one tensor `weight`, `[out, in]`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from millstream_runtime.models.linear.linear import Linear
from millstream_runtime.models.linear.shares import Size, kept_size
from millstream_runtime.quantization.weight_layout import TensorSource


@dataclass(frozen=True, slots=True)
class Unquantized:
    """See `WeightLayout`."""

    def linear(self, source: TensorSource, parts: Mapping[str, Size], in_features: Size, bias: Tensor | None) -> Linear:
        if source.memory.holds_sixteen_bits:
            rows = [source.in_sixteen_bits(f"{name}.weight", (size, in_features)) for name, size in parts.items()]
            rows = _of_one_type(rows, source)
            return source.memory.linear_of_parts(rows, bias, may_round=source.may_round_products)
        out_features, num_inputs = sum(map(kept_size, parts.values())), kept_size(in_features)
        if source.is_output_major(num_inputs * out_features):
            weight = source.empty(out_features, num_inputs).t()
        else:
            weight = source.empty(num_inputs, out_features)
        self.fill(source, weight, parts, in_features)
        return source.linear_of(weight, bias)

    def dense_weight(self, source: TensorSource, module: str, out_features: Size, in_features: Size) -> Tensor:
        stored = source.read(f"{module}.weight", (out_features, in_features))
        return source.empty(kept_size(out_features), kept_size(in_features)).copy_(stored)

    def fill(self, source: TensorSource, weight: Tensor, parts: Mapping[str, Size], in_features: Size) -> None:
        """Write the weights of `parts` side by side into `weight` `[in, sum of outs]`."""
        # Whole and in one dtype before it is transposed: torch has a fast path for exactly that.
        rows = [source.read(f"{name}.weight", (size, in_features)).to(source.dtype) for name, size in parts.items()]
        weight.copy_((rows[0] if len(rows) == 1 else source.joined(rows)).t())


def _of_one_type(rows: list[Tensor], source: TensorSource) -> list[Tensor]:
    """Modules that share their input may be stored in two types: then each is rounded to one."""
    if len({part.dtype for part in rows}) == 1:
        return rows
    return [part.to(source.weights_dtype) for part in rows]


UNQUANTIZED = Unquantized()
