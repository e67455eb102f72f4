"""The keys of the operator's probe, one per LLMDeployment, derived from a secret that only the operator has.

    secret in the operator's namespace --HMAC-SHA256(owner's uid)--> key, sent with the probe of this model alone
                                                                       |
                                                  SHA-256 digest, in live.json: what the pods compare with

So no Secret is written into a user's namespace and none is read there. A digest in a ConfigMap opens nothing, and a
program that catches the probe of one model cannot ask another one. While the secret is rotated there are two: pods
accept the keys of both, the operator sends that of the first.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field

from millstream_operator.api.llmdeployment import LLMDeployment

PREFIX = "millstream-probe-"


@dataclass(frozen=True, slots=True)
class ProbeKeyRing:
    """`secrets`: at least 32 random bytes each, the one in use first; empty: there are no keys."""

    secrets: tuple[bytes, ...] = field(default=(), repr=False)

    def key(self, owner: LLMDeployment) -> str | None:
        """Return the key that the probe sends; None where there is none."""
        return _key(self.secrets[0], owner) if self.secrets else None

    def digests(self, owner: LLMDeployment) -> tuple[str, ...]:
        """Return the digests of the keys that the pods accept, in hex."""
        return tuple(hashlib.sha256(_key(secret, owner).encode()).hexdigest() for secret in self.secrets)


def _key(secret: bytes, owner: LLMDeployment) -> str:
    subject = f"{owner.metadata.namespace}/{owner.name}/{owner.metadata.uid}"
    return PREFIX + hmac.new(secret, subject.encode(), hashlib.sha256).hexdigest()
