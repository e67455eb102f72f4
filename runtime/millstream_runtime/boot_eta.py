"""Estimate the remaining time of a boot from measured times. Pure.

    LoadingWeights   remaining bytes / the mean rate so far
    other phases     their time in this process's last boot, less the time passed in the running one
    later phases     their time in the last boot

A process's first boot has no previous one, and nothing is guessed: while it loads weights the estimate covers the
weights only, and before and after that there is none. (The operator then adds the warm-up time of the last pod.) A
restarted engine has the whole sum.
"""

from __future__ import annotations

from millstream_runtime.boot import BOOT_PHASES, BootSnapshot, Phase


def eta_seconds(boot: BootSnapshot, now_seconds: float) -> float | None:
    """The remaining seconds, as far as they are known. None: the boot is over, or nothing is known.

    Args:
        now_seconds: of the monotonic clock, as in `boot.weights`.
    """
    if boot.phase not in BOOT_PHASES:
        return None
    here = _rest_of_weights(boot, now_seconds) if boot.phase is Phase.LOADING_WEIGHTS else None
    if here is None and boot.phase in boot.last_boot_seconds:
        here = max(0.0, boot.last_boot_seconds[boot.phase] - boot.seconds.get(boot.phase, 0.0))
    if here is None:
        return None
    to_come = BOOT_PHASES[BOOT_PHASES.index(boot.phase) + 1 :]
    return here + sum(boot.last_boot_seconds.get(phase, 0.0) for phase in to_come)


def _rest_of_weights(boot: BootSnapshot, now_seconds: float) -> float | None:
    weights = boot.weights
    if weights is None or (rate := weights.bytes_per_second) is None:
        return None
    rest_seconds = (weights.total_bytes - weights.done_bytes) / rate
    return max(0.0, rest_seconds - max(0.0, now_seconds - weights.at_seconds))
