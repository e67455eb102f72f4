"""GPUs as data: `gpus.yaml`, checked, with the changes that a user's own catalogue makes to it.

    gpus.yaml + overrides {name: {field: value}} -> GpuCatalog -> part("A100-80GB") -> GpuPart

An override changes single fields of a known part (usually its price) or, given whole, adds a part.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic.alias_generators import to_camel

MAX_PARTS = 256
PRICE_WORDS = ("priceBasis", "priceSource", "priceDate")  # of a price; another price has its own
LARGEST_FP16_OVER_FP32 = 32  # of the shipped parts: B200 and B300, rounded up


class CatalogError(ValueError):
    """A catalogue entry that cannot be used. `str()` is one sentence that names the part and the field."""


class _Data(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, extra="forbid", frozen=True, populate_by_name=True)


class DenseFlops(_Data):
    """Peak FLOP/s (or integer operations) without sparsity. None: no tensor cores for this dtype.

    `fp32`: of the CUDA cores; None: not known.
    """

    fp32: Annotated[int, Field(gt=0)] | None = None
    fp16: Annotated[int, Field(gt=0)]
    bf16: Annotated[int, Field(gt=0)] | None = None
    fp8: Annotated[int, Field(gt=0)] | None = None
    int8: Annotated[int, Field(gt=0)] | None = None


_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)]


class GpuPart(_Data):
    """One GPU of one product. Bandwidths are peaks, links count one direction of one GPU."""

    name: _Name
    aliases: tuple[_Name, ...] = ()
    product_labels: tuple[_Name, ...] = ()  # values of the node label nvidia.com/gpu.product
    unsupported: Annotated[str, StringConstraints(max_length=200)] | None = None  # why the runtime cannot use it
    cpu_architecture: Literal["amd64", "arm64"] = "amd64"  # of the machines that have it; our images are amd64
    compute_capability: Annotated[str, StringConstraints(pattern=r"^[0-9]{1,2}\.[0-9]$")]
    usable_memory_bytes: Annotated[int, Field(gt=1 << 30, lt=1 << 44)]
    memory_bandwidth_bytes_per_second: Annotated[int, Field(gt=0)]
    dense_flops_per_second: DenseFlops
    nvlink_bytes_per_second: Annotated[int, Field(gt=0)] | None = None
    nvlink_island_size: Annotated[int, Field(ge=1, le=1024)] = 1  # 1: no NVLink
    pcie_bytes_per_second: Annotated[int, Field(gt=0)]
    gpus_per_node: Annotated[int, Field(ge=1, le=64)] = 8  # of a usual machine, where no inventory is given
    list_price_usd_per_hour: Annotated[float, Field(ge=0, le=10_000, allow_inf_nan=False, alias="listPriceUSDPerHour")]
    price_basis: Literal["list", "spot", "estimated"] = "list"
    price_source: Annotated[str, StringConstraints(min_length=3, max_length=200)] | None = None
    price_date: Annotated[str, StringConstraints(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$")] | None = None  # if known
    source: Annotated[str, StringConstraints(min_length=8, max_length=400)]

    @property
    def may_be_suggested(self) -> bool:
        """Whether the planner names it where no node or spec does: this version's images run on such a machine."""
        return self.unsupported is None and self.cpu_architecture == "amd64"

    @functools.cached_property
    def sm(self) -> int:
        """Compute capability as in `sm_89`."""
        major, minor = self.compute_capability.split(".")
        return int(major) * 10 + int(minor)

    @functools.cached_property
    def hourly_milli_usd(self) -> int:
        """List price in thousandths of a dollar an hour."""
        return round(self.list_price_usd_per_hour * 1000)

    @functools.cached_property
    def has_nvlink(self) -> bool:
        return self.nvlink_island_size > 1 and self.nvlink_bytes_per_second is not None

    def dtype_flops(self, dtype: str) -> int:
        """Peak for `dtype`. One that the part lacks is computed in fp16; an unknown fp32 is as slow as it can be."""
        found: int | None = getattr(self.dense_flops_per_second, dtype)
        if found is not None:
            return found
        half = self.dense_flops_per_second.fp16
        return half // LARGEST_FP16_OVER_FP32 if dtype == "fp32" else half


