"""Whether a kernel computes what a quantized weight says, on the GPU that will serve with it: asked while it loads.

    rows of normal numbers ─┬─► the kernel's layer ──────────► y      |y - truth| within rounding of each sum
                            └─► the weight in float32 ───────► truth

Kernels of quantized weights are used before anybody measured them on a kind of GPU, since without them a weight is
dequantized in every product. So each shape is tried first: a driver, a compiler or a GPU that the kernel meets for the
first time costs speed then, never an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from millstream_kernels.prebuilt.lookup import MissingKernelError
from millstream_runtime.models.linear.linear import Linear
from millstream_runtime.quantization.grouped_weight import GroupedWeight

NUM_ROWS = (1, 17, 130)  # a decode, a batch of them, a prompt: other tiles
# Of the root of the sum of squared products, which is how far a sum of random terms is from zero.
ROUNDING = 0.02
ROUNDING_OF_8_BIT_ACTIVATIONS = 0.2
ROUNDING_OF_OUTPUTS = 2.0**-7  # of 16-bit results


def problem(linear: Linear, weight: GroupedWeight, dtype: torch.dtype) -> str | None:
    """Return why the results of `linear`, which has no bias, are not those of `weight`; None: they are.

    A kernel that cannot start is such a reason too.
    """
    dense = weight.dense(torch.float32)
    squares = dense.square()
    bound = ROUNDING_OF_8_BIT_ACTIVATIONS if weight.quantizes_activations else ROUNDING
    generator = torch.Generator().manual_seed(weight.num_inputs)
    for num_rows in NUM_ROWS:
        x = torch.randn(num_rows, weight.num_inputs, generator=generator).to(weight.codes.device, dtype)
        try:
            found = linear(x).float()
        except MissingKernelError:  # of the image, which should have it: see `execution.compiled_kernels`
            raise
        except Exception as error:  # of the compiler, the launcher or the driver: they share no class
            return f"the kernel does not start: {type(error).__name__}: {_first_line(error)}"
        wanted, typical = x.float() @ dense, (x.float().square() @ squares).sqrt()
        if not bool(((found - wanted).abs() <= bound * typical + ROUNDING_OF_OUTPUTS * wanted.abs()).all()):
            return f"the kernel's product of {num_rows} rows is not that of the weight"
    return None


class KernelCheck:
    """Asks once per kind of weight. After the first problem no kernel is used for any. `dtype`: of the rows."""

    def __init__(
        self, dtype: torch.dtype, ask: Callable[[Linear, GroupedWeight, torch.dtype], str | None] = problem
    ) -> None:
        self._dtype, self._ask = dtype, ask
        self._passed: set[Hashable] = set()
        self.problem: str | None = None

    def passes(self, linear: Linear, weight: GroupedWeight) -> bool:
        """Whether `linear` may compute with `weight`."""
        if self.problem is not None:
            return False
        kind = (type(linear), weight.codes.shape, weight.codes.dtype, weight.scales.shape, weight.order is None)
        if kind not in self._passed:
            self.problem = self._ask(linear.without_bias(), weight, self._dtype)
            self._passed.add(kind)
        return self.problem is None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:200]
