"""Addresses of servers, and what messages may say of them.

A message becomes a condition of the LLMDeployment, which more people read than may read a Secret. An address can hold
one: `HF_ENDPOINT` and the proxies may come from a Secret, and what a server answers (`Location`, `realm`) may repeat
what it was sent. A process sees only its environment, which does not say where a value is from. So a message has the
host of an address only where the spec or this package names it, and calls every other one by what holds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

DEFAULT_PORTS = {"http": 80, "https": 443}

Origin = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class NamedServer:
    """The server at `url`, and its name in messages: an address that may be shown, or a description."""

    url: str
    name: str

    def name_of(self, url: str) -> str:
        """What a message calls the server of `url`, to which this one may have redirected."""
        try:
            is_here = origin(url) == origin(self.url)
        except ValueError:
            is_here = False
        return self.name if is_here else f"a server to which {self.name} redirects"


def origin(url: str) -> Origin:
    """Scheme, host and port: what a credential belongs to. Raises ValueError: it is not a URL."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or DEFAULT_PORTS.get(parts.scheme, 80)


def is_http_address(text: str) -> bool:
    """Whether it is like https://host, perhaps with a port and a path; no user, password, query or fragment."""
    try:
        parts = urlsplit(text)
        scheme, host, _ = origin(text)
        host.encode("idna")
    except ValueError:  # also for a port that is no number, and a name that no resolver takes
        return False
    is_plain = text.isprintable() and " " not in text and not any(mark in text for mark in "@?#\\")
    return is_plain and scheme in DEFAULT_PORTS and bool(host) and bool(parts.netloc)
