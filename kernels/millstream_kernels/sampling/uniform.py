"""The uniform numbers that tokens are drawn with: the engine's, bit for bit, so that a seed means the same everywhere.

    u = (mix(mix(seed) ^ position ^ attempt << 48) >> 11) * 2 ** -53          in [0, 1), 53 bits

`mix` is a round of SplitMix64 (Steele, Lea and Flood 2014). A number depends on the request's seed, the token's
position and the attempt alone: a row draws the same token wherever it is in a batch, and no generator has a state.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mixed(state):
    """One round of SplitMix64 over uint64, modulo 2 ** 64."""
    state = state + 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


@triton.jit
def uniform(seed, position, attempt):
    """float64 in [0, 1). `seed`, `position`, `attempt`: int64."""
    counter = position.to(tl.uint64, bitcast=True) ^ (attempt.to(tl.uint64, bitcast=True) << 48)
    state = mixed(mixed(seed.to(tl.uint64, bitcast=True)) ^ counter)
    return (state >> 11).to(tl.float64) * 1.1102230246251565e-16
