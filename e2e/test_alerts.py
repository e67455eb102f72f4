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
MINUTES = 60


def series(metric: str, values: str, pod: str = "a", deployment: str = "demo", **labels: str) -> dict[str, str]:
    """`values` in promtool's notation: `1x60` is 1 for an hour, `0+5x60` grows by 5 a minute."""
    labelled = {"namespace": "team", "pod": pod, "millstream_dev_deployment": deployment} | labels
    text = ",".join(f'{name}="{value}"' for name, value in labelled.items())
    return {"series": f"{metric}{{{text}}}", "values": values}


def a_day(**changed: str) -> list[dict[str, str]]:
    """Two pods that work, with some of the first one's series replaced; an empty string takes one away."""
    usual = {
        "millstream_ready": f"1x{MINUTES}",
        "millstream_heartbeat_age_seconds": f"20x{MINUTES}",
        "vllm:num_requests_waiting": f"0 3 0 7 0x{MINUTES}",
        "vllm:kv_cache_usage_perc": f"0.97x5 0.4x{MINUTES}",
        "vllm:num_preemptions_total": f"0x{MINUTES}",
        "vllm:request_success_total": f"0+30x{MINUTES}",
    }
    other = [series(name, values, pod="b") for name, values in usual.items()]
    mine = {name: values for name, values in (usual | changed).items() if values}
    return [*other, *(series(name, values) for name, values in mine.items())]


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
    write_rules(tmp_path)
    given, fires = DAYS[day]

    expressions: list[dict[str, Any]] = [
        {
            "expr": f'count(count_over_time(ALERTS{{alertname="{name}",alertstate="firing"}}[55m])) > bool 0',
            "eval_time": f"{MINUTES - 2}m",
            "exp_samples": [{"labels": "{}", "value": 1}] if name in fires else [],
        }
        for name in (alert.name for alert in alerts(OWNER))
    ]
    test = {"interval": "1m", "input_series": given, "promql_expr_test": expressions}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": [test]}))
    run(tool, tmp_path, "test", "rules", "test.yaml")
