"""Make the kernels of this process start from a folder of compiled ones, without a compiler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import triton
import triton.compiler

from millstream_kernels.prebuilt.cuda_library import CudaLibrary
from millstream_kernels.prebuilt.driver import CudaDevice, PrebuiltDriver
from millstream_kernels.prebuilt.folder import PrebuiltError, PrebuiltFolder
from millstream_kernels.prebuilt.lookup import Lookup


def install(
    path: Path,
    on_problem: Callable[[str], None],
    *,
    library: CudaLibrary | None = None,
    device: CudaDevice | None = None,
) -> Lookup:
    """Call it once, before the first launch. Launches of the process then look their variants up in `path`.

    Args:
        on_problem: gets a sentence for each entry that is missing or damaged.
        library: CUDA's driver library; the machine's by default.
        device: torch's current device by default.

    Raises:
        PrebuiltError: the folder has no index, a damaged one, or one of another Triton.
        CudaError: there is no CUDA driver.
    """
    folder = PrebuiltFolder.open(path)
    if folder.triton_version != triton.__version__:
        raise PrebuiltError(
            f"{path} was compiled by Triton {folder.triton_version}, and {triton.__version__} is installed"
        )
    return _install(folder, on_problem, library, device)


def install_compiling(
    on_problem: Callable[[str], None], *, library: CudaLibrary | None = None, device: CudaDevice | None = None
) -> Lookup:
    """Like `install` without a folder: each variant is compiled when it is first started. It needs ptxas alone.

    Raises:
        CudaError: there is no CUDA driver.
    """
    lookup = _install(PrebuiltFolder(Path(), triton.__version__, ()), on_problem, library, device)
    lookup.compiles_missing = True
    return lookup


def _install(
    folder: PrebuiltFolder, on_problem: Callable[[str], None], library: CudaLibrary | None, device: CudaDevice | None
) -> Lookup:
    driver = PrebuiltDriver(library or CudaLibrary(), device or CudaDevice())
    lookup = Lookup(folder, triton.compile, on_problem)
    # JITFunction takes both from here when it first meets a device.
    triton.runtime.driver.set_active(driver)
    triton.compiler.compile = lookup
    return lookup
