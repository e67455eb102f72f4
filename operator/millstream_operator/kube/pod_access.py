"""HTTP access to one pod: by its address, or through the API server's pod proxy in development.

`/ready` answers 503 with the same JSON while the model loads, so a 503 is an answer here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from millstream_operator.kube.bounded_http import UnusableAnswer, request_json, request_text
from millstream_operator.kube.client import ApiError, ApiUnreachable, ClusterClient
from millstream_operator.rendering.runtime_config import RUNTIME_PORT

LIMIT_BYTES = 1 << 16
METRICS_LIMIT_BYTES = 1 << 20
NOT_READY_STATUS = 503


class PodUnreachable(Exception):
    """No usable answer from the pod. `str()` says what happened instead."""


class PodAccess(Protocol):
    async def ready(self, pod: Mapping[str, Any], timeout_seconds: float) -> dict[str, Any]:
        """Return the JSON of the pod's `/ready`, whether it is ready or not. Raises PodUnreachable."""
        ...

    async def metrics(self, pod: Mapping[str, Any], timeout_seconds: float) -> str:
        """Return the text of the pod's `/metrics`. Raises PodUnreachable."""
        ...


class DirectPods:
    """By the pod's own address: used inside the cluster."""

    async def ready(self, pod: Mapping[str, Any], timeout_seconds: float) -> dict[str, Any]:
        url = _url(pod, "/ready")
        accepted = (200, NOT_READY_STATUS)
        try:
            return await request_json(
                "GET", url, timeout_seconds=timeout_seconds, limit_bytes=LIMIT_BYTES, accepted=accepted
            )
        except UnusableAnswer as problem:
            raise PodUnreachable(f"/ready {problem}") from None

    async def metrics(self, pod: Mapping[str, Any], timeout_seconds: float) -> str:
        url = _url(pod, "/metrics")
        try:
            return await request_text(url, timeout_seconds=timeout_seconds, limit_bytes=METRICS_LIMIT_BYTES)
        except UnusableAnswer as problem:
            raise PodUnreachable(f"/metrics {problem}") from None


def _url(pod: Mapping[str, Any], path: str) -> str:
    """Raises PodUnreachable where the pod has no address yet."""
    address = str(pod.get("status", {}).get("podIP") or "")
    if not address:
        raise PodUnreachable("the pod has no address yet")
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}:{RUNTIME_PORT}{path}"


class ProxyPods:
    """Through the API server's pod proxy: for an operator outside the cluster. Needs `get` on `pods/proxy`."""

    def __init__(self, client: ClusterClient) -> None:
        self._client = client

    async def ready(self, pod: Mapping[str, Any], timeout_seconds: float) -> dict[str, Any]:
        try:
            return await self._client.get_raw(_proxy_path(pod, "/ready"), timeout_seconds)
        except ApiError as error:
            if error.status == NOT_READY_STATUS and "phase" in error.body:
                return dict(error.body)
            raise PodUnreachable(f"/ready through the API server: {error}") from None
        except ApiUnreachable as error:
            raise PodUnreachable(f"/ready through the API server: {error}") from None

    async def metrics(self, pod: Mapping[str, Any], timeout_seconds: float) -> str:
        try:
            return await self._client.get_text(_proxy_path(pod, "/metrics"), timeout_seconds)
        except (ApiError, ApiUnreachable) as error:
            raise PodUnreachable(f"/metrics through the API server: {error}") from None


def _proxy_path(pod: Mapping[str, Any], path: str) -> str:
    metadata = pod["metadata"]
    return f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}:{RUNTIME_PORT}/proxy{path}"
