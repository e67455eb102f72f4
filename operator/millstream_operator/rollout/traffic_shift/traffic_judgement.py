"""Whether the pods of a new revision answer worse than those of the old one. Pure.

    errors          the share of generations that end with `error` is larger, beyond chance
    finish reasons  the share that ends at the limit of tokens differs by 20 percentage points, beyond chance
    ITL             the mean time between tokens is above the objective, or 5 times that of the old pods
    restarts        a container of a new pod that served began anew, and none of the old ones did

"Beyond chance": were both alike, fewer than one rollout in a thousand would show such a difference (the one-sided exact
test of Fisher). It holds for any number of requests, so few of them condemn no revision, and "enough requests" only
says when a stage may end. Shares are those since the pods began; times are those of the stage alone, because they
depend on the load that old and new pods have together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from millstream_operator.workloads.traffic import NO_TRAFFIC, Traffic

CHANCE = 0.001
LEAST_LENGTH_DIFFERENCE = 0.2
# A quantized layer on a CPU may take four times as long as 16 bits, and the spec asks for it (docs/quantization.md).
SLOWER_FACTOR = 5.0
LEAST_INTERVALS = 200  # measured times between tokens on either side


@dataclass(frozen=True, slots=True)
class Side:
    """One revision's pods. `life`: since they began; `stage`: in this stage; `restarts` of their containers in it."""

    life: Traffic = NO_TRAFFIC
    stage: Traffic = NO_TRAFFIC
    restarts: int = 0
    read: int = 0  # pods that could be read


def why_worse(new: Side, old: Side, objective_seconds: float | None = None) -> str | None:
    """Return why the new pods are worse, as the end of a sentence; None where they are not.

    `objective_seconds`: `objectives.itl` of the spec.
    """
    if new.restarts and not old.restarts:
        return f"containers of its pods began anew {new.restarts} times while none of the old pods' did"
    if _is_larger(new.life.error, new.life.finished, old.life.error, old.life.finished):
        return (
            f"{_share(new.life.error, new.life.finished)} of its requests ended with an error, of the old pods' "
            f"{_share(old.life.error, old.life.finished)}"
        )
    if (lengths := _lengths_differ(new.life, old.life)) is not None:
        return lengths
    return _slower(new.stage, old.stage, objective_seconds)


def in_words(new: Side, old: Side) -> str:
    """Return what was compared, for the journal."""
    if not new.read or not old.read:
        return "its pods or the old ones could not be read, so nothing was compared"
    if not new.stage.finished:
        return "no request ended in its pods, so nothing was compared"
    times = [one.stage.mean_interval_seconds for one in (new, old)]
    latency = (
        ""
        if None in times
        else ", mean time between tokens {:.0f} ms and {:.0f} ms".format(*(1000 * (time or 0.0) for time in times))
    )
    return (
        f"errors in {_share(new.life.error, new.life.finished)} of its requests, in "
        f"{_share(old.life.error, old.life.finished)} of the old pods'{latency}"
    )


def _lengths_differ(new: Traffic, old: Traffic) -> str | None:
    """Finished at the limit of tokens, of those that finished without an error."""
    new_all, old_all = new.stop + new.length, old.stop + old.length
    if not new_all or not old_all or abs(new.length / new_all - old.length / old_all) < LEAST_LENGTH_DIFFERENCE:
        return None
    more = _is_larger(new.length, new_all, old.length, old_all)
    if not more and not _is_larger(new.stop, new_all, old.stop, old_all):
        return None
    return (
        f"{_share(new.length, new_all)} of its answers ended at their limit of tokens, of the old pods' "
        f"{_share(old.length, old_all)}"
    )


def _slower(new: Traffic, old: Traffic, objective_seconds: float | None) -> str | None:
    if new.intervals < LEAST_INTERVALS or old.intervals < LEAST_INTERVALS:
        return None
    took, before = new.mean_interval_seconds or 0.0, old.mean_interval_seconds or 0.0
    if objective_seconds is not None:
        is_worse, limit = took > objective_seconds >= before, f"objectives.itl is {1000 * objective_seconds:.0f} ms"
    else:
        is_worse, limit = took > SLOWER_FACTOR * before, f"the limit is {SLOWER_FACTOR:.0f} times"
    if not is_worse:
        return None
    return f"its tokens come every {1000 * took:.0f} ms, those of the old pods every {1000 * before:.0f} ms; {limit}"


def _is_larger(hits: int, size: int, other_hits: int, other_size: int) -> bool:
    """Whether `hits` of `size` is a larger share than `other_hits` of `other_size`, beyond chance."""
    if not size or not other_size or hits * other_size <= other_hits * size:
        return False
    return _chance_of_as_many(hits, size, other_hits, other_size) < CHANCE


def _chance_of_as_many(hits: int, size: int, other_hits: int, other_size: int) -> float:
    """Return the chance of `hits` or more in `size`, where all hits fall anywhere alike (hypergeometric tail)."""
    all_hits, everything = hits + other_hits, size + other_size
    chance = math.exp(
        _log_choose(all_hits, hits) + _log_choose(everything - all_hits, size - hits) - _log_choose(everything, size)
    )
    total = 0.0
    for count in range(hits, min(size, all_hits) + 1):
        total += chance
        if chance < total * 1e-9:  # beyond the mean each term is a smaller part of the one before
            break
        misses = everything - all_hits - size + count + 1
        chance *= (all_hits - count) * (size - count) / ((count + 1) * misses)
    return total


def _log_choose(of: int, chosen: int) -> float:
    return math.lgamma(of + 1) - math.lgamma(chosen + 1) - math.lgamma(of - chosen + 1)


def _share(hits: int, size: int) -> str:
    return f"{hits} of {size}"
