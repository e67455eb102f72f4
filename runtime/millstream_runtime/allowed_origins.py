"""Origins of web pages that may ask the server from a browser: what a browser's `Origin` header says of a page.

A browser sends `scheme://host` in lower case, with the port where it is not the scheme's own, and without a path
(RFC 6454, section 6.2). Anything else would never match, so it is refused when it is set. Readable without torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from millstream_runtime.errors import InvalidConfigError

MAX_ORIGINS, MAX_ORIGIN_CHARACTERS = 32, 255
# Also the pattern of the CRD, so without look-ahead. Schemes beyond HTTP are those of desktop and mobile apps.
ORIGIN_PATTERN = r"^(\*|[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:]+\])(:[1-9][0-9]{0,4})?)$"
_PORTS = {"http": "80", "https": "443"}


def check_origins(origins: Sequence[str]) -> None:
    """Raises InvalidConfigError: too many, or one that no browser sends; the message names it and the fix."""
    if len(origins) > MAX_ORIGINS:
        raise InvalidConfigError(
            f"--allowed-origins has {len(origins)} origins; at most {MAX_ORIGINS} are allowed, or '*' for every one."
        )
    for origin in origins:
        if len(origin) > MAX_ORIGIN_CHARACTERS or re.fullmatch(ORIGIN_PATTERN, origin) is None:
            raise InvalidConfigError(
                f"--allowed-origins has {origin!r:.300}, which no browser sends as an origin; write scheme://host or "
                "scheme://host:port in lower case, without a path or a slash at the end, such as "
                "https://chat.example.com, or '*' for every origin."
            )


def as_sent(origin: str) -> str:
    """The origin as a browser sends it: without the port that its scheme has anyway."""
    scheme, _, rest = origin.partition("://")
    port = _PORTS.get(scheme)
    return origin.removesuffix(f":{port}") if port is not None and rest else origin
