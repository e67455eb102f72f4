"""Where a pod may go, GPUs left aside: as the scheduler would decide it."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.inventory.demands import ANYWHERE, Demands, read_taints, read_tolerations

DEDICATED = {"key": "dedicated", "value": "search", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("taint", "stays_away"),
    [
        (DEDICATED, True),
        ({"key": "dedicated", "effect": "NoExecute"}, True),
        ({"key": "dedicated", "effect": "PreferNoSchedule"}, False),
        ({"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}, False),
        ({"key": "node.kubernetes.io/unreachable", "effect": "NoSchedule"}, False),
    ],
)
def test_which_taints_keep_a_pod_away_that_tolerates_nothing(taint: dict[str, Any], stays_away: bool) -> None:
    assert bool(ANYWHERE.why_not({}, read_taints([taint]))) is stays_away


@pytest.mark.parametrize(
    ("toleration", "covers"),
    [
        ({"key": "dedicated", "operator": "Exists"}, True),
        ({"operator": "Exists"}, True),
        ({"key": "dedicated", "value": "search"}, True),
        ({"key": "dedicated", "operator": "Equal", "value": "search", "effect": "NoSchedule"}, True),
        ({"key": "dedicated", "value": "other"}, False),
        ({"key": "other", "operator": "Exists"}, False),
        ({"key": "dedicated", "operator": "Exists", "effect": "NoExecute"}, False),
    ],
)
def test_which_tolerations_cover_a_taint(toleration: dict[str, Any], covers: bool) -> None:
    demands = Demands(tolerations=read_tolerations([toleration]))
    assert (demands.why_not({}, read_taints([DEDICATED])) is None) is covers


def test_every_taint_has_to_be_tolerated() -> None:
    one = Demands(tolerations=read_tolerations([{"key": "dedicated", "operator": "Exists"}]))
    assert one.why_not({}, read_taints([DEDICATED, {"key": "slow", "effect": "NoSchedule"}]))


def test_every_selected_label_has_to_be_there() -> None:
    demands = Demands(node_selector=frozenset({("disk", "nvme"), ("zone", "a")}))
    assert demands.why_not({"disk": "nvme", "zone": "a", "more": "x"}, ()) is None
    assert demands.why_not({"disk": "nvme", "zone": "b"}, ())
    assert demands.why_not({"disk": "nvme"}, ())


@pytest.mark.parametrize("taints", [None, {}, "taints", []])
def test_a_node_without_taints_takes_everyone(taints: object) -> None:
    assert read_taints(taints) == ()
