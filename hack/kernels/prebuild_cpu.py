"""Compile the kernels of `millstream_kernels.cpu`, unless they are: `python -m hack.kernels.prebuild_cpu [--out DIR]`.

    numba       Python to LLVM's language, optimized for the kind of CPU; some kernels are written in that language
    llvmlite    what is left of numba's own functions removed, entries added, an object file made

The kind of CPU is x86-64-v3, not this machine's, and the same sources and versions give the same bytes. Elsewhere than
on x86-64 the folder is empty, and the runtime computes with torch.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import platform
import shutil
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from millstream_kernels.cpu import code_folder
from millstream_kernels.cpu.code_folder import CPU, FORMAT, INDEX, OBJECT, CodeError, Index
from millstream_kernels.cpu.task import ALL_KERNELS, KERNELS, TEXT_KERNELS, alone, in_team

TRIPLE = "x86_64-unknown-linux-gnu"
TEAM = """
declare i32 @omp_get_thread_num()
declare i32 @omp_get_num_threads()
"""
# What numba's function takes: where it puts a result and an error, neither of which there is, then its arguments. In a
# team each thread asks for its number; a team may be smaller than it was asked for.
ENTRIES = """
declare i32 @"{kernel}"(ptr, ptr, ptr, i64, i64)
define void @{in_team}(ptr %task) {{
  %result = alloca ptr
  %error = alloca ptr
  %number = call i32 @omp_get_thread_num()
  %size = call i32 @omp_get_num_threads()
  %part = sext i32 %number to i64
  %step = sext i32 %size to i64
  call i32 @"{kernel}"(ptr %result, ptr %error, ptr %task, i64 %part, i64 %step)
  ret void
}}
define void @{alone}(ptr %task) {{
  %result = alloca ptr
  %error = alloca ptr
  call i32 @"{kernel}"(ptr %result, ptr %error, ptr %task, i64 0, i64 1)
  ret void
}}
"""
KNOWN_SYMBOLS = {"omp_get_thread_num", "omp_get_num_threads"}


class CompileError(Exception):
    """The kernel became something that cannot be loaded."""


def is_fresh(folder: Path) -> bool:
    """Whether the folder holds what these sources become by this compiler."""
    try:
        code_folder.read_for_any_machine(folder)
    except CodeError:
        return False
    return bool(json.loads((folder / INDEX).read_bytes())["compiler"] == compiler())


def compiler() -> str:
    """What compiles: versions, and the hash of this file. Imports neither numba nor llvmlite."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("numba", "llvmlite"))
    return f"{versions}, prebuild_cpu {hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]}"


def prebuild(out: Path) -> None:
    """Write the folder anew: it is whole, or is not there.

    Raises:
        CompileError: the code needs functions of numba's, which no process of the runtime has, or raises an error.
    """
    code = _compile()
    index = Index(FORMAT, CPU, compiler(), code_folder.sources_sha256(), hashlib.sha256(code).hexdigest())
    fresh = out.with_name(f"{out.name}.{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    (fresh / OBJECT).write_bytes(code)
    (fresh / INDEX).write_bytes(index.to_bytes())
    shutil.rmtree(out, ignore_errors=True)
    fresh.rename(out)


def _compile() -> bytes:
    # numba reads them when it is imported: without them it compiles for this machine.
    os.environ |= {"NUMBA_CPU_NAME": CPU, "NUMBA_CPU_FEATURES": ""}
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = llvm.parse_assembly(TEAM)
    for kernel, source in KERNELS.items():
        function = getattr(importlib.import_module(f"millstream_kernels.cpu.{source}"), kernel)
        (compiled,) = function.overloads.values()
        name = compiled.fndesc.llvm_func_name
        module.link_in(_with_one_name(llvm, compiled.library.get_llvm_str(), name))
        module.link_in(_entries(llvm, kernel, name))
    for kernel, source in TEXT_KERNELS.items():
        text = importlib.import_module(f"millstream_kernels.cpu.{source}").module_text()
        module.link_in(llvm.parse_assembly(text))
        module.link_in(_entries(llvm, kernel, kernel))
    machine = llvm.Target.from_triple(TRIPLE).create_target_machine(cpu=CPU, opt=3, reloc="pic", codemodel="default")
    _drop_all_but_the_entries(llvm, module, machine)
    unknown = {one.name for one in module.functions if one.is_declaration and not one.name.startswith("llvm.")}
    if unknown - KNOWN_SYMBOLS:
        raise CompileError(f"the compiled kernels call {', '.join(sorted(unknown - KNOWN_SYMBOLS))}")
    if any("pickledata" in one.name for one in module.global_variables):
        # numba keeps the error with the path of the source, so that the bytes would be other ones in each checkout
        raise CompileError("the compiled kernels raise an error, which nothing would notice")
    return bytes(machine.emit_object(module))


def _entries(llvm: Any, kernel: str, name: str) -> Any:
    """The two functions that are called with a task, over the function of that name."""
    return llvm.parse_assembly(TEAM + ENTRIES.format(kernel=name, in_team=in_team(kernel), alone=alone(kernel)))


def _with_one_name(llvm: Any, code: str, name: str) -> Any:
    """The module of one kernel, of which no other sees any other function: two may have a copy of the same."""
    module = llvm.parse_assembly(code)
    for one in (*module.functions, *module.global_variables):
        if not one.is_declaration and one.name != name:
            one.linkage = "internal"
    return module


def _drop_all_but_the_entries(llvm: Any, module: Any, machine: Any) -> None:
    """numba adds functions for Python to call, which need numba."""
    entries = {name(kernel) for kernel in ALL_KERNELS for name in (in_team, alone)}
    for one in (*module.functions, *module.global_variables):
        if not one.is_declaration and one.name not in entries:
            one.linkage = "internal"
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(module, builder)
    kept = (one for one in module.functions if not one.is_declaration and one.name not in entries)
    for number, one in enumerate(kept):
        one.name = f"kernel.{number}"  # numba's has a counter in it, which is another in each process


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m hack.kernels.prebuild_cpu", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=code_folder.FOLDER, help="default: beside the sources")
    options = parser.parse_args()
    if platform.machine() != "x86_64":
        print(f"kernels for a CPU: none for {platform.machine()}; the runtime computes with torch")
        return 0
    if is_fresh(options.out):
        return 0
    began = time.monotonic()
    prebuild(options.out)
    size = (options.out / OBJECT).stat().st_size
    print(f"kernels for a CPU: {size / 1e3:.0f} kB for {CPU}, compiled in {time.monotonic() - began:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
