"""An objective of the inter-token latency reaches pods that run: it is in the live file and nowhere else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millstream_operator.api.load import parse
from millstream_operator.rendering.config_maps import live_config_map
from tests.support.llmdeployments import full_manifest


def live_file(objectives: dict[str, Any] | None) -> dict[str, Any]:
    manifest = full_manifest()
    manifest["spec"].pop("objectives", None)
    if objectives is not None:
        manifest["spec"]["objectives"] = objectives
    found: dict[str, Any] = json.loads(live_config_map(parse(manifest))["data"]["live.json"])
    return found


@pytest.mark.parametrize(("p95", "milliseconds"), [("1ms", 1), ("40ms", 40), ("1s", 1000), ("1h", 60_000)])
def test_an_objective_is_the_runtimes_target(p95: str, milliseconds: int) -> None:
    """One above the most that a runtime takes is the most."""
    assert live_file({"itl": {"p95": p95}})["target_itl_milliseconds"] == milliseconds


@pytest.mark.parametrize("objectives", [None, {"ttft": {"p95": "1s"}}])
def test_without_an_objective_the_file_is_as_before(objectives: dict[str, Any] | None) -> None:
    assert set(live_file(objectives)) == {"heartbeat_interval_seconds", "log_level"}
