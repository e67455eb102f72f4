"""The alerts as Prometheus reads them: valid, silent on a good day, loud on each bad one. Needs no cluster."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.promtool import promtool
from millstream_operator.api.load import parse
from millstream_operator.rendering.alerts import alerts
from millstream_operator.rendering.companions import SCALED_OBJECT, Autoscaler, CompanionDefaults, autoscaler
from millstream_operator.rendering.prometheus_rule import prometheus_rule

OWNER = parse(
    {
        "apiVersion": "millstream.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "demo", "namespace": "team", "uid": "u", "generation": 1},
        "spec": {
            "model": {"source": {"local": {"path": "demo-chat"}}},
            "autoscaling": {"minReplicas": 0, "maxReplicas": 4},
        },
    }
)
MINUTES, LONG_MINUTES = 60, 9 * 60
CHECKS = "vllm:spec_decode_num_drafts_total"
NO_GAIN = 'millstream_spec_decode_skipped_total{reason="no_gain"}'


def series(metric: str, values: str, pod: str = "a", deployment: str = "demo", **labels: str) -> dict[str, str]:
    """`values` in promtool's notation: `1x60` is 1 for an hour, `0+5x60` grows by 5 a minute."""
    metric, _, own = metric.partition("{")
    labelled = {"namespace": "team", "pod": pod, "millstream_dev_deployment": deployment} | labels
    text = ",".join(f'{name}="{value}"' for name, value in labelled.items())
    return {"series": f"{metric}{{{text}{',' + own if own else '}'}", "values": values}


def speculating(checks: int, accepted: int, no_gain: int = 0, drafter_failed: int = 0) -> dict[str, str]:
    """What counters of speculation grow by in a minute."""
    return {
        CHECKS: f"0+{checks}x{LONG_MINUTES}",
        "vllm:spec_decode_num_accepted_tokens_total": f"0+{accepted}x{LONG_MINUTES}",
        NO_GAIN: f"0+{no_gain}x{LONG_MINUTES}",
        'millstream_spec_decode_skipped_total{reason="drafter_failed"}': f"0+{drafter_failed}x{LONG_MINUTES}",
        'millstream_spec_decode_skipped_total{reason="no_proposal"}': f"0+5000x{LONG_MINUTES}",  # they cost nothing
    }


def a_day(**changed: str) -> list[dict[str, str]]:
    """Two pods that work, with some of the first one's series replaced; an empty string takes one away."""
    usual = {
        "millstream_ready": f"1x{MINUTES}",
        "millstream_heartbeat_age_seconds": f"20x{MINUTES}",
        "vllm:num_requests_waiting": f"0 3 0 7 0x{MINUTES}",
        "vllm:kv_cache_usage_perc": f"0.97x5 0.4x{MINUTES}",
        "vllm:num_preemptions_total": f"0x{MINUTES}",
        "vllm:request_success_total": f"0+30x{MINUTES}",
        **speculating(checks=200, accepted=300, no_gain=20),
    }
    other = [series(name, values, pod="b") for name, values in usual.items()]
    mine = {name: values for name, values in (usual | changed).items() if values}
    return [*other, *(series(name, values) for name, values in mine.items())]


def both_pods(values: dict[str, str]) -> list[dict[str, str]]:
    """Nothing but these series."""
    return [series(name, value, pod=pod) for name, value in values.items() for pod in "ab"]


def everything_gone() -> list[dict[str, str]]:
    return [series("millstream_ready", f"1x{MINUTES}", deployment="another")]


# What happens -> the alerts that fire within the hour. `twice`: also by the annotations, as a second job would.
DAYS: dict[str, tuple[list[dict[str, str]], set[str]]] = {
    "a good day": (a_day(), set()),
    "a good day, scraped twice": (
        [*a_day(), *(one | {"series": one["series"].replace("{", '{job="pods",')} for one in a_day())],
        set(),
    ),
    "one of two restarts": (a_day(millstream_ready=f"1x10 0x10 1x{MINUTES}"), set()),
    "another one's trouble": ([*a_day(), series("millstream_ready", f"0x{MINUTES}", deployment="another")], set()),
    "all pods are gone": (everything_gone(), {"MillstreamNoReadyReplica"}),
    "one never gets ready": (a_day(millstream_ready=f"0x{MINUTES}"), {"MillstreamWarmupStuck"}),
    "more comes than goes": (a_day(**{"vllm:num_requests_waiting": f"1+2x{MINUTES}"}), {"MillstreamQueueGrowing"}),
    "a full cache": (a_day(**{"vllm:kv_cache_usage_perc": f"0.99x{MINUTES}"}), {"MillstreamKVCacheFull"}),
    "many lose their place": (a_day(**{"vllm:num_preemptions_total": f"0+20x{MINUTES}"}), {"MillstreamPreemptions"}),
    "a hung engine": (
        a_day(millstream_heartbeat_age_seconds=f"0+60x{MINUTES}"),
        {"MillstreamHeartbeatLate"},
    ),
}
# The same within nine hours.
LONG_DAYS: dict[str, tuple[list[dict[str, str]], set[str]]] = {
    "drafts that never stand": (
        both_pods(speculating(checks=200, accepted=15)),
        {"MillstreamDraftAcceptanceLow"},
    ),
    "drafts that never stand, of a few requests": (both_pods(speculating(checks=8, accepted=0)), set()),
    "a governor that stopped drafting": (
        both_pods(speculating(checks=4, accepted=0, no_gain=200)),
        {"MillstreamSpeculationOff"},
    ),
    "one of two stopped drafting": (
        [
            *(series(name, values) for name, values in speculating(checks=200, accepted=300).items()),
            *(series(name, values, pod="b") for name, values in speculating(4, 0, no_gain=200).items()),
        ],
        set(),
    ),
    "a night of other requests": (
        both_pods(
            speculating(checks=200, accepted=300)
            | {
                CHECKS: f"0+200x120 24000+2x240 24480+200x{LONG_MINUTES}",
                NO_GAIN: f"0x120 0+200x240 48000x{LONG_MINUTES}",
            }
        ),
        set(),
    ),
    "a drafter that failed": (
        both_pods(speculating(checks=0, accepted=0, drafter_failed=200)),
        {"MillstreamSpeculationOff"},
    ),
}


