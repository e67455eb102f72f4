"""Quantities in the server's own form, so that no comparison with a live object sees a difference."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream_operator.api.quantity import amount, canonical

# What `kubectl apply --dry-run=server -o yaml` makes of them (resource.Quantity).
CANONICAL = {
    "0": "0",
    "0Gi": "0",
    "1": "1",
    "2": "2",
    "0.5": "500m",
    "500m": "500m",
    "1000m": "1",
    "1500m": "1500m",
    "1.5": "1500m",
    "1000": "1k",
    "1500": "1500",
    "1024": "1024",
    "1024Mi": "1Gi",
    "1.5Gi": "1536Mi",
    "0.5Gi": "512Mi",
    "1000Ki": "1000Ki",
    "2048Ki": "2Mi",
    "0.5Ki": "512",
    "1000000k": "1G",
    "128974848": "128974848",
}


@pytest.mark.parametrize("given", CANONICAL)
def test_the_servers_form(given: str) -> None:
    assert canonical(given) == CANONICAL[given]


@given(st.from_regex(r"[0-9]{1,6}(\.[0-9]{1,3})?(m|k|M|G|T|Ki|Mi|Gi|Ti)?", fullmatch=True))
def test_a_canonical_quantity_is_its_own_canonical_form(quantity: str) -> None:
    assert canonical(canonical(quantity)) == canonical(quantity)


AMOUNTS = {
    "7": 7,
    "2k": 2000,
    "2Ki": 2048,
    "3G": 3 * 10**9,
    "1P": 10**15,
    "1Pi": 1 << 50,
    "2E": 2 * 10**18,
    "1Ei": 1 << 60,
}


@pytest.mark.parametrize("given", AMOUNTS)
def test_an_amount_has_every_suffix(given: str) -> None:
    assert amount(given) == AMOUNTS[given]


def test_thousandths_are_an_amount() -> None:
    assert amount("8589934592000m") == 8 << 30


@pytest.mark.parametrize("nonsense", ["", "many", "1 Gi", "-1", "1e3x", "1GiB", "Gi"])
def test_nonsense_is_refused(nonsense: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        canonical(nonsense)
