"""A fake runtime at the outermost edge: it answers, through the proxy, as the pods of a Deployment would.

Simulated pods run no program, so nobody would ever answer `/ready`, and no LLMDeployment would become Ready. This
answers with the configuration that the Deployment's own pod template carries, by the runtime's own parser and hash,
once a replica is available. It knows no more about the operator than a real pod does.
"""

from __future__ import annotations

from typing import Any

from millstream_runtime.config import RuntimeConfig

Object = dict[str, Any]


def answer(path: str, deployment: Object | None) -> tuple[int, Object]:
    """HTTP status and body for `/ready` or `/v1/completions`, given the Deployment behind the Service."""
    if deployment is None or not deployment.get("status", {}).get("availableReplicas"):
        return 503, _status(503, "ServiceUnavailable", "no endpoints available for service")
    container = next(c for c in deployment["spec"]["template"]["spec"]["containers"] if c["name"] == "runtime")
    # The container's command line: `millstream serve FLAGS`, of which the image's entrypoint has the first word.
    config = RuntimeConfig.from_args([word for word in container["args"] if word != "serve"])
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
