"""How far the Job of a step is, from the `/ready` of its pod. Pure. The body is untrusted: any program may answer.

    {"phase": "Working", "progress": {"stage": "layers", "done": 11.4, "total": 32}, "eta_seconds": 2381.0}

The words for the status are rounded, so that it changes when there is news: the layer, or a share in steps of 5
percent, and the time that is left in minutes, tens of minutes or hours.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

_STAGE = re.compile(r"[a-z]{1,32}")
_LAYERS = "layers"
_LARGEST = 1e6
_LONGEST_SECONDS = 30 * 86400.0
_SHARE_STEP_PERCENT = 5
_MINUTE, _TEN_MINUTES, _HOUR = 60, 600, 3600


def read_step_progress(body: object) -> str | None:
    """Return the progress in words, `layer 12 of 32, about 40 min left`; None where the body has none."""
    report = body if isinstance(body, Mapping) else {}
    progress = report.get("progress")
    if not isinstance(progress, Mapping):
        return None
    stage = progress.get("stage")
    done, total = _number(progress.get("done"), _LARGEST), _number(progress.get("total"), _LARGEST)
    if not isinstance(stage, str) or not _STAGE.fullmatch(stage) or done is None or not total or done > total:
        return None
    if stage == _LAYERS:
        words = f"layer {min(math.floor(done) + 1, round(total))} of {round(total)}"
    else:
        percent = math.floor(100 * done / total / _SHARE_STEP_PERCENT) * _SHARE_STEP_PERCENT
        words = f"{stage} {percent} %"
    left = _number(report.get("eta_seconds"), _LONGEST_SECONDS)
    return words if left is None or done >= total else f"{words}, about {_time_left(left)} left"


def _time_left(seconds: float) -> str:
    """Rounded up: `3 min`, `40 min`, `2 h`."""
    if seconds <= _TEN_MINUTES:
        return f"{max(1, math.ceil(seconds / _MINUTE))} min"
    if seconds <= 2 * _HOUR:
        return f"{10 * math.ceil(seconds / _TEN_MINUTES)} min"
    return f"{math.ceil(seconds / _HOUR)} h"


def _number(value: object, largest: float) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= largest:
        return None
    return float(value)
