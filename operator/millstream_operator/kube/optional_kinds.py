"""Optional kinds, which a cluster may serve or not: discovered at run time and listed periodically.

    every minute, with jitter:  GET /apis/keda.sh/v1alpha1, /apis/monitoring.coreos.com/v1     which of them are served?
                                list each that is, by our label                                into the index

They are not watched. kopf's registry is made once, at start, and a watch of a kind that is not served is retried
forever; one `kubectl apply` of a CRD adds or removes a kind at any time. No pod waits for an object of these kinds, so
repairing an edit within a minute is soon enough, and a listing by label costs little. The discovery documents are open
to every account (`system:discovery`), so no right on CRDs is needed.

A kind counts as gone when it was missing twice in a row: a CRD that is being replaced is missing for a moment, and
switching to another autoscaler in that moment would be worse than being late.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from millstream_operator.kube.client import ApiError, ClusterClient
from millstream_operator.kube.index import Index, OwnerKey
from millstream_operator.kube.kinds import OPTIONAL, Kind, label_selector

log = logging.getLogger(__name__)

DISCOVERY_SECONDS = 60.0
DISCOVERY_TIMEOUT_SECONDS = 10.0
MISSES_UNTIL_GONE = 2
_EVERY_VERSION = str(10**30)  # newer than any known object


@dataclass(frozen=True, slots=True)
class DiscoveryResult:
    """`changed`: the LLMDeployments whose objects changed. `other_kinds`: other kinds are served than before."""

    changed: frozenset[OwnerKey]
    other_kinds: bool


class OptionalKinds:
    """The optional kinds that are served, as of the last discovery. `served` is empty before the first."""

    def __init__(
        self, index: Index, namespaces: Iterable[str | None] = (None,), kinds: Iterable[Kind] = OPTIONAL
    ) -> None:
        self._index, self._namespaces, self._kinds = index, tuple(namespaces), tuple(kinds)
        self._missed: dict[Kind, int] = {}  # discoveries in a row
        self._refused: frozenset[Kind] = frozenset()
        self._discovered = False
        self.served: frozenset[Kind] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(kind.kind for kind in self.served)

    async def discover(self, client: ClusterClient) -> DiscoveryResult:
        """Find out which kinds are served, and list their objects into the index.

        Raises:
            ApiError, ApiUnreachable: no result; the last one stays.
        """
        found = await self._discover(client)
        changed: set[OwnerKey] = set()
        readable = set()
        refused = set()
        for kind in self._kinds:
            if kind not in found:
                continue
            try:
                changed |= await self._list(client, kind)
                readable.add(kind)
            except ApiError as error:
                if error.status == 403:
                    refused.add(kind)
                elif error.status != 404:  # gone since it was discovered
                    raise
        self._log_refused(frozenset(refused))
        return self._update_served(frozenset(readable), changed)

    async def _discover(self, client: ClusterClient) -> set[Kind]:
        """Return the kinds that the API server serves. One request per group and version."""
        found: set[Kind] = set()
        for group, version in dict.fromkeys((kind.group, kind.version) for kind in self._kinds):
            try:
                document = await client.get_raw(f"/apis/{group}/{version}", DISCOVERY_TIMEOUT_SECONDS)
            except ApiError as error:
                if error.status != 404:
                    raise
                continue
            plurals = {str(resource.get("name")) for resource in _resources(document)}
            found |= {k for k in self._kinds if (k.group, k.version) == (group, version) and k.plural in plurals}
        return found

    async def _list(self, client: ClusterClient, kind: Kind) -> set[OwnerKey]:
        items: list[dict[str, Any]] = []
        versions: list[int] = []
        for namespace in self._namespaces:
            listed, version = await client.list(kind, namespace, label_selector(kind))
            items += listed
            versions.append(int(version))
        return self._index.replace(kind, items, str(min(versions)))

    def _update_served(self, readable: frozenset[Kind], changed: set[OwnerKey]) -> DiscoveryResult:
        self._missed = {kind: self._missed.get(kind, 0) + 1 for kind in self.served - readable}
        served = readable | {kind for kind, misses in self._missed.items() if misses < MISSES_UNTIL_GONE}
        for kind in self.served - served:
            log.info("%s (%s) is no longer served", kind.kind, kind.api_version)
            changed |= self._index.replace(kind, (), _EVERY_VERSION)
        for kind in served - self.served if self._discovered else ():
            log.info("%s (%s) is served now", kind.kind, kind.api_version)
        other = served != self.served
        self.served, self._discovered = served, True
        return DiscoveryResult(frozenset(changed), other)

    def _log_refused(self, refused: frozenset[Kind]) -> None:
        for kind in refused - self._refused:
            log.warning(
                "%s (%s) is served, but this account may not list it, so it is not used", kind.kind, kind.api_version
            )
        self._refused = refused


def _resources(document: dict[str, Any]) -> list[dict[str, Any]]:
    found = document.get("resources")
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
