"""Compile a variant for a GPU that this machine does not have, and read what became of it.

Triton's wheel brings `ptxas` and `cuobjdump`, so this needs no CUDA installation. A compilation takes 0.3 to 2 s.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from typing import Any

import triton

from millstream_kernels.prebuilt.key import options_of, source_of, target_of
from millstream_kernels.variant import TensorCores, Variant

MAX_REGISTERS = 255  # of a thread; beyond, ptxas spills
REGISTERS_OF_AN_SM = 65536
MAX_SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}  # that one block may ask for
RESOURCES = re.compile(r"REG:(?P<registers>\d+) STACK:(?P<stack>\d+) SHARED:\d+ LOCAL:(?P<local>\d+)")
# A load of 16 bytes, to registers or asynchronously to shared memory.
WIDE_LOAD = re.compile(r"ld\.global[\w.:]*\.(v4\.[bfsu]32|v2\.[bfsu]64)|cp\.async\.c[ag]\.shared\.global[^;]*, 0x10")
WGMMA, MMA = re.compile(r"\bwgmma\.mma_async"), re.compile(r"\bmma\.sync")


@dataclass(frozen=True, slots=True)
class CompiledVariant:
    """What `cuobjdump` and the PTX say. Any spill goes through `stack_bytes` or `local_bytes`."""

    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    tensor_cores: str
    wide_loads: int


def compile_kernel(variant: Variant, capability: int) -> tuple[Any, CompiledVariant]:
    """Triton's CompiledKernel, and what became of it.

    Args:
        capability: 80 for sm_80.

    Raises:
        triton's CompilationError: the kernel cannot be compiled.
        ValueError: the variant names arguments that the kernel does not have.
    """
    compiled = triton.compile(source_of(variant), target=target_of(capability), options=options_of(variant))
    resources = _resources(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    matrix = TensorCores.WGMMA if WGMMA.search(ptx) else TensorCores.MMA if MMA.search(ptx) else TensorCores.NONE
    return compiled, CompiledVariant(
        registers=resources["registers"],
        stack_bytes=resources["stack"],
        local_bytes=resources["local"],
        shared_bytes=compiled.metadata.shared,
        tensor_cores=matrix.value,
        wide_loads=len(WIDE_LOAD.findall(ptx)),
    )


def _resources(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = RESOURCES.search(said)
    if found is None:
        raise ValueError(f"cuobjdump names no resources: {said!r}")
    return {name: int(number) for name, number in found.groupdict().items()}


def problems(variant: Variant, capability: int, compiled: CompiledVariant) -> list[str]:
    """What a variant may not be. Empty: it may be shipped."""
    wanted = variant.tensor_cores
    if wanted == TensorCores.WGMMA and capability < 90:
        wanted = TensorCores.MMA
    found = []
    if compiled.stack_bytes or compiled.local_bytes:
        found.append(f"spills: {compiled.stack_bytes} bytes of stack, {compiled.local_bytes} of local memory")
    if compiled.registers > MAX_REGISTERS or compiled.registers * 32 * variant.num_warps > REGISTERS_OF_AN_SM:
        found.append(f"{compiled.registers} registers in {variant.num_warps} warps do not fit an SM")
    if compiled.shared_bytes > MAX_SHARED_BYTES[capability]:
        found.append(f"{compiled.shared_bytes} bytes of shared memory, of {MAX_SHARED_BYTES[capability]}")
    if compiled.tensor_cores != wanted:
        found.append(f"computes with {compiled.tensor_cores}, was written for {wanted.value}")
    if variant.wide_loads and not compiled.wide_loads:
        found.append("no load of 16 bytes")
    return [f"{variant.kernel_name}, {variant.name}, sm_{capability}: {one}" for one in found]


def record(compiled: CompiledVariant) -> dict[str, int | str]:
    return asdict(compiled)
