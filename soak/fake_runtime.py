"""A fake runtime at the outermost edge: it answers, through the proxy, as the pods of a Deployment would.

Simulated pods run no program, so nobody would ever answer `/ready`, and no LLMDeployment would become Ready. This
answers with the configuration that the Deployment's pods mount, by the runtime's own parser and hash,
once a replica is available. It knows no more about the operator than a real pod does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from millstream_runtime.config_files import BOOT_FILE, parse_boot

Object = dict[str, Any]


def boot_map_of(deployment: Object) -> str | None:
    """Name of the ConfigMap that the pods mount their boot configuration from."""
    for volume in deployment["spec"]["template"]["spec"].get("volumes") or ():
        for source in (volume.get("projected") or {}).get("sources") or ():
            if any(item["key"] == BOOT_FILE for item in source.get("configMap", {}).get("items") or ()):
                return str(source["configMap"]["name"])
    return None


def answer(path: str, deployment: Object | None, boot_map: Object | None) -> tuple[int, Object]:
    """HTTP status and body for `/ready` or `/v1/completions`, given the Deployment behind the Service and what its
    pods mount."""
    if deployment is None or boot_map is None or not deployment.get("status", {}).get("availableReplicas"):
        return 503, _status(503, "ServiceUnavailable", "no endpoints available for service")
    config = parse_boot(boot_map["data"][BOOT_FILE], Path(BOOT_FILE))
    if path == "/ready":
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
