"""What reaches pods that run is in the live file and nowhere else: an objective of the ITL, the governor's mode."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millstream_operator.api.load import ManifestError, parse
from millstream_operator.kube.kinds import CONFIG_MAP, DEPLOYMENT
from millstream_operator.planning.restart_fields import input_hash
from millstream_operator.rendering.config_maps import live_config_map
from tests.support.fake_operator import respec, served
from tests.support.llmdeployments import full_manifest, manifest


def live_file(objectives: dict[str, Any] | None, accelerator: str | None = None) -> dict[str, Any]:
    """The live configuration of a spec. `accelerator` None: with every field of the API, else with few."""
    full = full_manifest() if accelerator is None else manifest(accelerator={"type": accelerator})
    full["spec"].pop("objectives", None)
    full["spec"].pop("service", None)  # its origins are in the file too
    if objectives is not None:
        full["spec"]["objectives"] = objectives
    found: dict[str, Any] = json.loads(live_config_map(parse(full))["data"]["live.json"])
    return found


@pytest.mark.parametrize(("p95", "milliseconds"), [("1ms", 1), ("40ms", 40), ("1s", 1000), ("1h", 60_000)])
def test_an_objective_is_the_runtimes_target(p95: str, milliseconds: int) -> None:
    """One above the most that a runtime takes is the most."""
    assert live_file({"itl": {"p95": p95}})["target_itl_milliseconds"] == milliseconds


@pytest.mark.parametrize("objectives", [None, {"ttft": {"p95": "1s"}}])
def test_without_an_objective_the_file_is_as_before(objectives: dict[str, Any] | None) -> None:
    assert set(live_file(objectives)) == {"heartbeat_interval_seconds", "log_level"}


def test_an_objective_of_the_ttft_says_nothing_to_a_gpu() -> None:
    """It has no bound by default: any would make prompts slower."""
    assert "target_itl_milliseconds" not in live_file({"ttft": {"p95": "1s"}}, "GPU")


@pytest.mark.parametrize(("p95", "milliseconds"), [("51ms", 51), ("1s", 1000), ("1h", 60_000)])
def test_an_objective_of_the_ttft_alone_lets_a_cpus_steps_last_as_long(p95: str, milliseconds: int) -> None:
    assert live_file({"ttft": {"p95": p95}}, "CPU")["target_itl_milliseconds"] == milliseconds


@pytest.mark.parametrize("p95", ["1ms", "50ms"])
def test_an_objective_of_the_ttft_never_makes_steps_shorter(p95: str) -> None:
    """50 ms are what a CPU has by default."""
    assert "target_itl_milliseconds" not in live_file({"ttft": {"p95": p95}}, "CPU")


def test_with_both_objectives_that_of_the_itl_is_the_target() -> None:
    both = {"ttft": {"p95": "1s"}, "itl": {"p95": "40ms"}}
    assert live_file(both, "CPU")["target_itl_milliseconds"] == 40


async def test_an_objective_reaches_pods_that_run_without_a_restart() -> None:
    """A CPU's objectives are refused as a plan, because nothing predicts them: the pods go on with their plan."""
    operator = await served(manifest())
    before = operator.cluster.the(DEPLOYMENT)["metadata"]["generation"]
    respec(operator.cluster, objectives={"ttft": {"p95": "300ms"}})
    await operator.settle()
    live = operator.cluster.the(CONFIG_MAP, "demo-live")
    assert json.loads(live["data"]["live.json"])["target_itl_milliseconds"] == 300
    assert operator.cluster.the(DEPLOYMENT)["metadata"]["generation"] == before


def drafting(governor: dict[str, Any] | None) -> dict[str, Any]:
    """A spec that drafts by n-grams. `governor` None: it says nothing of a governor."""
    asked = {"method": "NGram"} | ({"governor": governor} if governor is not None else {})
    return manifest(speculation=asked)


@pytest.mark.parametrize("mode", ["Observe", "Disabled"])
def test_the_governors_mode_is_in_the_live_file_alone(mode: str) -> None:
    plain, governed = parse(drafting(None)), parse(drafting({"mode": mode}))
    assert input_hash(governed) == input_hash(plain), "no pod restarts"
    assert json.loads(live_config_map(governed)["data"]["live.json"])["speculation_governor"] == mode


@pytest.mark.parametrize("governor", [{}, {"mode": "Enforce"}])
def test_the_default_governor_leaves_the_file_as_it_was(governor: dict[str, Any]) -> None:
    assert live_config_map(parse(drafting(governor))) == live_config_map(parse(drafting(None)))


def test_a_governor_alone_asks_for_auto_as_an_empty_field_does() -> None:
    """So an object that gets it by an edit has the plan that it would have had from the start."""
    asked, empty = (parse(manifest(speculation=one)) for one in ({"governor": {"mode": "Observe"}}, {}))
    assert input_hash(asked) == input_hash(empty) != input_hash(parse(manifest()))


def test_a_governor_without_drafts_is_refused() -> None:
    with pytest.raises(ManifestError, match="method Disabled takes no governor: nothing is proposed"):
        parse(manifest(speculation={"method": "Disabled", "governor": {"mode": "Observe"}}))


async def test_another_mode_restarts_nothing() -> None:
    operator = await served(drafting(None))
    before = operator.cluster.the(DEPLOYMENT)["metadata"]["generation"]
    for mode in ("Observe", "Disabled", "Enforce"):
        respec(operator.cluster, speculation={"method": "NGram", "governor": {"mode": mode}})
        operator.client.requests.clear()
        await operator.settle()
        assert operator.writes == [("apply", "ConfigMap"), ("apply", "LLMDeployment/status")]
    assert operator.cluster.the(DEPLOYMENT)["metadata"]["generation"] == before


def test_allowed_origins_are_in_the_live_file_alone() -> None:
    plain = parse(manifest())
    allowed = parse(manifest(service={"allowedOrigins": ["https://chat.example.com"]}))
    assert input_hash(allowed) == input_hash(plain), "no pod restarts"
    assert json.loads(live_config_map(allowed)["data"]["live.json"])["allowed_origins"] == ["https://chat.example.com"]
    assert "allowed_origins" not in live_config_map(plain)["data"]["live.json"]
    assert live_config_map(parse(manifest(service={}))) == live_config_map(plain)
