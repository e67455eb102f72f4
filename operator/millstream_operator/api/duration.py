"""Durations in the API are strings such as `90s`, `20m` or `1h30m`: GEP-2257 without its milliseconds.

Everything that carries one today (probes, grace periods, deadlines) is counted in whole seconds by Kubernetes, so
a millisecond would be accepted and then lost. The pattern is a subset of what Go's `time.ParseDuration` and CEL's
`duration()` read, hence the same string means the same in the API server, in the operator and on a laptop.
"""

from __future__ import annotations

import re

DURATION_PATTERN = r"^([0-9]{1,5}(h|m|s)){1,3}$"
DURATION_MAX_LENGTH = 18
# Latency objectives alone are counted in milliseconds: nothing hands them to Kubernetes.
LATENCY_PATTERN = r"^([0-9]{1,5}(h|m|s|ms)){1,3}$"

_LATENCY_PART = re.compile(r"([0-9]{1,5})(ms|h|m|s)")
_MILLISECONDS_IN = {"h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}
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


def milliseconds(latency: str) -> int:
    """Whole milliseconds of a latency such as 200ms, 1s or 1s500ms.

    Raises:
        ValueError: the string is no latency.
    """
    if not re.fullmatch(LATENCY_PATTERN, latency):
        raise ValueError(f"{latency!r} is not a latency such as 200ms or 1s")
    return sum(int(number) * _MILLISECONDS_IN[unit] for number, unit in _LATENCY_PART.findall(latency))
