"""A file of own prices and parts over the shipped catalogue, for `millstream plan --catalog FILE` and the operator.

A100-80GB: {listPriceUSDPerHour: 1.9}      # single fields of a known part
MyGPU-96GB: {computeCapability: "9.0", …}   # or a whole part
"""

from __future__ import annotations

from pathlib import Path

import yaml

from millstream_operator.catalog.gpu import CatalogError, GpuCatalog, load_catalog

MAX_CATALOG_BYTES = 1 << 20


def read_catalog_file(path: Path) -> GpuCatalog:
    """Return the shipped catalogue with the file's changes; an empty file changes nothing.

    Raises:
        CatalogError: one sentence that names the file and what is wrong in it.
    """
    try:
        size_bytes = path.stat().st_size
        values = yaml.safe_load(path.read_text(encoding="utf-8")) if size_bytes <= MAX_CATALOG_BYTES else None
    except OSError as error:
        raise CatalogError(f"{path}: cannot be read: {error.strerror}.") from None
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError, ValueError):
        raise CatalogError(f"{path}: not a YAML or JSON file in UTF-8.") from None
    if size_bytes > MAX_CATALOG_BYTES:
        raise CatalogError(f"{path}: larger than {MAX_CATALOG_BYTES >> 20} MiB.")
    if values is None:
        return load_catalog()
    if not isinstance(values, dict):
        raise CatalogError(f"{path}: holds no mapping of GPU names to fields.")
    try:
        return load_catalog(values)
    except CatalogError as error:
        raise CatalogError(f"{path}: {error}") from None
