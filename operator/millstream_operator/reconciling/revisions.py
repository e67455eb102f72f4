"""Which revision an LLMDeployment runs: the pinned one while its spec says the same, else a new one. Pure.

    stored ControllerRevisions, spec -> the revision to run, its number, and the records that may go

The newest record (highest `revision`) is the current one. Its input hash is compared with that of today's spec, so an
operator with another default image, other pod defaults or another renderer finds its spec unchanged and keeps what
runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.input_hash import input_hash
from millstream_operator.planning.plan import Infeasible, Plan, PlanDefaults
from millstream_operator.planning.planner import decide
from millstream_operator.planning.requires import refusal
from millstream_operator.reconciling.diagnosis import Diagnosis
from millstream_operator.reconciling.reasons import Reason
from millstream_operator.rendering.inspection_record import is_inspection, superfluous_inspections
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.revision import Revision, read_revision, render_revision

Manifest = dict[str, Any]
HISTORY_LIMIT = 4  # records kept, the current one included


@dataclass(frozen=True, slots=True)
class Pin:
    """The revision to run and the number of its record."""

    revision: Revision
    number: int


class PlanRefused(Exception):
    """A plan that must not be applied: it is infeasible, or needs what the runtime cannot do. Nothing is changed."""

    def __init__(self, problem: Diagnosis, plan: dict[str, Any] | None, recheck_seconds: float | None = None) -> None:
        """`plan`: what was planned and not applied. `recheck_seconds`: where time alone may help."""
        super().__init__(problem.message)
        self.problem, self.plan, self.recheck_seconds = problem, plan, recheck_seconds


def choose(
    owner: LLMDeployment,
    plan_defaults: PlanDefaults,
    pod_defaults: PodDefaults,
    stored: Iterable[Manifest],
    facts: Facts | None = None,
) -> Pin:
    """The pinned revision if the spec still asks for it; otherwise one that is planned and rendered now.

    Raises:
        PlanRefused: there is no plan, or it cannot be run.
    """
    records = newest_first(stored)
    if (pin := pinned(owner, records)) is not None:
        return pin
    planned = decide(owner, plan_defaults, facts or Facts())
    if isinstance(planned, Infeasible) or planned.requires:
        raise PlanRefused(_why_refused(planned), planned.status_plan())
    fresh = render_revision(owner, planned, pod_defaults)
    return Pin(fresh, (records[0]["revision"] if records else 0) + 1)


def pinned(owner: LLMDeployment, stored: Iterable[Manifest]) -> Pin | None:
    """The newest revision, if the spec still asks for it: then nothing is planned and no fact is needed."""
    for record in newest_first(stored)[:1]:
        revision = read_revision(record)
        if revision is not None and revision.input_hash == input_hash(owner):
            return Pin(revision, record["revision"])
    return None


def last_good(stored: Iterable[Manifest]) -> Pin | None:
    """The newest revision that was ever applied: what goes on serving while a newer spec is refused."""
    for record in newest_first(stored):
        if (revision := read_revision(record)) is not None:
            return Pin(revision, record["revision"])
    return None


def _why_refused(planned: Plan | Infeasible) -> Diagnosis:
    """One reason and one sentence for a plan that must not be applied."""
    if isinstance(planned, Plan):
        return Diagnosis(Reason.UNSUPPORTED_BY_RUNTIME, refusal(planned.requires) or "")
    fixes = "; ".join(f"{fix.field}: {fix.value} gives {fix.summary}" for fix in planned.fixes)
    reason = Reason.BUDGET_EXCEEDED if planned.constraint == "budget" else Reason.INFEASIBLE
    return Diagnosis(reason, f"{planned.message}{f' What would do: {fixes}.' if fixes else ''}")


def superfluous(stored: Iterable[Manifest], current: Revision) -> list[Manifest]:
    """Records beyond the history limits, oldest last; never the current one."""
    records = list(stored)
    others = [record for record in newest_first(records) if record["metadata"]["name"] != current.name]
    return [*others[HISTORY_LIMIT - 1 :], *superfluous_inspections(records)]


def newest_first(stored: Iterable[Manifest]) -> list[Manifest]:
    """Records of plans; those of inspections are kept beside them."""
    plans = [record for record in stored if not is_inspection(record)]
    return sorted(plans, key=lambda record: int(record["revision"]), reverse=True)
