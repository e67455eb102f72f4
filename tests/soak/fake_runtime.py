"""A fake runtime at the outermost edge: it answers, through the proxy, as the pods of a Deployment would.

Simulated pods run no program, so `/ready` would never be answered, and no LLMDeployment would become Ready. This
answers with the configuration that the pod template mounts, read by the runtime's own code, once a replica is
available. It knows no more about the operator than a real pod does: its arguments, and the files they name.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from millstream_runtime.config_files import BOOT_FILE, read_boot

Object = dict[str, Any]


def boot_map_name(deployment: Object | None) -> str | None:
    """The ConfigMap whose key is mounted as the file that `--config` names; None where there is no Deployment."""
    if deployment is None:
        return None
    volumes = deployment["spec"]["template"]["spec"].get("volumes") or ()
    return next(name for volume in volumes for name, file in _mounted_files(volume) if file == BOOT_FILE)


def _mounted_files(volume: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(ConfigMap, path) of each file of a projected volume."""
    for source in (volume.get("projected") or {}).get("sources") or ():
        for item in source.get("configMap", {}).get("items") or ():
            yield source["configMap"]["name"], item["path"]


def answer(path: str, deployment: Object | None, boot_map: Object | None) -> tuple[int, Object]:
    """HTTP status and body for `/ready` or `/v1/completions`, given the Deployment behind the Service and its boot map.

    A pod cannot start without its boot map, so there is no answer where that is missing.
    """
    if deployment is None or boot_map is None or not deployment.get("status", {}).get("availableReplicas"):
        return 503, _status(503, "ServiceUnavailable", "no endpoints available for service")
    if path == "/ready":
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / BOOT_FILE
            file.write_text(boot_map["data"][BOOT_FILE])
            config = read_boot(file)
        return 200, {"status": "ready", "config_hash": config.config_hash(), "model": config.served_model_name}
    if path == "/v1/completions":
        return 200, {"choices": [{"index": 0, "text": " world"}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
    return 404, _status(404, "NotFound", f"the fake runtime knows no {path}")


def _status(code: int, reason: str, message: str) -> Object:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": code,
        "reason": reason,
        "message": message,
    }
