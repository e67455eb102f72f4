"""Durations in the API are strings such as `90s`, `20m` or `1h30m`: GEP-2257 without its milliseconds.

Everything that carries one today (probes, grace periods, deadlines) is counted in whole seconds by Kubernetes, so
a millisecond would be accepted and then lost. The pattern is a subset of what Go's `time.ParseDuration` and CEL's
`duration()` read, hence the same string means the same in the API server, in the operator and on a laptop.
"""

from __future__ import annotations

import re

DURATION_PATTERN = r"^([0-9]{1,5}(h|m|s)){1,3}$"
DURATION_MAX_LENGTH = 18

_PART = re.compile(r"([0-9]{1,5})([hms])")
_SECONDS_IN = {"h": 3600, "m": 60, "s": 1}


def seconds(duration: str) -> int:
    """Whole seconds of a duration string.

    Raises:
        ValueError: the string is no duration.
    """
    if not re.fullmatch(DURATION_PATTERN, duration):
        raise ValueError(f"{duration!r} is not a duration such as 30s, 20m or 1h30m")
    return sum(int(number) * _SECONDS_IN[unit] for number, unit in _PART.findall(duration))
