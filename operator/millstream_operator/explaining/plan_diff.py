"""What applying a spec would change: fields of the spec, values of the plan, and whether pods restart. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.explaining.text import Style, columns
from millstream_operator.planning.plan import Infeasible, Plan
from millstream_operator.planning.requires import refusal
from millstream_operator.planning.restart_fields import input_hash

# Of a plan only what it does; reasons and predictions follow from that.
PLAN_FIELDS = (
    *("accelerator", "gpusPerReplica", "tensorParallelSize", "pipelineParallelSize", "quantization", "kvCache"),
    *("engine", "speculation", "replicas"),
)
ABSENT = "absent"


def plan_diff(
    wanted: LLMDeployment,
    found: Plan | Infeasible,
    live: LLMDeployment | None,
    live_status: Mapping[str, Any],
    style: Style,
) -> str:
    """Return the diff as text. `live` None: the object does not exist yet."""
    title = style.bold(f"{wanted.name}: {found.summary}")
    if live is None:
        return "\n".join([title, "", "  It does not exist yet; applying creates it.", *_blocker(found)])
    rows = [[f"spec.{path}", f"{before} -> {after}"] for path, before, after in differences(_spec(live), _spec(wanted))]
    plan_before = {name: (live_status.get("plan") or {}).get(name) for name in PLAN_FIELDS}
    plan_after = {name: found.status_plan().get(name) for name in PLAN_FIELDS}
    if isinstance(found, Plan):
        known = {name: value for name, value in plan_before.items() if value is not None}
        after = {name: plan_after[name] for name in known}
        # What an older operator did not write down is no change.
        changed = [change for change in differences(known, after) if change[1] != ABSENT]
        rows += [[f"plan.{path}", f"{before} -> {now}"] for path, before, now in changed]
    lines = [title, "", *(columns(rows) or ["  Nothing changes."])]
    if isinstance(found, Plan) and not found.requires and rows:
        restarts = input_hash(live) != input_hash(wanted)
        lines += ["", "  The pods are planned again and rolled out." if restarts else "  No pod restarts."]
    return "\n".join([*lines, *_blocker(found)])


def differences(before: Any, after: Any, path: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield (path, before, after) of every leaf that differs."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in dict.fromkeys([*before, *after]):
            yield from differences(before.get(name), after.get(name), f"{path}.{name}" if path else str(name))
    elif before != after:
        yield path, _shown(before), _shown(after)


def _blocker(found: Plan | Infeasible) -> list[str]:
    if isinstance(found, Infeasible):
        return ["", f"  Applying changes no pod. {found.message}"]
    missing = refusal(found.requires)
    return ["", f"  Applying changes no pod. {missing}"] if missing else []


def _spec(deployment: LLMDeployment) -> dict[str, Any]:
    return deployment.spec.model_dump(mode="json", by_alias=True, exclude_none=True)


def _shown(value: Any) -> str:
    return ABSENT if value is None else str(value)
