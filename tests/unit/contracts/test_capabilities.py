"""What the contract says the runtime can run is what its code runs: no word too many, none too few."""

from __future__ import annotations

from millstream_operator.catalog.families import dense, experts, latent
from millstream_runtime.config import CAPABILITIES
from millstream_runtime.models.registry import FAMILIES

ARCHITECTURES = {
    **{family: traits.architecture for family, traits in dense.FAMILIES.items()},
    **{family: traits.architecture for family, traits in experts.FAMILIES.items()},
    **latent.FAMILIES,
}


def test_the_families_are_those_of_the_registry() -> None:
    assert {ARCHITECTURES[family] for family in CAPABILITIES.model_families} == set(FAMILIES)


def test_doing_nothing_is_always_possible() -> None:
    assert "None" in CAPABILITIES.quantization_methods
    assert "None" in CAPABILITIES.kv_cache_methods
    assert "Disabled" in CAPABILITIES.speculation_methods
    assert CAPABILITIES.online_quantization_methods <= CAPABILITIES.quantization_methods
