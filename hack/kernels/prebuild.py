"""Compile every production variant ahead: the folder that the runtime image brings at /opt/kernels.

    python -m hack.kernels.prebuild --out DIR                       # for sm_80 and sm_90
    python -m hack.kernels.prebuild --out DIR --capabilities 90

Code for sm_80 runs on sm_86 and sm_89 too, so those need none of their own. No GPU, C compiler or CUDA installation is
needed. Variants are kept in the user's cache by what they are compiled from; only new ones are compiled.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import triton

from hack.kernels.store import compile_all
from millstream_kernels.prebuilt.folder import INDEX, Entry, index_bytes
from millstream_kernels.variant import Variant
from millstream_kernels.variants import VARIANTS

CAPABILITIES = (80, 90)


def prebuild(
    out: Path,
    capabilities: Sequence[int] = CAPABILITIES,
    variants: Sequence[Variant] = VARIANTS,
    processes: int = 2,
) -> int:
    """Fill `out`, which does not exist or is empty. Returns the number of variants that had to be compiled."""
    wanted = [(variant, one) for variant in variants for one in variant.capabilities if one in capabilities]
    compiled, fresh = compile_all(wanted, processes=processes)
    out.mkdir(parents=True, exist_ok=True)
    entries = []
    for (variant, capability), one in zip(wanted, compiled, strict=True):
        for path in (one.cubin, one.metadata):
            shutil.copyfile(path, out / path.name)
        entries.append(
            Entry(
                key=one.key,
                kernel=variant.kernel_name,
                variant=variant.name,
                capability=capability,
                arguments=dict(variant.arguments),
                constants={name: str(value) for name, value in variant.constants.items()},
                aligned=tuple(variant.aligned()),
                num_warps=variant.num_warps,
                num_stages=variant.num_stages,
                cubin_sha256=one.cubin_sha256,
                metadata_sha256=one.metadata_sha256,
            )
        )
    (out / INDEX).write_bytes(index_bytes(triton.__version__, entries))
    return fresh


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m hack.kernels.prebuild", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder that does not exist yet, or is empty")
    parser.add_argument("--capabilities", type=int, nargs="+", default=CAPABILITIES, help="80 for sm_80; default: all")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    options = parser.parse_args()
    if options.out.exists() and any(options.out.iterdir()):
        parser.error(f"{options.out} is not empty")
    if unknown := {*options.capabilities} - {*CAPABILITIES}:
        parser.error(f"no variant is compiled for {sorted(unknown)}; known: {', '.join(map(str, CAPABILITIES))}")
    began = time.monotonic()
    fresh = prebuild(options.out, tuple(options.capabilities), processes=options.processes)
    size = sum(path.stat().st_size for path in options.out.iterdir())
    count = sum(1 for _ in options.out.glob("*.cubin"))
    print(f"{count} variants, {size / 1e6:.1f} MB, {fresh} compiled now, {time.monotonic() - began:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
