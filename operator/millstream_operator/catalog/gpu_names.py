"""Find the catalogue's part by the names that people and nodes use for a GPU.

A100-80GB   A100-80GB-SXM   A100-80GB-PCIe   L4              FAMILY-<n>GB, with the form factor where it matters
NVIDIA-A100-SXM4-80GB       Tesla-T4                         the label nvidia.com/gpu.product
NVIDIA-A100-SXM4-80GB-MIG-1g.10gb   NVIDIA-L4-SHARED         slices of a GPU, which are not planned on
"""

from __future__ import annotations

import difflib
import re

from millstream_operator.catalog.gpu import GpuCatalog, GpuPart

_ISLAND = re.compile(r"^(?P<name>[^:]+)(?::(?P<count>[0-9]{1,4}))?$")
MAX_GPUS_PER_NODE = 72
NAMES_SHOWN = 6


class UnknownGPUError(ValueError):
    """No such part, or more than one that the name could mean. `str()` is one sentence with the nearest names."""


def find_part(catalog: GpuCatalog, name: str) -> GpuPart:
    """Return the part that `name` means.

    Raises:
        UnknownGPUError: none, several, or a slice of a GPU.
    """
    name = name.strip()
    if (slice_of := slice_kind(name)) is not None:
        raise UnknownGPUError(f"The GPU {name!r} is {slice_of}; Millstream plans whole GPUs.")
    found = catalog.get(name) or catalog.get(re.sub(r"[ _]+", "-", name))
    if found is not None:
        return found
    family = [part.name for part in catalog if part.name.lower().startswith(f"{name.lower()}-")]
    if len(family) == 1:
        part = catalog.get(family[0])
        assert part is not None  # noqa: S101 - it was listed a line above
        return part
    if family:
        raise UnknownGPUError(f"The GPU name {name!r} could mean {', '.join(family)}; say which.")
    near = difflib.get_close_matches(name, catalog.names(), n=3, cutoff=0.5) or catalog.names()[:NAMES_SHOWN]
    raise UnknownGPUError(f"The GPU {name!r} is not in the catalogue; known are for example {', '.join(near)}.")


def slice_kind(label: str) -> str | None:
    """Return why a product label does not mean a whole GPU; None when it does."""
    if "-MIG-" in label.upper():
        return "a MIG slice"
    if label.upper().endswith("-SHARED"):
        return "a time-sliced share of a GPU"
    return None


def parse_island(catalog: GpuCatalog, text: str) -> tuple[GpuPart, int]:
    """`A100-80GB:4` -> the part and how many of it one node holds; without a number, one.

    Raises:
        UnknownGPUError: no such part, or a count that is none.
    """
    match = _ISLAND.match(text.strip())
    if match is None:
        raise UnknownGPUError(f"{text!r} is not of the form NAME:COUNT, for example A100-80GB:4.")
    count = int(match["count"] or 1)
    if not 1 <= count <= MAX_GPUS_PER_NODE:
        raise UnknownGPUError(f"{text!r} asks for {count} GPUs in one node; it must be 1 to {MAX_GPUS_PER_NODE}.")
    return find_part(catalog, match["name"]), count
