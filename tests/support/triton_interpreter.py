"""Triton's CPU interpreter, mended where version 3.6.0 is silently wrong, and switched on for the duration of a block.

    with interpreting():
        kernel[grid](...)        # runs on CPU tensors, in this process

`TRITON_INTERPRET` has to be set before triton is imported, and then no kernel of the process can be compiled. Here a
kernel stays a `JITFunction`; its launch is redirected while the block runs. So one process interprets, compiles for a
GPU that it does not have, and runs the rest of the suite as ever.

What is mended:

- bfloat16 lives as raw uint16 and was computed with as such (a dot was off by 1e10); float8 casts were truncated.
- A loop with a bound that is known at run time failed with numpy 2.4.
- A dot in float32 gave a row another result in another place of its tile.
- maximum and minimum propagated NaN where a GPU returns the number.
- A sum of bfloat16 added the bits; it is refused, since on a GPU it rounds in each step.
- A called function patched `triton.language` again and left it patched.
- int32 arithmetic wraps as on a GPU; `checking_overflow=True` makes it an error.
- A dot of float8 is exact; `short_float8_sums=True` keeps 14 bits of a running sum, as sm_90 does (DeepSeek-AI 2024,
  arXiv 2412.19437, 3.5.2), unless `max_num_imprecise_acc` ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from tests.support.triton_types import TYPES_MADE_ONCE, np_dtype

TORCH_TYPES = {
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
# Those that numpy has no type for: the interpreter keeps their bits in an unsigned integer.
RAW = {tl.bfloat16, tl.float8e4nv, tl.float8e5}
LARGEST = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}  # a conversion to float8 saturates on a GPU

Handle = interpreter.TensorHandle
Builder = interpreter.InterpreterBuilder


@contextmanager
def interpreting(*, checking_overflow: bool = False, short_float8_sums: bool = False) -> Iterator[None]:
    """Kernels that are launched in this block run in the interpreter, on CPU tensors."""
    options = replace(
        interpreter.interpreter_builder.options,
        sanitize_overflow=checking_overflow,
        debug=True,
        max_num_imprecise_acc_default=1 << 30,  # as on sm_90
    )
    with ExitStack() as patches:
        for owner, changes in _changes().items():
            for name, value in changes.items():
                patches.enter_context(patch.object(owner, name, value, create=True))
        patches.enter_context(patch.object(interpreter.interpreter_builder, "options", options))
        if short_float8_sums:
            patches.enter_context(patch.object(Builder, "create_dot", _short_dot))
        yield


def _changes() -> dict[Any, dict[str, Any]]:
    """Object -> attribute -> what it is while kernels are interpreted."""
    ternaries: dict[str, Any] = {"create_clampf": np.clip, "create_select": np.where}
    return {
        JITFunction: {"run": _run, "__call__": _call},
        interpreter: {
            "_patch_lang": _patch_lang,
            "_patch_lang_tensor": _patch_lang_tensor(interpreter),
            "_get_np_dtype": np_dtype,
        },
        **TYPES_MADE_ONCE,
        interpreter.ReduceScanOpInterface: {"check_tensor": _refuse_raw},
        Builder: {
            "cast_impl": _cast,
            "create_fp_to_fp": lambda self, source, to, rounding: _cast(self, source, to),
            "create_dot": _dot,
            "binary_op": _in_float32(Builder.binary_op),
            "unary_op": _in_float32(Builder.unary_op),
            "ternary_op": _in_float32(Builder.ternary_op),
            "create_fma": _in_float32(lambda self, x, y, z, _: Handle(x.data * y.data + z.data, z.dtype.scalar)),
            **{name: _ternary(operation) for name, operation in ternaries.items()},
            "create_maxnumf": lambda self, a, b: self.binary_op(a, b, np.fmax),
            "create_minnumf": lambda self, a, b: self.binary_op(a, b, np.fmin),
            "get_bf16": lambda self, value: _narrow(Handle(np.array([value], np.float32), tl.float32), tl.bfloat16),
        },
    }


# How a kernel is launched and what it calls.

_interpreted: dict[Callable[..., Any], Any] = {}


def _interpreted_of(function: JITFunction) -> Any:
    if function.fn not in _interpreted:
        _interpreted[function.fn] = interpreter.InterpretedFunction(function.fn)
    return _interpreted[function.fn]


def _run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    with triton.knobs.runtime.scope(), np.errstate(all="ignore"):
        triton.knobs.runtime.interpret = True  # a constexpr function asks for it
        _interpreted_of(self).run(*args, grid=grid, warmup=warmup, **options)


def _call(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
    """A call from inside a kernel: the launch has patched `triton.language` already."""
    return _interpreted_of(self).rewrite()(*args, **kwargs)


def _patch_lang(function: Callable[..., Any]) -> Any:
    """Patch all that a kernel and Triton's own library of functions use, until the launch is over."""
    scope = interpreter._LangPatchScope()
    builder = interpreter.interpreter_builder
    for language in (tl, tl.core):
        for part in (language, tl.core.tensor):
            interpreter._patch_builtin(part, builder, scope)
        interpreter._patch_lang_tensor(tl.core.tensor, scope)
        interpreter._patch_lang_core(language, scope)
    interpreter._patch_builtin(tl.math, builder, scope)
    interpreter._patch_builtin(tl.core.tensor_descriptor_base, builder, scope)
    return scope


