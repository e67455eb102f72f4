"""In which numbers a model computes, and in which its weights, keys and values are held. They differ on a CPU alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The types of numbers of one model.

    Attributes:
        dtype: of the residual stream, norms, attention's sums and the logits.
        weights: of embedding tables and of linear layers that are not quantized.
        kv_cache: of keys and values, where these are not quantized.
        rounds_products: whether products inside layers take bfloat16 inputs, and round their results to bfloat16. All
            other products by narrower `weights` widen these, and are `dtype`.
    """

    dtype: torch.dtype
    weights: torch.dtype
    kv_cache: torch.dtype
    rounds_products: bool = False

    @classmethod
    def of(cls, numbers: Arithmetic | torch.dtype) -> Arithmetic:
        """Of one type for all, or as it is."""
        return numbers if isinstance(numbers, Arithmetic) else cls(numbers, numbers, numbers)

    @property
    def is_mixed(self) -> bool:
        """Whether weights are held in fewer bits than the model computes with."""
        return self.weights is not self.dtype
