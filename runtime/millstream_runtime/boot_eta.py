"""When a boot will be over, from what it has measured itself. Pure.

    LoadingWeights   bytes that are missing / the mean bytes a second so far
    other phases     what they took in this process's last boot, less what has passed of the running one
    to come          what they took in the last boot

A process's first boot has no last one, and nothing is guessed in its place: while it loads weights the estimate ends
with the weights, and before and after that there is none. (The operator then counts with what the last pod's warm-up
took.) An engine that is started again after a death has the whole sum.
"""

from __future__ import annotations

from millstream_runtime.boot import BOOT_PHASES, BootSnapshot, Phase


def eta_seconds(boot: BootSnapshot, now_seconds: float) -> float | None:
    """What remains, as far as it is known. None: the boot is over, or nothing is known.

    Args:
        now_seconds: of the monotonic clock, as in `boot.weights`.
    """
    if boot.phase not in BOOT_PHASES:
        return None
    here = _rest_of_weights(boot, now_seconds) if boot.phase is Phase.LOADING_WEIGHTS else None
    if here is None and boot.phase in boot.former_seconds:
        here = max(0.0, boot.former_seconds[boot.phase] - boot.seconds.get(boot.phase, 0.0))
    if here is None:
        return None
    to_come = BOOT_PHASES[BOOT_PHASES.index(boot.phase) + 1 :]
    return here + sum(boot.former_seconds.get(phase, 0.0) for phase in to_come)


def _rest_of_weights(boot: BootSnapshot, now_seconds: float) -> float | None:
    weights = boot.weights
    if weights is None or (rate := weights.bytes_per_second) is None:
        return None
    rest_seconds = (weights.total_bytes - weights.done_bytes) / rate
    return max(0.0, rest_seconds - max(0.0, now_seconds - weights.at_seconds))