@pytest.fixture(scope="session")
def tool() -> Path:
    return promtool()


def run(tool: Path, folder: Path, *arguments: str) -> str:
    done = subprocess.run([tool, *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def write_rules(folder: Path) -> None:
    (folder / "rules.yaml").write_text(yaml.safe_dump(prometheus_rule(OWNER, {})["spec"]))


def test_prometheus_takes_every_rule(tool: Path, tmp_path: Path) -> None:
    write_rules(tmp_path)
    assert f"{len(alerts(OWNER))} rules found" in run(tool, tmp_path, "check", "rules", "rules.yaml")


def test_prometheus_takes_every_query_of_the_autoscaler(tool: Path, tmp_path: Path) -> None:
    """As rules that record: promtool has no other way to read a query without a server."""
    made = autoscaler(OWNER, (SCALED_OBJECT,), CompanionDefaults("http://prometheus:9090"))
    assert isinstance(made, Autoscaler)
    queries = [one["metadata"]["query"] for one in made.manifest["spec"]["triggers"]]
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    run(tool, tmp_path, "check", "rules", "rules.yaml")
    busy = {"vllm:num_requests_waiting": "6x10", "vllm:kv_cache_usage_perc": "0.9x10"}
    given = [
        series(name, values, pod=pod, job=job)
        for name, values in (busy | {"vllm:num_requests_running": "2x10", "vllm:request_success_total": "7x10"}).items()
        for pod in ("a", "b")
        for job in ("monitor", "annotations")
    ]
    wanted = {"query:0": 12, "query:1": 180, "query:2": 16}  # two pods, each counted once; 12 waiting and 4 running
    test = {
        "interval": "1m",
        "input_series": given,
        "promql_expr_test": [
            {"expr": name, "eval_time": "9m", "exp_samples": [{"labels": name, "value": value}]}
            for name, value in wanted.items()
        ],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": [test]}))
    run(tool, tmp_path, "test", "rules", "test.yaml")


@pytest.mark.parametrize("day", DAYS)
def test_each_bad_day_has_its_alert_and_a_good_one_none(tool: Path, tmp_path: Path, day: str) -> None:
    given, fires = DAYS[day]
    names = {alert.name for alert in alerts(OWNER)}
    watch(tool, tmp_path, given, MINUTES, {name: name in fires for name in names})


@pytest.mark.parametrize("day", LONG_DAYS)
def test_speculation_without_gain_has_its_alert_and_another_none(tool: Path, tmp_path: Path, day: str) -> None:
    given, fires = LONG_DAYS[day]
    names = ("MillstreamDraftAcceptanceLow", "MillstreamSpeculationOff")
    watch(tool, tmp_path, given, LONG_MINUTES, {name: name in fires for name in names})


def watch(tool: Path, folder: Path, given: list[dict[str, str]], minutes: int, fires: dict[str, bool]) -> None:
    """See which alerts fire at any time of so many minutes."""
    write_rules(folder)
    window = f"[{minutes - 5}m]"
    expressions: list[dict[str, Any]] = [
        {
            "expr": f'count(count_over_time(ALERTS{{alertname="{name}",alertstate="firing"}}{window})) > bool 0',
            "eval_time": f"{minutes - 2}m",
            "exp_samples": [{"labels": "{}", "value": 1}] if is_firing else [],
        }
        for name, is_firing in fires.items()
    ]
    test = {"interval": "1m", "input_series": given, "promql_expr_test": expressions}
    every = "1m" if minutes == MINUTES else "5m"
    document = {"rule_files": ["rules.yaml"], "evaluation_interval": every, "tests": [test]}
    (folder / "test.yaml").write_text(yaml.safe_dump(document))
    run(tool, folder, "test", "rules", "test.yaml")
