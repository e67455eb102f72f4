"""What identifies a compiled kernel: the same key when it is compiled ahead and when a launch asks for it.

Triton's own key also has hashes of its 400 MB of libraries, of the environment and of `ptxas --version`: it costs 1.6 s
when an engine starts, and differs between two Pythons that compile to the same machine code. Here Triton's version
stands for all of that.
"""

from __future__ import annotations

import hashlib
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from millstream_kernels.prebuilt.folder import FORMAT
from millstream_kernels.variant import Variant

HOPPER = 90


def compiled_for(capability: int) -> int | None:
    """The capability whose code a GPU runs, of those that variants are compiled for. None: no code is compiled ahead.

    Code for sm_80 runs on all of 8.x; that for sm_90 uses instructions of sm_90 alone (CUDA C++ Programming Guide,
    "Binary Compatibility" and "Architecture-Specific Features").
    """
    if capability // 10 == 8:
        return 80
    return HOPPER if capability == HOPPER else None


def target_of(capability: int) -> Any:
    """Triton's target, 80 for sm_80."""
    return GPUTarget("cuda", capability, 32)


def source_of(variant: Variant) -> Any:
    """What Triton compiles for a variant, as a launch of it would say it.

    Raises:
        ValueError: the variant names arguments that the kernel does not have.
    """
    names = variant.kernel.arg_names
    unknown = {*variant.arguments, *variant.constants} ^ set(names)
    if unknown:
        raise ValueError(f"{variant.kernel_name}, {variant.name}: these arguments do not match: {sorted(unknown)}")
    signature = {name: variant.arguments.get(name, "constexpr") for name in names}
    places = sorted(names.index(name) for name in variant.aligned())
    attributes = {(place,): [["tt.divisibility", 16]] for place in places}
    return ASTSource(variant.kernel, signature, dict(variant.constants), attributes)


def options_of(variant: Variant) -> dict[str, int]:
    """Triton's options of a variant."""
    return {"num_warps": variant.num_warps, "num_stages": variant.num_stages}


def variant_key(variant: Variant, capability: int) -> str:
    """The key of a variant that is compiled for sm_`capability`, in the store and in the image. Takes milliseconds."""
    return entry_key(source_of(variant), target_of(capability), dict(options_of(variant)))


def entry_key(source: Any, target: Any, options: dict[str, Any]) -> str:
    """SHA-256, in hex, over the kernel's source with all it calls, types, constants, alignment, options and target."""
    parsed = make_backend(target).parse_options(dict(options))
    # A launch lists what has no attribute too.
    attributes = {place: source.attrs[place] for place in sorted(source.attrs) if source.attrs[place]}
    plain = ASTSource(source.fn, source.signature, source.constants, attributes)
    facts = (str(FORMAT), triton.__version__, str(target), plain.hash(), parsed.hash())
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()
