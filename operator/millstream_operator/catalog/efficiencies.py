"""Which share of a GPU's peaks a step reaches: `efficiencies.yaml`, checked. Assumed where no part was measured."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import resources
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic.alias_generators import to_camel

from millstream_operator.catalog.gpu import CatalogError

_Percent = Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)]


class Efficiency(BaseModel):
    """Of one part, or of all others."""

    model_config = ConfigDict(alias_generator=to_camel, extra="forbid", frozen=True, populate_by_name=True)

    basis: Literal["assumed", "measured"]
    source: Annotated[str, StringConstraints(min_length=8, max_length=400)]
    compute_percent: _Percent
    bandwidth_percent: _Percent
    link_percent: _Percent
    step_overhead_microseconds: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]

    @property
    def compute(self) -> float:
        """Share of the peak of arithmetic."""
        return self.compute_percent / 100

    @property
    def bandwidth(self) -> float:
        """Share of the peak of memory traffic."""
        return self.bandwidth_percent / 100

    @property
    def link(self) -> float:
        """Share of the peak of a link."""
        return self.link_percent / 100

    @property
    def step_overhead_seconds(self) -> float:
        """What a step takes besides."""
        return self.step_overhead_microseconds / 1_000_000


class Efficiencies(BaseModel):
    """The file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    default: Efficiency
    parts: dict[str, Efficiency]

    def of(self, part: str) -> Efficiency:
        """Of a part, by its name in the catalogue."""
        return self.parts.get(part, self.default)


def parse_efficiencies(content: Mapping[str, Any]) -> Efficiencies:
    """Check the content of a file.

    Raises:
        CatalogError: naming the field.
    """
    try:
        return Efficiencies.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(step) for step in first["loc"])
        raise CatalogError(f"GPU efficiencies: {field}: {first['msg'].removesuffix('.')}.") from None


@functools.cache
def efficiencies() -> Efficiencies:
    """What is shipped."""
    text = resources.files(__package__).joinpath("efficiencies.yaml").read_text(encoding="utf-8")
    return parse_efficiencies(yaml.safe_load(text))
