"""The Secret in the operator's own namespace from which the probe's keys are derived. Its values are never logged.

    data.key    64 hexadecimal digits; the operator fills it in where it is missing
    data.next   only while it is rotated: pods accept both, so `key` can be replaced by it some minutes later

The chart creates the Secret empty and lets the operator get and patch exactly this one. Where it cannot be used (an
operator that is started by hand), this process makes a secret of its own and keeps it in memory.
"""

from __future__ import annotations

import base64
import binascii
import logging
import re
import secrets
from typing import Any

from millstream_operator.kube.client import ApiError, ClusterClient
from millstream_operator.kube.kinds import SECRET
from millstream_operator.rendering.probe_key_ring import ProbeKeyRing

log = logging.getLogger(__name__)
KEY, NEXT = "key", "next"
SECRET_BYTES = 32
REFUSED = (400, 403, 404, 422)  # another try gives the same answer
_HEX = re.compile(r"[0-9a-f]{64}")
Manifest = dict[str, Any]


class ProbeKeySecret:
    """Reads the Secret, and fills it in. `ring` is what was read last."""

    def __init__(self, client: ClusterClient, namespace: str, name: str) -> None:
        self._client, self._namespace, self._name = client, namespace, name
        self.ring = ProbeKeyRing()

    async def refresh(self) -> bool:
        """Read the Secret, and fill in the key where it is missing. Return whether the keys changed.

        Only for the leader: it may write.

        Raises:
            ApiError, ApiUnreachable, NotLeader: nothing was changed; the keys stay as they were.
        """
        before = self.ring
        stored = await self._read()
        if stored is None:
            self.ring = ProbeKeyRing((self._own(),))
        else:
            key = _secret(stored, KEY) or await self._fill_in(stored)
            following = _secret(stored, NEXT)
            self.ring = ProbeKeyRing(tuple(dict.fromkeys(one for one in (key, following) if one is not None)))
        return self.ring != before

    def _own(self) -> bytes:
        """The secret that this process has, or a new one."""
        return self.ring.secrets[0] if self.ring.secrets else secrets.token_bytes(SECRET_BYTES)

    async def _read(self) -> Manifest | None:
        try:
            stored = await self._client.get(SECRET, self._namespace, self._name)
        except ApiError as error:
            if error.status != 403:
                raise
            stored = None
        if stored is None and not self.ring.secrets:
            log.warning(
                "The Secret %s/%s does not exist or cannot be read: keys of the probe are kept in memory until the "
                "operator ends.",
                self._namespace,
                self._name,
            )
        return stored

    async def _fill_in(self, stored: Manifest) -> bytes:
        """Write a new random key, unless the Secret has changed since it was read."""
        made = secrets.token_hex(SECRET_BYTES)
        change = {
            "metadata": {"resourceVersion": stored["metadata"]["resourceVersion"]},
            "data": {KEY: base64.b64encode(made.encode()).decode()},
        }
        try:
            await self._client.merge(SECRET, self._namespace, self._name, change)
        except ApiError as error:
            if error.status not in REFUSED:
                raise
            log.warning("The Secret %s/%s cannot be written: %s", self._namespace, self._name, error)
            return self._own()
        log.info("made a new key of the probe in the Secret %s/%s", self._namespace, self._name)
        return bytes.fromhex(made)


def _secret(stored: Manifest, name: str) -> bytes | None:
    """Return a value of the Secret; None where it is absent or was not made as it must be."""
    try:
        text = base64.b64decode((stored.get("data") or {}).get(name) or "", validate=True).decode().strip()
    except (binascii.Error, UnicodeDecodeError):
        return None
    return bytes.fromhex(text) if _HEX.fullmatch(text) else None
