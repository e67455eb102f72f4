"""Read a runtime's boot report from its `/ready`. Pure. The body is untrusted: any program may answer at the address.

    {"phase": "LoadingWeights", "boot_seconds": {"Starting": 2.1, "LoadingWeights": 7.9},
     "eta_seconds": 12.5, "progress": {"done_bytes": 3221225472, "total_bytes": 8053063680},
     "memory": {"weights_bytes": …, "activations_bytes": …, "graphs_bytes": …, "kv_cache_bytes": …,
                "kv_cache_tokens": …}}

`eta_seconds`, `progress` and `memory` are present once the runtime knows them. An invalid part is left out, and a body
without a phase is not a report.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

STARTING, READY = "Starting", "Ready"
UNRESPONSIVE = "Unresponsive"  # was Ready, and its engine completes no step: no part of a warm-up
# The runtime's words in the order in which they come; others, of a newer one, lie between loading and Ready.
RUNTIME_PHASES = (STARTING, "LoadingWeights", "SizingKVCache", "WarmingUp")
MEMORY_KEYS = ("weights_bytes", "activations_bytes", "graphs_bytes", "kv_cache_bytes", "kv_cache_tokens")
_PHASE = re.compile(r"[A-Z][A-Za-z]{0,62}")
_LARGEST_INTEGER = 1 << 53
_LONGEST_SECONDS = 30 * 86400.0
_MOST_PHASES = 32


@dataclass(frozen=True, slots=True)
class BootReport:
    """`seconds` by phase, the running one included. `eta_seconds` is from when the report was made."""

    phase: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    eta_seconds: float | None = None
    done_bytes: int | None = None
    memory: Mapping[str, int] = field(default_factory=dict)

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True, slots=True)
class PodReport:
    """The last report of one pod. `is_stalled`: neither phase nor bytes moved for half of the whole budget."""

    boot: BootReport
    is_stalled: bool = False


def aged(report: PodReport, seconds: float) -> PodReport:
    """Return a report as it stands `seconds` later: that much less time remains."""
    if report.boot.eta_seconds is None:
        return report
    return replace(report, boot=replace(report.boot, eta_seconds=max(0.0, report.boot.eta_seconds - seconds)))


def read_boot_report(body: object) -> BootReport | None:
    """Return the report in the body of `/ready`; None where it is not one."""
    report = _mapping(body)
    phase = report.get("phase")
    if not isinstance(phase, str) or not _PHASE.fullmatch(phase):
        return None
    seconds = {
        str(name): found
        for name, value in list(_mapping(report.get("boot_seconds")).items())[:_MOST_PHASES]
        if (found := _seconds(value)) is not None
    }
    memory = _mapping(report.get("memory"))
    return BootReport(
        phase=phase,
        seconds=seconds,
        eta_seconds=_seconds(report.get("eta_seconds")),
        done_bytes=_count(_mapping(report.get("progress")).get("done_bytes")),
        memory={key: found for key in MEMORY_KEYS if (found := _count(memory.get(key))) is not None},
    )


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _seconds(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LONGEST_SECONDS:
        return None
    return float(value)


def _count(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST_INTEGER:
        return None
    return value
