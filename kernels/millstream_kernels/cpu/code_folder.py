"""The folder of machine code for CPUs, which lies beside this file. Readable without torch, numba and llvmlite.

    index.json            format, the kind of CPU, what compiled it, the SHA-256 of the sources and of the object file
    kernels.o             an ELF object file

`hack.kernels.prebuild_cpu` writes it: `make venv` in a checkout, hack/wheel_hook.py where a wheel is built (also
by `pip install`), `make images` for the runtime image.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

FORMAT = 1
CPU = "x86-64-v3"  # that the code is compiled for, as LLVM names it; functions may name instructions beyond it
INDEX, OBJECT = "index.json", "kernels.o"
FOLDER = Path(__file__).parent / "compiled"
SOURCES = (
    "bfloat16/row_kernel.py",
    "elementwise.py",
    "intrinsics.py",
    "packed_product.py",
    "paged_decode.py",
    "paged_prefill.py",
    "product_vectors.py",
    "stored_numbers.py",
    "task.py",
    "vectors.py",
)
MAX_BYTES = 4 << 20
# What every x86-64-v3 has and the code may use: most CPUs since 2013 to 2015 (x86-64 psABI, microarchitecture levels).
X86_64_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})


class CodeError(Exception):
    """Machine code that cannot be used here. The message says why, and reads on behind "torch: "."""


@dataclass(frozen=True, slots=True)
class Index:
    """What `index.json` holds."""

    format: int
    cpu: str  # CPU
    compiler: str
    sources_sha256: str
    object_sha256: str

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), indent=1, sort_keys=True).encode() + b"\n"


def read(folder: Path = FOLDER) -> bytes:
    """Return the object file.

    Raises:
        CodeError: this machine cannot run it; there is none; it is damaged, or of other sources than those beside it.
    """
    if problem := unsupported_machine(platform.system(), platform.machine(), cpu_flags()):
        raise CodeError(problem)
    return read_for_any_machine(folder)


def read_for_any_machine(folder: Path) -> bytes:
    """The same, whether or not this machine could run it."""
    try:
        index = Index(**json.loads(_bytes(folder / INDEX)))
        code = _bytes(folder / OBJECT)
    except OSError as error:
        raise CodeError(
            f"no kernels are compiled for a CPU: {error.filename}: {error.strerror}; `make venv` compiles them in a "
            "checkout, and `make wheel` into a wheel"
        ) from None
    except (ValueError, TypeError, RecursionError) as error:
        raise CodeError(f"{folder / INDEX} is damaged: {error}") from None
    if index.format != FORMAT:
        raise CodeError(f"{folder / INDEX} has format {index.format!r}; this runtime reads {FORMAT}")
    if index.cpu != CPU:
        raise CodeError(f"{folder} was compiled for {index.cpu!r}; this runtime reads code for {CPU}")
    if index.sources_sha256 != sources_sha256():
        raise CodeError(f"{folder} was compiled from other sources; `make venv` compiles it again")
    if index.object_sha256 != hashlib.sha256(code).hexdigest():
        raise CodeError(f"{folder / OBJECT} is damaged: its SHA-256 is not the one in {INDEX}")
    return code


def sources_sha256() -> str:
    """Of the kernels' sources, as they lie beside this file."""
    return hashlib.sha256(b"\0".join((Path(__file__).parent / name).read_bytes() for name in SOURCES)).hexdigest()


def unsupported_machine(system: str, machine: str, flags: Iterable[str]) -> str | None:
    """Why compiled code cannot run there; None: it can."""
    if system != "Linux" or machine != "x86_64":
        return f"kernels for a CPU are compiled for Linux on x86-64, and this is {system} on {machine}"
    if missing := X86_64_V3 - {*flags}:
        return f"the CPU lacks {', '.join(sorted(missing))}"
    return None


def cpu_flags() -> list[str]:
    """What Linux says of the first CPU; [] where it says nothing."""
    try:
        with Path("/proc/cpuinfo").open(encoding="ascii", errors="replace") as file:
            return next((line.partition(":")[2].split() for line in file if line.startswith("flags")), [])
    except OSError:
        return []


def _bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise CodeError(f"{path} is damaged: it has more than {MAX_BYTES} bytes")
    return content
