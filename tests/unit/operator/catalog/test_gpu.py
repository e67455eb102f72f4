"""The catalogue of GPUs: complete, sane, overridable, and found by every name that people and nodes use."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.catalog.gpu import LARGEST_FP16_OVER_FP32, CatalogError, GpuPart, load_catalog
from millstream_operator.catalog.gpu_names import UnknownGPUError, find_part, parse_island
from millstream_operator.inventory.node_kinds import whole_catalog

CATALOG = load_catalog()


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("A100-80GB", "A100-80GB"),
        ("A100-80GB-SXM", "A100-80GB"),
        ("a100-80gb-pcie", "A100-80GB-PCIe"),
        ("NVIDIA-A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA-A100-80GB-PCIe", "A100-80GB-PCIe"),
        ("NVIDIA-A100-PCIE-40GB", "A100-40GB-PCIe"),
        ("NVIDIA-H100-80GB-HBM3", "H100-80GB"),
        ("NVIDIA-H100-NVL", "H100-94GB-NVL"),
        ("H200", "H200-141GB"),
        ("Tesla T4", "T4-16GB"),
        ("L4", "L4-24GB"),
        ("A10G", "A10G-24GB"),
        ("A10", "A10-24GB"),
        ("NVIDIA GeForce RTX 4090", "RTX4090-24GB"),
        ("MI300X", "MI300X-192GB"),
        ("NVIDIA A30", "A30-24GB"),
        ("NVIDIA A40", "A40-48GB"),
        ("NVIDIA RTX A6000", "RTXA6000-48GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTXPRO6000-96GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTXPRO6000-96GB-WS"),
        ("NVIDIA-L20", "L20-48GB"),
        ("NVIDIA-H20", "H20-96GB"),
        ("NVIDIA-GH200-480GB", "GH200-96GB"),
        ("NVIDIA GH200 144G HBM3e", "GH200-144GB"),
        ("NVIDIA-B300-SXM6-AC", "B300-288GB"),
    ],
)
def test_every_name_of_a_gpu_finds_it(name: str, part: str) -> None:
    assert find_part(CATALOG, name).name == part


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("A100", "could mean A100-40GB, A100-80GB"),
        ("GH200", "could mean GH200-96GB, GH200-144GB"),
        ("A100-90GB", "A100-80GB"),
        ("TPU", "not in the catalogue"),
        ("NVIDIA-A100-SXM4-80GB-MIG-1g.10gb", "a MIG slice"),
        ("NVIDIA-L4-SHARED", "time-sliced"),
    ],
)
def test_a_name_that_means_no_one_gpu_is_one_sentence(name: str, said: str) -> None:
    with pytest.raises(UnknownGPUError) as caught:
        find_part(CATALOG, name)
    assert said in str(caught.value)


def test_a_count_of_gpus_in_one_node() -> None:
    part, count = parse_island(CATALOG, "A100-80GB-SXM:4")
    assert (part.name, count) == ("A100-80GB", 4)
    assert parse_island(CATALOG, "L4")[1] == 1
    for bad in ("L4:0", "L4:1000", "L4:four", ":4", "L4:4:4"):
        with pytest.raises(UnknownGPUError):
            parse_island(CATALOG, bad)


def test_the_parts_that_were_promised_are_there() -> None:
    promised = "A10 A10G L4 L40S T4 A30 A40 RTX-A6000 L20 A100-40GB A100-80GB A100-40GB-PCIe A100-80GB-PCIe H100-80GB"
    promised += " H100-PCIe H100-NVL H20 H200 GH200-96GB GH200-144GB B200 B300 GB200 RTX4090 RTX5090 RTX-PRO-6000"
    for name in promised.split():
        part = find_part(CATALOG, name)
        assert part.unsupported is None, name
        assert len(part.source) > 20
    assert find_part(CATALOG, "MI300X").unsupported is not None


def test_a_gpu_that_the_pinned_torch_cannot_run_is_not_planned_on() -> None:
    """The PyTorch that requirements/runtime.txt pins has kernels from sm_75 on."""
    for part in CATALOG:
        assert (part.unsupported is None) == (part.sm >= 75), part.name
    assert "compute capability 7.0" in (find_part(CATALOG, "V100-16GB").unsupported or "")


def test_facts_hang_together() -> None:
    """A slip of a digit shows as a part out of line with all others."""
    for part in CATALOG:
        gigabytes = int(part.name.split("-")[1].removesuffix("GB"))
        assert 0.90 * gigabytes < part.usable_memory_bytes / 2**30 <= 1.01 * gigabytes, part.name
        flops_per_byte = part.dense_flops_per_second.fp16 / part.memory_bandwidth_bytes_per_second
        least = 30 if part.name == "H20-96GB" else 90  # its arithmetic is limited for export, its memory is not
        assert least < flops_per_byte < 500, part.name
        half_over_single = part.dense_flops_per_second.fp16 / (part.dense_flops_per_second.fp32 or 0)
        assert 1 < half_over_single <= LARGEST_FP16_OVER_FP32, part.name
        if part.dense_flops_per_second.fp8 is not None and part.unsupported is None:
            assert part.sm >= 89, part.name
        if part.nvlink_bytes_per_second is not None:
            assert part.nvlink_bytes_per_second > part.pcie_bytes_per_second, part.name
        assert 0.1 < part.list_price_usd_per_hour < 20, part.name


def test_a_users_prices_and_parts_win() -> None:
    own: dict[str, dict[str, Any]] = {"A100-80GB": {"listPriceUSDPerHour": 1.5}}
    changed = load_catalog(own)
    assert find_part(changed, "NVIDIA-A100-SXM4-80GB").hourly_milli_usd == 1500
    assert find_part(changed, "A100-80GB").usable_memory_bytes == find_part(CATALOG, "A100-80GB").usable_memory_bytes
    assert find_part(CATALOG, "A100-80GB").hourly_milli_usd != 1500, "the shipped catalogue stays as it is"
    whole = find_part(CATALOG, "L4").model_dump(by_alias=True, exclude_none=True)
    new = {**whole, "aliases": [], "productLabels": ["NVIDIA-L9"]}
    assert find_part(load_catalog({"L9-48GB": {**new, "name": "L9-48GB"}}), "NVIDIA-L9").name == "L9-48GB"


def test_a_part_of_ones_own_needs_a_price_and_it_may_be_zero() -> None:
    whole = find_part(CATALOG, "L4").model_dump(by_alias=True, exclude_none=True)
    new = {**whole, "name": "L9-48GB", "aliases": [], "productLabels": ["NVIDIA-L9"]}
    assert find_part(load_catalog({"L9-48GB": new | {"listPriceUSDPerHour": 0}}), "L9-48GB").hourly_milli_usd == 0
    del new["listPriceUSDPerHour"]
    with pytest.raises(CatalogError, match="L9-48GB: listPriceUSDPerHour"):
        load_catalog({"L9-48GB": new})


def test_every_price_says_whose_it_is_and_which_are_estimated() -> None:
    estimated = {part.name for part in CATALOG if part.price_basis == "estimated"}
    assert estimated == {"L20-48GB", "A30-24GB", "H20-96GB", "GH200-144GB"}
    assert all(part.price_source for part in CATALOG if part.name not in estimated)


def test_a_price_of_ones_own_is_not_the_shipped_sources() -> None:
    own = load_catalog({"A30-24GB": {"listPriceUSDPerHour": 0.4}}).get("A30-24GB")
    assert own is not None
    assert (own.price_basis, own.price_source, own.price_date) == ("list", None, None)
    words = {"priceBasis": "spot", "priceSource": "our provider", "priceDate": "2026-11-29"}
    spot = load_catalog({"A30-24GB": words}).get("A30-24GB")
    assert spot is not None
    assert (spot.price_basis, spot.price_source, spot.price_date) == ("spot", "our provider", "2026-11-29")
    assert spot.list_price_usd_per_hour == 0.5, "the words alone change no price"


def test_the_hash_of_facts_is_that_of_stored_plans() -> None:
    """Rates that the catalogue lacked before are in the hash only where a user changed them."""
    assert CATALOG.fingerprint == "ccaf73ecdfc6967f"
    assert load_catalog({"L4": {"listPriceUSDPerHour": 1.0}}).fingerprint == "1c608780a578474d"
    rates = CATALOG.get("L4").dense_flops_per_second.model_dump()  # type: ignore[union-attr]
    assert load_catalog({"L4": {"denseFlopsPerSecond": rates}}).fingerprint == CATALOG.fingerprint
    assert load_catalog({"L4": {"denseFlopsPerSecond": rates | {"fp32": 1}}}).fingerprint != CATALOG.fingerprint


def test_a_part_of_ones_own_without_a_rate_of_fp32_is_not_predicted_faster_than_it_can_be() -> None:
    whole = find_part(CATALOG, "L4").model_dump(by_alias=True, exclude_none=True)
    new = {"name": "L9-48GB", "aliases": [], "productLabels": [], "denseFlopsPerSecond": {"fp16": 64}}
    own = load_catalog({"L9-48GB": whole | new})
    assert find_part(own, "L9-48GB").dtype_flops("fp32") == 2
    assert find_part(own, "L9-48GB").dtype_flops("bf16") == 64


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"A100-80GB": {"price": 1}}, "A100-80GB: price"),
        ({"A100-80GB": {"listPriceUSDPerHour": -1}}, "listPriceUSDPerHour"),
        ({"New-1GB": {"listPriceUSDPerHour": 1}}, "New-1GB: computeCapability"),
        ({"L4-24GB": {"aliases": ["A10G"]}}, "the name A10G belongs to"),
        ({"L4-24GB": 3}, "must be a mapping"),
    ],
)
def test_an_override_that_cannot_be_is_one_sentence(overrides: Any, said: str) -> None:
    with pytest.raises(CatalogError) as caught:
        load_catalog(overrides)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("part", [*CATALOG], ids=lambda part: part.name)
def test_a_gpu_is_found_by_its_aliases_and_by_the_label_of_its_nodes(part: GpuPart) -> None:
    assert part.product_labels or part.unsupported, "without the value of nvidia.com/gpu.product no node has this GPU"
    for name in (part.name, *part.aliases, *part.product_labels):
        assert find_part(CATALOG, name) == part


def test_a_gpu_of_another_cpu_is_planned_on_and_never_suggested() -> None:
    """An image for amd64 ends on an arm64 machine with `exec format error`."""
    catalog = load_catalog()
    arm = [part for part in catalog if part.cpu_architecture == "arm64"]
    assert {part.name for part in arm} == {"GH200-96GB", "GH200-144GB", "GB200-186GB"}
    assert not {part.name for part in arm} & {kind.part.name for kind in whole_catalog(catalog).kinds}
    assert all(part.unsupported is None for part in arm)