# The minimum compute capability of each format: FP8 tensor cores and AWQ's kernels as in vLLM's documentation of
# hardware support; 16-bit weights run on every GPU of this catalogue.
MINIMUM_SM = {"None": 70, "AWQ": 75, "GPTQ": 70, "FP8": 89, "INT8": 75, "NF4": 70, "RTN": 75, "GGUF": 70}
# Keys and values are never multiplied as FP8: the runtime converts them, without an instruction that a GPU may lack.
MINIMUM_SM_KV_CACHE = {"None": 70, "FP8": 75, "INT8": 75}


class GpuCatalog:
    """All known parts, by name, alias and node label."""

    def __init__(self, parts: Mapping[str, GpuPart]) -> None:
        self._parts = dict(parts)
        self._names: dict[str, GpuPart] = {}
        for part in self._parts.values():
            for name in (part.name, *part.aliases, *part.product_labels):
                owner = self._names.setdefault(name.lower(), part)
                if owner is not part:
                    raise CatalogError(f"GPU catalogue: the name {name} belongs to {owner.name} and to {part.name}.")

    def __iter__(self) -> Iterator[GpuPart]:
        return iter(self._parts.values())

    def get(self, name: str) -> GpuPart | None:
        """The part of a name, alias or node label, in any case of letters."""
        return self._names.get(name.lower())

    def names(self) -> list[str]:
        return list(self._parts)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits, equal for equal catalogues on every machine."""
        parts = [part.model_dump(mode="json") for _, part in sorted(self._parts.items())]
        for part in parts:  # a field that is new stays out at its default, or an upgrade would change every hash
            del part["price_basis"], part["price_source"], part["price_date"]  # words; the price itself is hashed
            if part["cpu_architecture"] == "amd64":
                del part["cpu_architecture"]
            flops, shipped = part["dense_flops_per_second"], _shipped().get(part["name"])
            if flops["fp32"] in (None, shipped.dense_flops_per_second.fp32 if shipped is not None else None):
                del flops["fp32"]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def load_catalog(overrides: Mapping[str, Mapping[str, Any]] | None = None) -> GpuCatalog:
    """The shipped catalogue with `overrides` over it: part name -> fields in camelCase.

    Raises:
        CatalogError: an override that names an unknown field, or a new part with fields missing.
    """
    if not overrides:
        return _shipped()
    if len(overrides) > MAX_PARTS:
        raise CatalogError(f"GPU catalogue: {len(overrides)} overrides; at most {MAX_PARTS} are read.")
    parts = {part.name: part for part in _shipped()}
    for name, fields in overrides.items():
        if not isinstance(fields, Mapping):
            raise CatalogError(f"GPU catalogue: {name} is {fields!r}; it must be a mapping of fields.")
        known = _shipped().get(str(name))
        base = known.model_dump(by_alias=True, exclude_none=True) if known else {"name": name}
        if "listPriceUSDPerHour" in fields:
            base = {field: value for field, value in base.items() if field not in PRICE_WORDS}
        part = _part({**base, **fields})
        parts[part.name] = part
    return GpuCatalog(parts)


@functools.cache
def _shipped() -> GpuCatalog:
    text = resources.files(__package__).joinpath("gpus.yaml").read_text(encoding="utf-8")
    parts = [_part(entry) for entry in yaml.safe_load(text)["parts"]]
    return GpuCatalog({part.name: part for part in parts})


def _part(entry: Mapping[str, Any]) -> GpuPart:
    try:
        return GpuPart.model_validate(entry)
    except ValidationError as error:
        raise CatalogError(f"GPU catalogue: {entry.get('name', 'a part')}: {_sentence(error)}.") from None


def _sentence(error: ValidationError) -> str:
    """What is wrong with the first field that is. An unknown field is first: its right name may be missing for it."""
    first = min(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
    field, words = ".".join(str(step) for step in first["loc"]), first["msg"].removesuffix(".")
    if first["type"] == "missing":
        return f"{field} is missing; a GPU that is not in the shipped catalogue needs every field"
    if first["type"] == "extra_forbidden":
        known = [one.alias or name for name, one in GpuPart.model_fields.items()]
        close = difflib.get_close_matches(field, known, n=1) or known
        return f"{field} is no field of a GPU; did you mean {' or '.join(close)}"
    return f"{field} is {first['input']!r:.60}; it must be {words.removeprefix('Input should be ')}"
