"""Time the candidates of the tuning tables on this GPU, and write the table of its architecture.

    python -m millstream_kernels.tune                   every kernel; writes millstream_kernels/tuning/sm_90.json
    python -m millstream_kernels.tune --kernel w16a16   one of them: a few minutes each
    python -m millstream_kernels.tune --out DIR         writes DIR/sm_90.json

The table is written after each class of rows, so an interrupted run keeps what it has. What the table changed has to be
compiled and reviewed: `python -m hack.kernels.table --write`, which refuses variants that spill.

Time: the median of replays of a CUDA graph that multiplies by several copies of a weight, more than the L2 cache holds.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from triton.runtime.errors import OutOfResources

from millstream_kernels.prebuilt.cuda_library import CudaError
from millstream_kernels.prebuilt.install import install_compiling
from millstream_kernels.prebuilt.lookup import ptxas_is_there
from millstream_kernels.tuning.candidates import SPACES
from millstream_kernels.tuning.products import PRODUCTS, Product
from millstream_kernels.tuning.search import tuned
from millstream_kernels.tuning.table import (
    FOLDER,
    Table,
    TuningTableError,
    architecture_of,
    path_of,
    read,
    using,
    write,
)

LEAST_CAPABILITY = 80
COPIES_BYTES = 256 << 20  # of weights that are multiplied in one replay: several times an L2 cache
MOST_COPIES = 16
REPLAYS = 15


def seconds_of(kernel: str, table: Table, num_rows: int, num_outputs: int, num_inputs: int) -> float | None:
    """Of one product on the current GPU with the choices of `table`; None: the candidate does not start."""
    device = torch.device("cuda", torch.cuda.current_device())
    copies = min(MOST_COPIES, max(2, COPIES_BYTES // (num_outputs * num_inputs)))
    products = [PRODUCTS[kernel](num_rows, num_outputs, num_inputs, device) for _ in range(copies)]
    with using(table):
        try:
            return _replay_seconds(products)
        except (OutOfResources, CudaError):
            return None


def _replay_seconds(products: list[Product]) -> float:
    for product in products:  # compiled before they are recorded
        product()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for product in products:
            product()
    times: list[float] = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000 / len(products))
    return statistics.median(times)


def main(arguments: list[str] | None = None) -> int:
    """0: written. 1: this machine cannot time kernels, or a table cannot be used or written; one sentence says why.
    130: interrupted."""
    parser = argparse.ArgumentParser(prog="python -m millstream_kernels.tune", description=__doc__.splitlines()[0])
    parser.add_argument("--kernel", choices=[*SPACES], help="one of them (default: all)")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the table (default: the package's)")
    options = parser.parse_args(arguments)
    problem = _problem()
    if problem is not None:
        print(f"Nothing was tuned: {problem}. The committed tables stay as they are.", file=sys.stderr)
        return 1
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        with _only_run_in(options.out):
            _tune([options.kernel] if options.kernel else [*SPACES], options.out)
    except (TuningTableError, CudaError) as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"The table cannot be written to {options.out}: {error.strerror}.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted; {options.out} has the classes of rows that were printed", file=sys.stderr)
        return 130
    return 0


def _tune(kernels: list[str], out: Path) -> None:
    major, minor = torch.cuda.get_device_capability()
    architecture, name = architecture_of(10 * major + minor), torch.cuda.get_device_name()
    path = out / f"sm_{architecture}.json"
    table = read(path if path.exists() else path_of(architecture), architecture)
    install_compiling(lambda problem: None)
    for kernel in kernels:
        for line, found in tuned(table, kernel, name, seconds_of):
            table = found
            write(path, table)
            print(line, flush=True)


@contextmanager
def _only_run_in(folder: Path) -> Iterator[None]:
    """Refuse a second run, which would write over what this one finds.

    Raises:
        OSError: there is one, or nothing can be written to the folder.
    """
    if not os.access(folder, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    opened = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(errno.EWOULDBLOCK, "another run of this command writes there") from None
        yield
    finally:
        os.close(opened)


def _problem() -> str | None:
    """Why kernels cannot be timed here; None: they can."""
    if not torch.cuda.is_available():
        return "kernels are timed on a CUDA device, and torch sees none"
    major, minor = torch.cuda.get_device_capability()
    if 10 * major + minor < LEAST_CAPABILITY:
        return f"the GPU is sm_{major}{minor}, and kernels need sm_{LEAST_CAPABILITY}"
    return None if ptxas_is_there() else "candidates are compiled with ptxas, which is missing"


if __name__ == "__main__":
    sys.exit(main())
