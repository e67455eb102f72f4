"""Where the API server is: its Service's address, and the addresses behind it, which pods must not reach.

Read from the EndpointSlice default/kubernetes, on which the chart gives one right (get) unless
network.apiServerEndpoints is Disabled, and from the environment that
the kubelet gives every pod. Where it cannot be read, what is known stays.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from millstream_operator.kube.client import ApiError, ClusterClient
from millstream_operator.kube.kinds import ENDPOINT_SLICE
from millstream_operator.rendering.closed_addresses import ApiServer

log = logging.getLogger(__name__)
NAMESPACE, NAME = "default", "kubernetes"
DEFAULT_PORT = 443


class ApiServers:
    """`known` is what was read last."""

    def __init__(self, client: ClusterClient, environment: Mapping[str, str]) -> None:
        self._client = client
        self._service = tuple(_service(environment))
        self._denied = False
        self.known: tuple[ApiServer, ...] = self._service

    async def refresh(self) -> bool:
        """Read the EndpointSlice. Return whether the addresses changed.

        Raises:
            ApiError, ApiUnreachable: the addresses stay as they were.
        """
        before = self.known
        try:
            found = await self._client.get(ENDPOINT_SLICE, NAMESPACE, NAME)
        except ApiError as error:
            if error.status != 403:
                raise
            found = None
        if found is None:
            if not self._denied:
                log.warning(
                    "The EndpointSlice default/kubernetes cannot be read (chart value network.apiServerEndpoints): "
                    "NetworkPolicies close the API server at its Service's address only."
                )
            self._denied = True
            return False
        self.known = tuple(sorted({*self._service, *_addresses(found)}))
        return self.known != before


def _service(environment: Mapping[str, str]) -> Iterator[ApiServer]:
    address, port = environment.get("KUBERNETES_SERVICE_HOST", ""), environment.get("KUBERNETES_SERVICE_PORT", "")
    if _is_address(address):
        yield ApiServer(address, int(port) if port.isdigit() else DEFAULT_PORT)


def _addresses(endpoint_slice: Mapping[str, Any]) -> Iterator[ApiServer]:
    for port in endpoint_slice.get("ports") or ():
        for endpoint in endpoint_slice.get("endpoints") or ():
            for address in endpoint.get("addresses") or ():
                if _is_address(address) and isinstance(port.get("port"), int):
                    yield ApiServer(address, port["port"])


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
