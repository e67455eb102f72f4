"""Specs of models that are quantized in the cluster, or judged, and where their preparation stands."""

from __future__ import annotations

from typing import Any

from millstream_operator.kube.kinds import CONFIG_MAP, JOB
from tests.support.fake_operator import FakeOperator, answer_to, world
from tests.support.llmdeployments import manifest

Manifest = dict[str, Any]
LOCAL = {"source": {"local": {"path": "demo-chat"}}}
CACHE = {"cache": {"size": "2Gi"}}
FAILURE = "mean_kl 0.31 (0.2 to 0.4), limit 0.02"


def dataset(name: str) -> Manifest:
    return {"configMapRef": {"name": name, "key": "data.jsonl"}}


CALIBRATED = {"method": "AWQ", "calibration": dataset("calibration")}
GATE = {"dataset": dataset("held-out")}
MADE: Manifest = {"model": LOCAL | CACHE, "quantization": CALIBRATED | {"qualityGate": GATE}}
JUDGED: Manifest = {
    "model": {"source": {"local": {"path": "demo-draft"}}},
    "quantization": {"qualityGate": GATE | {"base": {"local": {"path": "demo-chat"}}}},
}


def commands(operator: FakeOperator) -> list[str]:
    """What the Jobs that exist run."""
    return [arguments(job)[0] for job in operator.cluster.all(JOB)]


def arguments(job: Manifest) -> list[str]:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    found: list[str] = container["args"]
    return found


def records(operator: FakeOperator) -> list[Manifest]:
    label = "millstream.dev/preparation"
    return [one for one in operator.cluster.all(CONFIG_MAP) if label in one["metadata"].get("labels", {})]


def journal(operator: FakeOperator) -> list[str]:
    """The types of `status.decisions`, oldest first."""
    return [one["type"] for one in reversed(operator.status().get("decisions", []))]


async def until(operator: FakeOperator, command: str, turns: int = 12) -> None:
    """Let the Jobs before this one end, until the one that runs this command is there."""
    for _ in range(turns):
        await operator.turn()
        if command in commands(operator):
            return
        operator.cluster.run_jobs(answer_to)
        operator.cluster.collect_garbage()
    raise AssertionError(f"no Job runs {command}: {commands(operator)}, {operator.condition('Ready')}")


async def preparing(command: str, **spec: Any) -> FakeOperator:
    """An operator of a new LLMDeployment, whose Job with this command runs."""
    operator = FakeOperator(world(manifest(**(spec or MADE))))
    await until(operator, command)
    return operator
