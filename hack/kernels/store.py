"""Compiled variants in the user's cache, by what they are compiled from: one serves gate, tests, image and all clones.

<key>.cubin, <key>.json   as the image has them
<key>.record              the resources that the compile gate reads, and the files' SHA-256; written last
<digit>.lock              held while a variant is compiled whose key begins with it
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

from hack.kernels.cache import cache_folder
from hack.kernels.compile import CompiledVariant, compile_kernel, record
from millstream_kernels.prebuilt.key import variant_key
from millstream_kernels.variant import Variant

UNUSED_SECONDS = 30 * 24 * 3600  # then an entry is deleted
Wanted = tuple[Variant, int]  # 80 for sm_80


@dataclass(frozen=True, slots=True)
class Compiled:
    """One variant in the store."""

    key: str
    cubin: Path
    metadata: Path
    cubin_sha256: str
    metadata_sha256: str
    resources: CompiledVariant


def compile_all(wanted: Sequence[Wanted], store: Path | None = None, processes: int = 1) -> tuple[list[Compiled], int]:
    """Each variant, in order, and how many were compiled because the store had none.

    Raises:
        ValueError: a variant whose arguments do not match its kernel.
        triton's CompilationError: a kernel that cannot be compiled.
    """
    store = cache_folder("kernels") if store is None else store
    store.mkdir(parents=True, exist_ok=True)
    keys = [variant_key(*one) for one in wanted]
    missing = [(place, key) for place, key in enumerate(keys) if _read(store, key) is None]
    if processes > 1 and len(missing) > 1:
        # Variants hold functions, which pickle cannot carry: a fork has them.
        global _inherited
        _inherited = (wanted, store)
        with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("fork")) as pool:
            list(pool.map(_compile_inherited, [place for place, _ in missing], [key for _, key in missing]))
    else:
        for place, key in missing:
            _compile(*wanted[place], key, store)
    if missing:
        _delete_unused(store, {*keys})
    compiled = [_read(store, key) for key in keys]
    assert all(one is not None for one in compiled)  # noqa: S101  # written above
    return [one for one in compiled if one is not None], len(missing)


_inherited: tuple[Sequence[Wanted], Path] = ((), Path())


def _compile_inherited(place: int, key: str) -> None:
    wanted, store = _inherited
    _compile(*wanted[place], key, store)


def _compile(variant: Variant, capability: int, key: str, store: Path) -> None:
    """Compile one variant, unless another process has done so since the store was looked at."""
    # Test processes and image builds of one machine begin with the same empty store: each would compile all of it.
    with (store / f"{key[0]}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _read(store, key) is None:
            _write_entry(variant, capability, key, store)


def _write_entry(variant: Variant, capability: int, key: str, store: Path) -> None:
    with triton.knobs.cache.scope(), triton.knobs.compilation.scope(), tempfile.TemporaryDirectory() as scratch:
        triton.knobs.cache.dir = scratch
        # Line numbers would bring this machine's paths into the code, and make it larger.
        triton.knobs.compilation.disable_line_info = True
        kernel, resources = compile_kernel(variant, capability)
        (metadata,) = (path for name, path in kernel.metadata_group.items() if name.endswith(".json"))
        said = _without_paths(json.loads(Path(metadata).read_text(encoding="utf-8")), key)
    cubin = kernel.asm["cubin"]
    description = {
        "cubin_sha256": hashlib.sha256(cubin).hexdigest(),
        "metadata_sha256": hashlib.sha256(said).hexdigest(),
        "resources": record(resources),
    }
    _write(store / f"{key}.cubin", cubin)
    _write(store / f"{key}.json", said)
    _write(store / f"{key}.record", json.dumps(description).encode())


def _without_paths(metadata: dict[str, Any], key: str) -> bytes:
    """What a launch reads of Triton's description, the same on every machine."""
    return json.dumps(metadata | {"hash": key, "extern_libs": []}, sort_keys=True).encode()


def _read(store: Path, key: str) -> Compiled | None:
    """None: the store has none, or one that is not whole."""
    path = store / f"{key}.record"
    try:
        said = json.loads(path.read_bytes())
        found = Compiled(
            key,
            store / f"{key}.cubin",
            store / f"{key}.json",
            said["cubin_sha256"],
            said["metadata_sha256"],
            CompiledVariant(**said["resources"]),
        )
        for file, expected in ((found.cubin, found.cubin_sha256), (found.metadata, found.metadata_sha256)):
            if hashlib.sha256(file.read_bytes()).hexdigest() != expected:
                return None
        os.utime(path)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all, whoever else writes the same."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    temporary.replace(path)


def _delete_unused(store: Path, used: set[str]) -> None:
    oldest = time.time() - UNUSED_SECONDS
    for path in store.glob("*.record"):
        if path.stem not in used and path.stat().st_mtime < oldest:
            for one in (path, path.with_suffix(".cubin"), path.with_suffix(".json")):
                one.unlink(missing_ok=True)