def _patch_lang_tensor(module: Any) -> Callable[[Any, Any], None]:
    original = module._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patched


# Numbers that numpy has no type for.


def _as_torch(handle: Any) -> torch.Tensor:
    data = np.ascontiguousarray(handle.data)
    if handle.dtype.scalar not in RAW:
        return torch.from_numpy(data.copy())
    raw = torch.from_numpy(data.view(np.int16 if data.itemsize == 2 else np.uint8).copy())
    return raw.view(TORCH_TYPES[handle.dtype.scalar])


def _narrow(handle: Any, to: Any) -> Any:
    """`handle` as a type of `RAW`: rounded once, to the nearest even."""
    numbers = _as_torch(handle)
    if not numbers.is_floating_point():
        numbers = numbers.double()
    if to in LARGEST:
        numbers = numbers.float().clamp(-LARGEST[to], LARGEST[to])  # NaN stays
    raw = numbers.to(TORCH_TYPES[to]).contiguous().view(torch.int16 if to == tl.bfloat16 else torch.uint8)
    return Handle(raw.numpy().view(interpreter._get_np_dtype(to)), to)


def _wide(handle: Any) -> Any:
    return Handle(_as_torch(handle).float().numpy(), tl.float32) if handle.dtype.scalar in RAW else handle


def _cast(self: Any, source: Any, to: Any) -> Any:
    to = to.scalar
    if to in RAW:
        return source if source.dtype.scalar == to else _narrow(source, to)
    wide = _wide(source)
    return Handle(wide.data.astype(interpreter._get_np_dtype(to)), to)


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """Summed in float64 and rounded once: a library for matrices on a CPU sums a row by its place in the matrix, which
    no matrix instruction of a GPU does, and tests ask for one result for one row."""
    if a.dtype.scalar.is_int():
        return Handle(np.matmul(a.data, b.data, dtype=d.data.dtype) + d.data, d.dtype.scalar)
    product = np.matmul(_wide(a).data, _wide(b).data, dtype=np.float64) + d.data
    return Handle(product.astype(d.data.dtype), d.dtype.scalar)


def _short_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """`_dot` of float8 by a matrix unit whose running sum has 14 bits: that of `d`, or of some inputs at a time."""
    if a.dtype.scalar not in LARGEST:
        return _dot(self, a, b, d, input_precision, max_num_imprecise_acc)
    left, right, total = _wide(a).data.astype(np.float64), _wide(b).data.astype(np.float64), d.data
    inputs = left.shape[-1]
    if max_num_imprecise_acc > inputs:
        total = _cut_to_14_bits(total + left @ right)
    else:
        for first in range(0, inputs, max_num_imprecise_acc):
            some = slice(first, first + max_num_imprecise_acc)
            total = (total + _cut_to_14_bits(left[:, some] @ right[some])).astype(np.float32)
    return Handle(total.astype(d.data.dtype), d.dtype.scalar)


def _cut_to_14_bits(numbers: Any) -> Any:
    mantissa, exponent = np.frexp(numbers)
    return np.ldexp(np.trunc(mantissa * 2**14) / 2**14, exponent)


def _in_float32(original: Callable[..., Any]) -> Callable[..., Any]:
    """An operation on raw numbers is done in float32 and rounded, as by the GPUs without an instruction for it."""

    def operation(self: Any, *operands: Any) -> Any:
        *handles, function = operands if callable(operands[-1]) else (*operands, None)
        raw = [one.dtype.scalar for one in handles if one.dtype.scalar in RAW]
        if not raw:
            return original(self, *handles, function)
        result = original(self, *(_wide(one) for one in handles), function)
        compared = result.data.dtype == np.bool_
        return Handle(result.data, tl.int1) if compared else _narrow(result, raw[0])

    return operation


def _refuse_raw(self: Any, inputs: Any) -> None:
    if any(one.dtype.scalar in RAW for one in inputs):
        raise TypeError("a reduction of 16 or 8 bits rounds in each step on a GPU: convert to float32 first")


def _ternary(operation: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, a, b, c, *_: self.ternary_op(a, b, c, operation)
