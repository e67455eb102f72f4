"""A pod that gets less memory than its process takes ends its boot with the reason, and with what was planned."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millstream_operator.rendering.runtime_config import boot_config
from millstream_runtime.config_files import dump
from tests.unit.operator.planning.test_cpu_dtype import CHAT, planned

pytestmark = pytest.mark.deep

MODEL = Path(__file__).resolve().parents[3] / "models" / "demo-chat"
# A whole engine, from the boot file that the operator writes; only the kernel's file that says the limit is ours.
BOOT = """
import json, sys
from pathlib import Path
from millstream_runtime.config import RuntimeConfig
from millstream_runtime.config_files import read_boot
from millstream_runtime.engine import host_limits
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.execution import shard
from millstream_runtime.errors import RuntimeFailure

boot, cgroup = map(Path, sys.argv[1:])
shard.memory_limit_bytes = lambda: host_limits.memory_limit_bytes(cgroup)
shard.container_limit_bytes = lambda: host_limits.container_limit_bytes(cgroup)
try:
    engine = Engine(RuntimeConfig.of(read_boot(boot)), lambda phase, message="": None)
    print(json.dumps({"tokens": engine.memory_use.kv_cache_tokens}))
except RuntimeFailure as failure:
    print(json.dumps({"reason": failure.reason, "message": failure.message}))
"""


def booted(folder: Path, planned_with: str, limit_mebibytes: int) -> dict[str, Any]:
    """How the engine of a pod ends that was planned with one memory limit and boots with another."""
    boot = replace(boot_config(planned(CHAT, memory=planned_with)), model=str(MODEL))
    (folder / "boot.json").write_text(dump(boot))
    (folder / "memory.max").write_text(f"{limit_mebibytes << 20}\n")
    answer = subprocess.run(
        [sys.executable, "-c", BOOT, str(folder / "boot.json"), str(folder)], capture_output=True, text=True, check=True
    )
    result: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return result


def test_a_limit_that_fell_below_the_process_ends_the_boot_with_the_length_that_was_planned(tmp_path: Path) -> None:
    length = boot_config(planned(CHAT, memory="1Gi")).planned_model_len
    assert length is not None
    failure = booted(tmp_path, "1Gi", 192)
    assert failure["reason"] == "OutOfMemory"
    for words in (f"of the {length} tokens that were planned", "only 0.19 GiB are usable", "resources.limits.memory"):
        assert words in failure["message"]
    assert "max-model-len" not in failure["message"], "no length helps"


def test_the_limit_that_was_planned_with_boots(tmp_path: Path) -> None:
    length = boot_config(planned(CHAT, memory="1Gi")).planned_model_len
    assert length is not None
    assert booted(tmp_path, "1Gi", 1024)["tokens"] >= length
