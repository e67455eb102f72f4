"""A file of own prices and parts over the shipped catalogue, for `millstream plan --catalog FILE` and the operator.

A100-80GB: {listPriceUSDPerHour: 1.9}      # single fields of a known part
MyGPU-96GB: {computeCapability: "9.0", …}   # or a whole part
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from millstream_operator.catalog.gpu import CatalogError, GpuCatalog, load_catalog

MAX_CATALOG_BYTES = 1 << 20
# What PyYAML raises for a text that it cannot read: of its own, and for `!!int ''`, `!!bool maybe`, `2026-13-45`.
YAML_ERRORS = (yaml.YAMLError, RecursionError, ValueError, LookupError, AttributeError, TypeError)


class _SafeLoaderOfUniqueKeys(yaml.SafeLoader):
    """As yaml.SafeLoader, which takes the last of two prices that are given for one GPU."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        twice = next((name for name, count in names.items() if count > 1), None)
        if twice is not None:
            raise CatalogError(f"{twice} is given twice.")
        return super().construct_mapping(node, deep)


def read_catalog_file(path: Path) -> GpuCatalog:
    """Return the shipped catalogue with the file's changes; an empty file changes nothing.

    Raises:
        CatalogError: one sentence that names the file and what is wrong in it.
    """
    try:
        size_bytes = path.stat().st_size
        text = path.read_text(encoding="utf-8") if size_bytes <= MAX_CATALOG_BYTES else ""
        values = yaml.load(text, Loader=_SafeLoaderOfUniqueKeys)  # noqa: S506 - a SafeLoader
    except OSError as error:
        raise CatalogError(f"{path}: cannot be read: {error.strerror}.") from None
    except CatalogError as error:
        raise CatalogError(f"{path}: {error}") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        raise CatalogError(f"{path}: not a YAML or JSON file, on line {line}: {error.problem}.") from None
    except YAML_ERRORS:
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
