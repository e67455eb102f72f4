"""Machine code from an object file in this process, called in torch's own threads.

torch computes with OpenMP's threads, which wait busily for the next region. A thread pool beside them would fight for
the cores with threads that do nothing, so a team of the same pool runs our code: `GOMP_parallel` is what the compiler
that built torch turns `#pragma omp parallel` into.
"""

from __future__ import annotations

import ctypes

import llvmlite.binding as llvm
import torch  # noqa: F401  # brings libgomp into the process, with names that are visible to all

from millstream_kernels.cpu import executable_memory
from millstream_kernels.cpu.code_folder import CodeError
from millstream_kernels.cpu.task import ALL_KERNELS, alone, in_team

_TEAM_FUNCTIONS = ("omp_get_thread_num", "omp_get_num_threads")


class LoadedCode:
    """The functions of an object file. May be called by several threads; the GIL is free meanwhile."""

    def __init__(self, code: bytes) -> None:
        """Raises CodeError: code may not be placed, torch has no OpenMP of GNU's here, or the code lacks a function."""
        if (problem := executable_memory.refusal()) is not None:
            raise CodeError(problem)
        process = ctypes.CDLL(None)
        try:
            self._parallel = process.GOMP_parallel
            for name in _TEAM_FUNCTIONS:
                address = ctypes.cast(getattr(process, name), ctypes.c_void_p).value
                llvm.add_symbol(name, address)
        except AttributeError as error:
            raise CodeError(f"torch has no threads of GNU's OpenMP: {error}") from None
        self._parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        self._parallel.restype = None
        # Keeps the memory that the code lies in.
        self._engine = _engine()
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        self._in_team = {kernel: self._address(in_team(kernel)) for kernel in ALL_KERNELS}
        self._alone = {kernel: function(self._address(alone(kernel))) for kernel in ALL_KERNELS}

    def run(self, kernel: str, task_address: int, num_threads: int) -> None:
        """Compute a task of one of `task.ALL_KERNELS`; where it says how many parts it has, one per thread or more."""
        if num_threads > 1:
            self._parallel(self._in_team[kernel], task_address, num_threads, 0)
        else:
            self._alone[kernel](task_address)

    def _address(self, name: str) -> int:
        address = self._engine.get_function_address(name)
        if not address:
            raise CodeError(f"the compiled code has no {name}")
        return int(address)


def _engine() -> llvm.ExecutionEngine:
    """An empty one: it places object files, and compiles nothing."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
