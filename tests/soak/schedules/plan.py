"""The two soaks of schedules: of the whole engine, and of speculation alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.soak.schedules.constraints import processors_of
from tests.soak.schedules.engines import ProcessorsOf
from tests.soak.schedules.schedule import Schedule, draw
from tests.soak.schedules.speculating import draw_speculating


@dataclass(frozen=True, slots=True)
class Plan:
    """How schedules are drawn from a seed and a number. `processors_of`: see `Engines`. `sampled_share`: see
    `Catalogue`. `chunk`: schedules that a process takes at once; an interrupted run loses those that it has begun."""

    draw: Callable[[int, int], Schedule]
    processors_of: ProcessorsOf | None = None
    sampled_share: float = 0.0
    chunk: int = 25


SCHEDULES = Plan(draw)
SPECULATION = Plan(draw_speculating, processors_of, sampled_share=0.5, chunk=5)
