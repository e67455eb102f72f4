"""Which share of its peaks a GPU reaches: assumed for all, unless a part was measured."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.catalog.efficiencies import efficiencies, parse_efficiencies
from millstream_operator.catalog.gpu import CatalogError, load_catalog
from millstream_operator.catalog.read_shape import read_shape
from millstream_operator.planning.choices import placement_reasons
from millstream_operator.planning.plan import Plan
from millstream_operator.planning.sizing import roofline
from millstream_operator.planning.sizing.weights import rank_weights, weight_format
from tests.support.known_models import known_config
from tests.unit.operator.planning.cases import Case

ASSUMED: dict[str, Any] = {
    "basis": "assumed", "source": "what good engines reach",
    "computePercent": 50, "bandwidthPercent": 75, "linkPercent": 70, "stepOverheadMicroseconds": 400,
}  # fmt: skip


def decode_seconds(part_name: str) -> float:
    part, config = load_catalog().get(part_name), known_config("Qwen/Qwen3-8B")
    assert part is not None
    assert config is not None
    shape = read_shape(config)
    weights = rank_weights(shape, weight_format(shape, "None"))
    machine = roofline.Machine(
        part=part, shape=shape, weights=weights, method="None", tensor=1, pipeline=1, kv_bytes=147456, over_nvlink=False
    )
    return roofline.step_seconds(machine, 1, 1000)


def test_only_a_measured_part_of_the_catalogue_has_an_entry_of_its_own() -> None:
    shipped, names = efficiencies(), load_catalog().names()
    assert shipped.default.basis == "assumed"
    assert {*shipped.parts} <= {*names}
    assert {one.basis for one in shipped.parts.values()} <= {"measured"}


def test_a_measured_part_is_predicted_by_its_own_shares_and_the_others_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = {name: decode_seconds(name) for name in ("H100-80GB", "H200-141GB")}
    measured = ASSUMED | {"basis": "measured", "bandwidthPercent": 90, "stepOverheadMicroseconds": 100}
    replaced = parse_efficiencies({"default": ASSUMED, "parts": {"H200-141GB": measured}})
    monkeypatch.setattr(roofline, "efficiencies", lambda: replaced)
    assert decode_seconds("H100-80GB") == before["H100-80GB"]
    assert decode_seconds("H200-141GB") == pytest.approx((before["H200-141GB"] - 4e-4) * 75 / 90 + 1e-4)


def test_a_plan_on_a_measured_part_says_whose_rates_predict(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("Qwen/Qwen3-8B", ("H200:1",))
    assert not [one for one in reasons_of(case) if "rates" in one]
    measured = parse_efficiencies({"default": ASSUMED, "parts": {"H200-141GB": ASSUMED | {"basis": "measured"}}})
    monkeypatch.setattr(placement_reasons, "efficiencies", lambda: measured)
    (said,) = [one for one in reasons_of(case) if "rates" in one]
    assert said == "By rates that were measured on H200-141GB: what good engines reach."


def reasons_of(case: Case) -> list[str]:
    found = case.plan()
    assert isinstance(found, Plan)
    return [one.reason for one in found.reasons if one.field == "predicted"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"bandwidthPercent": 101}, "default.bandwidthPercent: "),
        ({"linkPercent": 0}, "default.linkPercent: "),
        ({"basis": "guessed"}, "default.basis: "),
        ({"other": 1}, "default.other: "),
    ],
)
def test_a_share_that_cannot_be_is_named(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(CatalogError, match=f"GPU efficiencies: {problem}"):
        parse_efficiencies({"default": ASSUMED | change, "parts": {}})
