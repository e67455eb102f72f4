"""Which random specs a transition goes through: mostly those that the operator renders, and some that it must refuse.

A spec that is drawn from the schema breaks a rule between fields about every second time, and then the operator never
sees it. So most draws are repeated until the API server takes the spec and the plan requires nothing that the runtime
cannot do. Every eighth transition takes its first draw, whatever it is: refusals stay part of the proof.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.facts.inspection import WANTS_FACTS
from millstream_operator.planning.plan import PlanDefaults
from millstream_operator.planning.spec_plan import plan_from_spec
from tests.soak.api import Object, llmd
from tests.soak.spec_generator import SpecGenerator

ANYTHING_EVERY = 8
MOST_DRAWS = 200


def takes_anything(number: int) -> bool:
    """Whether the transition of this number keeps its first draw."""
    return number % ANYTHING_EVERY == 0


def runnable(spec: Object) -> bool:
    """Whether the operator's own types take the spec and its plan needs nothing that the runtime lacks."""
    manifest = llmd("drawn", spec)
    manifest["metadata"] |= {"namespace": "default", "uid": "0", "generation": 1}
    try:
        owner = LLMDeployment.model_validate_json(json.dumps(manifest), by_alias=True, by_name=False)
        return not set(plan_from_spec(owner, PlanDefaults(runtime_image="registry/runtime:1")).requires) - WANTS_FACTS
    except (ValueError, StopIteration):  # pydantic's, refusals of the planner, and a source of no kind
        return False


async def draw(
    generator: SpecGenerator, spec: Object, number: int, admitted: Callable[[Object], Awaitable[bool]]
) -> Object:
    """Another spec than `spec`, to be followed by it again."""
    drawn = generator.mutated(spec)
    if takes_anything(number):
        return drawn
    for _ in range(MOST_DRAWS):
        if drawn != spec and runnable(drawn) and await admitted(drawn):
            break
        drawn = generator.mutated(spec)
    return drawn
