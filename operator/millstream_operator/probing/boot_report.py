"""Read a runtime's boot report from its `/ready`. Pure. The body is untrusted: any program may answer at the address.

    {"phase": "LoadingWeights", "boot_seconds": {"Starting": 2.1, "LoadingWeights": 7.9},
     "eta_seconds": 12.5, "progress": {"done_bytes": 3221225472, "total_bytes": 8053063680},
     "memory": {"weights_bytes": …, "activations_bytes": …, "graphs_bytes": …, "kv_cache_bytes": …,
                "kv_cache_tokens": …},
     "step_times": [{"sequences": 256, "new_tokens": 256, "context_tokens": 1792, "step_microseconds": 14200}]}

`eta_seconds`, `progress`, `memory` and `step_times` are present once the runtime knows them. An invalid part is left
out, and a body without a phase is not a report.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from millstream_operator.planning.measurement import MAX_BATCH_SEQUENCES, StepSample

STARTING, READY = "Starting", "Ready"
UNRESPONSIVE = "Unresponsive"  # was Ready, and its engine completes no step: no part of a warm-up
# The runtime's words in the order in which they come; others, of a newer one, lie between loading and Ready.
RUNTIME_PHASES = (STARTING, "LoadingWeights", "SizingKVCache", "WarmingUp")
MEMORY_KEYS = (
    *("weights_bytes", "activations_bytes", "graphs_bytes", "kv_cache_bytes", "kv_cache_tokens"),
    "draft_kv_cache_bytes",
)
_STATUS_NAMES = {
    "weights_bytes": "weightsBytes",
    "activations_bytes": "activationsBytes",
    "graphs_bytes": "graphsBytes",
    "kv_cache_bytes": "kvCacheBytes",
    "kv_cache_tokens": "kvCacheTokens",
    "draft_kv_cache_bytes": "draftKvCacheBytes",
}
_STEP_KEYS = ("sequences", "new_tokens", "context_tokens", "step_microseconds")
_MOST_STEPS, _MOST_TOKENS = 16, 1 << 32
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
    steps: tuple[StepSample, ...] = ()

    @property
    def measured_memory(self) -> dict[str, int]:
        """`memory` with the names of `status.memory.measured`."""
        return {_STATUS_NAMES[key]: value for key, value in self.memory.items()}

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
        steps=_steps(report.get("step_times")),
        memory={key: found for key in MEMORY_KEYS if (found := _count(memory.get(key))) is not None},
    )


def _steps(value: object) -> tuple[StepSample, ...]:
    """At most one sample of each kind; one with an impossible number is left out."""
    found: dict[str, StepSample] = {}
    for one in value[:_MOST_STEPS] if isinstance(value, list) else ():
        numbers = [_count(_mapping(one).get(name)) for name in _STEP_KEYS]
        if any(number is None for number in numbers):
            continue
        sequences, new_tokens, context, microseconds = (number or 0 for number in numbers)
        if sequences > MAX_BATCH_SEQUENCES:
            continue
        if 1 <= sequences <= new_tokens <= _MOST_TOKENS and context <= _MOST_TOKENS and microseconds:
            sample = StepSample(sequences, new_tokens, context, microseconds)
            found.setdefault(sample.step, sample)
    return tuple(found.values())


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
