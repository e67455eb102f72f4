"""A folder inside the runtime image is not inspected on a CPU: what the runtime says of it becomes the condition."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from millstream_operator.kube.kinds import POD
from tests.support.fake_cluster import pod_of
from tests.support.fake_operator import FakeOperator, world
from tests.support.tiny_model import write_tiny_model

pytestmark = pytest.mark.deep

Manifest = dict[str, Any]
GEMV = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}


def termination_message(tmp_path: Path, quantization: object) -> tuple[int, str]:
    """Start the runtime as a pod does, on a folder whose config.json has this quantization_config."""
    log = tmp_path / "termination-log"
    folder = write_tiny_model(tmp_path / "tiny", quantization_config=quantization)
    log.touch()
    command = [sys.executable, "-m", "millstream", "serve", str(folder), "--port=0", "--device=cpu"]
    environment = {**os.environ, "MILLSTREAM_TERMINATION_LOG": str(log)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    return done.returncode, log.read_text()


@pytest.mark.parametrize(
    ("quantization", "reason", "said"),
    [
        (GEMV, "UnsupportedByRuntime", "quantization_config.version 'gemv' is not supported by this runtime"),
        ("awq", "CheckpointInvalid", "quantization_config is 'awq'; it must be an object"),
    ],
)
async def test_a_quantised_folder_in_the_image_ends_with_its_field_in_the_condition(
    tmp_path: Path, quantization: object, reason: str, said: str
) -> None:
    code, message = termination_message(tmp_path, quantization)
    assert code != 0
    operator = FakeOperator(world())
    await operator.turn()
    (workload,) = [one for one in operator.cluster.objects.values() if one["kind"] == "Deployment"]
    ended = {"exitCode": code, "message": message, "reason": "Error"}
    waits = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s restarting failed container"}}
    runtime = {"name": "runtime", "restartCount": 3, "state": waits, "lastState": {"terminated": ended}}
    operator.cluster.put(pod_of("demo-x", workload["spec"]["template"], ready=False, containerStatuses=[runtime]))
    await operator.settle(roll_out=False)
    ready = operator.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", reason)
    assert said in ready["message"]
    assert operator.cluster.get(POD, "demo-x") is not None
