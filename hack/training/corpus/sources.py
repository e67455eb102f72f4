"""Where the text comes from: the standard library and packages that requirements/*.txt lock, with their licences.

Only permissive licences: the weights are published under Apache-2.0. A package of another version gives other text, so
the version of each is recorded with the training.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_GROUPS_OF_256 = 16
STANDARD_LIBRARY = "python"


@dataclass(frozen=True, slots=True)
class TextSource:
    """Files of one package, by folders from the root that it is installed in."""

    name: str  # of the distribution
    license: str  # SPDX
    folders: tuple[str, ...]
    without: tuple[str, ...] = ()  # folders below these, by name
    has_code: bool = False  # whether its code is training text too, next to its documentation

    @property
    def root(self) -> Path:
        if self.name == STANDARD_LIBRARY:
            return Path(sysconfig.get_paths()["stdlib"])
        return Path(str(importlib.metadata.distribution(self.name).locate_file("")))

    @property
    def version(self) -> str:
        if self.name == STANDARD_LIBRARY:
            return platform.python_version()
        return importlib.metadata.version(self.name)


TESTS = ("test", "tests", "testing", "_testing", "__pycache__")
SOURCES = (
    TextSource(
        STANDARD_LIBRARY,
        "PSF-2.0",
        ("",),
        without=(
            *TESTS,
            *("site-packages", "lib-dynload", "idlelib", "lib2to3", "turtledemo", "pydoc_data", "encodings"),
            *("ensurepip", "distutils", "msilib", "__phello__"),
        ),
        has_code=True,
    ),
    TextSource("kubernetes", "Apache-2.0", ("kubernetes/client/models",), without=TESTS),
    TextSource("openai", "Apache-2.0", ("openai/types",), without=(*TESTS, "beta")),
    TextSource("transformers", "Apache-2.0", ("transformers",), without=(*TESTS, "models")),
    TextSource("huggingface-hub", "Apache-2.0", ("huggingface_hub",), without=TESTS),
    TextSource(
        "torch",
        "BSD-3-Clause",
        ("torch/nn", "torch/optim", "torch/utils", "torch/distributed", "torch/distributions"),
        without=TESTS,
    ),
    TextSource("networkx", "BSD-3-Clause", ("networkx",), without=TESTS),
    TextSource("aiohttp", "Apache-2.0", ("aiohttp",), without=TESTS),
    TextSource("kopf", "MIT", ("kopf",), without=TESTS),
    TextSource("opentelemetry-api", "Apache-2.0", ("opentelemetry/trace", "opentelemetry/metrics"), without=TESTS),
    TextSource("prometheus-client", "Apache-2.0", ("prometheus_client",), without=TESTS),
)


def files(source: TextSource) -> Iterator[tuple[str, str]]:
    """Path from the source's root, and the text, of every Python file, in the order of the paths."""
    for folder in source.folders:
        for path in sorted((source.root / folder).rglob("*.py")):
            relative = path.relative_to(source.root)
            if not set(relative.parts[:-1]) & set(source.without):
                yield relative.as_posix(), path.read_text(encoding="utf-8", errors="replace")


def is_held_out(source_name: str, path: str) -> bool:
    """Whether training never sees this file. It depends on the names alone, so it is stable.

    Files that tell nearly the same are one group, in training together or held out together: the versions of a
    Kubernetes type (`v1_lease.py`, `v1beta1_lease.py`), the request and the response of a call (`model_param.py`).
    """
    folder, _, name = path.rpartition("/")
    group = re.sub(r"^v\d+((alpha|beta)\d+)?_|(_params?|_response)?\.py$", "", name)
    if source_name == "openai":
        folder = ""
    digest = hashlib.sha256(f"{source_name}\0{folder}\0{group}".encode()).digest()
    return digest[0] < HELD_OUT_GROUPS_OF_256
