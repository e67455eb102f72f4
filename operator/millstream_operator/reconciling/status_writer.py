"""Write a status; where the API server refuses it, write one that it accepts, and say what is missing.

What was refused is remembered, so that a steady state does not try it again in every turn. After a restart it is tried
once more, which changes nothing in the cluster.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from millstream_operator.kube.client import ApiError, ClusterClient
from millstream_operator.kube.index import Index
from millstream_operator.kube.kinds import LLM_DEPLOYMENT
from millstream_operator.status.accepted_status import LEVELS, Refusal, accepted, refusal_of

log = logging.getLogger(__name__)
Manifest = dict[str, Any]
INVALID = (400, 422)


class StatusWriter:
    """For use within one event loop. `now` is RFC 3339, UTC."""

    def __init__(self, client: ClusterClient, index: Index, now: Callable[[], str]) -> None:
        self._client, self._index, self._now = client, index, now
        self._refused: dict[str, Refusal] = {}  # by the owner's uid

    def acceptable(self, uid: str, status: Manifest, previous: Manifest) -> Manifest:
        """Return the status without what is known to be refused."""
        known = self._refused.get(uid)
        if known is None or not known.is_about(status):
            self._refused.pop(uid, None)
            return status
        return accepted(status, known, previous.get("conditions") or (), self._now())

    async def write(self, subject: Manifest, status: Manifest, previous: Manifest) -> Manifest:
        """Write and return what was accepted. `subject` has apiVersion, kind, and metadata with name and uid.

        Raises:
            ApiError: refused for another reason than its content, or even without its optional parts.
        """
        try:
            await self._apply(subject, status)
            return status
        except ApiError as error:
            if error.status not in INVALID:
                raise
            refused = error
        for level in LEVELS:
            refusal = refusal_of(status, refused.message, _fields(refused), level)
            smaller = accepted(status, refusal, previous.get("conditions") or (), self._now())
            try:
                await self._apply(subject, smaller)
            except ApiError as error:
                if error.status not in INVALID:
                    raise
                refused = error
                continue
            name = f"{subject['metadata']['namespace']}/{subject['metadata']['name']}"
            log.error("%s: the API server refuses a part of its status, which is left out: %s", name, refusal.message)
            self._refused[subject["metadata"]["uid"]] = refusal
            return smaller
        raise refused

    def forget(self, uid: str) -> None:
        self._refused.pop(uid, None)

    async def _apply(self, subject: Manifest, status: Manifest) -> None:
        metadata = {name: subject["metadata"][name] for name in ("name", "namespace")}
        body = {"apiVersion": subject["apiVersion"], "kind": subject["kind"], "metadata": metadata, "status": status}
        self._index.put(LLM_DEPLOYMENT, await self._client.apply(body, subresource="status"))


def _fields(error: ApiError) -> Iterator[str]:
    """The fields that the API server's answer names."""
    details = error.body.get("details")
    causes = details.get("causes") if isinstance(details, dict) else None
    for cause in causes if isinstance(causes, list) else ():
        if isinstance(cause, dict) and isinstance(cause.get("field"), str):
            yield cause["field"]
