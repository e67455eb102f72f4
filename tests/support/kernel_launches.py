"""What a wrapper starts, to compare it with the table of production variants: no other may be compiled in service."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from torch import Tensor
from triton.runtime.jit import JITFunction, mangle_type

from millstream_kernels.variants import VARIANTS

OPTIONS = ("num_warps", "num_stages")


@dataclass(frozen=True)
class Launch:
    """One start of a kernel: the types of its arguments, its constants and its options."""

    kernel: str
    arguments: Mapping[str, str]
    constants: Mapping[str, Any]
    options: Mapping[str, int]
    unspecialized: frozenset[str]  # integers that may change without a compilation

    def variant_names(self) -> list[str]:
        """The production variants that it is."""
        return [
            variant.name
            for variant in VARIANTS
            if variant.kernel_name == self.kernel
            and dict(variant.arguments) == dict(self.arguments)
            and dict(variant.constants) == dict(self.constants)
            and all(getattr(variant, name) == value for name, value in self.options.items())
            and {name for name, kind in variant.arguments.items() if kind.startswith("i")} <= self.unspecialized
        ]


@contextmanager
def recording_launches(*, executing: bool = True, into: list[Launch] | None = None) -> Iterator[list[Launch]]:
    """The kernels that are started in this block, in order. Inside `interpreting`, unless nothing is to be computed."""
    launches: list[Launch] = [] if into is None else into
    original = JITFunction.run

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        values = dict(zip(self.arg_names, args, strict=False)) | named
        constants = {parameter.name for parameter in self.params if parameter.is_constexpr}
        launches.append(
            Launch(
                self.fn.__name__,
                {
                    one.name: _kind(values[one.name], one.do_not_specialize_on_alignment)
                    for one in self.params
                    if one.name not in constants
                },
                {name: values[name] for name in constants},
                {name: values[name] for name in OPTIONS if name in values},
                frozenset(parameter.name for parameter in self.params if parameter.do_not_specialize),
            )
        )
        if executing:
            original(self, *args, grid=grid, warmup=warmup, **named)

    with patch.object(JITFunction, "run", run):
        yield launches


def _kind(value: Any, begins_anywhere: bool) -> str:
    assert begins_anywhere or not isinstance(value, Tensor) or value.data_ptr() % 16 == 0, (
        "a tensor that begins at no multiple of 16 bytes"
    )
    return str(mangle_type(value))
