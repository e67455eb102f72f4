"""What every wrapper checks before it starts a kernel: a wrong argument is an error with its name, no wrong answer."""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNMENT_BYTES = 16  # of a load; pointers and the distance of rows are multiples of it


class KernelArgumentError(ValueError):
    """An argument that a kernel does not take. The message begins with its name."""

    def __init__(self, argument: str, problem: str) -> None:
        super().__init__(f"{argument} {problem}")
        self.argument = argument


def require(condition: bool, argument: str, problem: str) -> None:
    """Raise KernelArgumentError unless `condition`. `problem`: "is 3-dimensional; give [T, H, D]"."""
    if not condition:
        raise KernelArgumentError(argument, problem)


def require_tensor(
    argument: str,
    tensor: Tensor,
    shape: tuple[int | None, ...],
    dtypes: set[torch.dtype],
    *,
    is_aligned: bool = True,
) -> None:
    """Dimensions (None: any size), dtype, and, with `is_aligned`, a start that is a multiple of 16 bytes."""
    sizes = tuple(tensor.shape)
    fits = len(sizes) == len(shape) and all(want in (None, size) for size, want in zip(sizes, shape, strict=True))
    expected = ", ".join("any" if size is None else str(size) for size in shape)
    require(fits, argument, f"has the shape {list(sizes)}; [{expected}] is expected")
    named = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
    require(
        tensor.dtype in dtypes, argument, f"is {str(tensor.dtype).removeprefix('torch.')}; the kernel takes {named}"
    )
    begins_well = not is_aligned or tensor.data_ptr() % ALIGNMENT_BYTES == 0
    require(begins_well, argument, f"does not begin at a multiple of {ALIGNMENT_BYTES} bytes")


def require_unit_stride(argument: str, tensor: Tensor) -> None:
    """The last dimension is dense."""
    dense = tensor.stride(-1) == 1 or tensor.shape[-1] <= 1
    require(dense, argument, f"has a stride of {tensor.stride(-1)} in its last dimension; 1 is expected")


def capability_of(tensor: Tensor) -> int:
    """Compute capability of a tensor's GPU, 90 for sm_90. In the interpreter a tensor is on the CPU: 90."""
    if not tensor.is_cuda:
        return 90
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return 10 * major + minor
