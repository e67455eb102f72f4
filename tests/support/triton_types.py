"""Types of Triton's interpreter, made once per process instead of once per operation.

Each operation of an interpreted kernel makes the type and the shape of its result anew, wrapped in `tl.tuple` and
`tl.constexpr`: more than a third of the time of a launch. They depend on nothing but their names and sizes, and nothing
changes them, so tensors can share them.
"""

from __future__ import annotations

import math
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_get_np_dtype = interpreter._get_np_dtype
_init_block_type = tl.core.block_type.__init__
_equals = tl.core.tuple.__eq__

_np_dtypes: dict[str, Any] = {}
_block_types: dict[tuple[Any, ...], dict[str, Any]] = {}
_shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}  # sizes -> a tensor's shape, and its number of elements


def np_dtype(triton_type: Any) -> Any:
    """numpy's type for one of Triton."""
    name = triton_type.name
    if name not in _np_dtypes:
        _np_dtypes[name] = _get_np_dtype(triton_type)
    return _np_dtypes[name]


def _make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
    if key not in _block_types:
        _init_block_type(self, element_ty, shape)
        _block_types[key] = {name: getattr(self, name) for name in ("shape", "numel", "name")}
    self.__dict__.update(_block_types[key], element_ty=element_ty)


def _make_tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002  # passed by this name
    self.handle, self.type, self.dtype = handle, type, type.scalar
    sizes = (*type.shape,) if type.is_block() else ()
    if sizes not in _shapes:
        shape = tl.core.tuple([tl.core.constexpr(size) for size in sizes])
        _shapes[sizes] = (shape, tl.core.constexpr(math.prod(sizes)))
    self.shape, self.numel = _shapes[sizes]


def _is_equal(self: Any, other: Any) -> Any:
    return tl.core.constexpr(True) if self is other else _equals(self, other)


# Object -> attribute -> what it is while kernels are interpreted.
TYPES_MADE_ONCE: dict[Any, dict[str, Any]] = {
    tl.core.block_type: {"__init__": _make_block_type},
    tl.core.tensor: {"__init__": _make_tensor},
    tl.core.tuple: {"__eq__": _is_equal},
}
