"""Which revision an LLMDeployment runs: the pinned one while its spec says the same, else a new one. Pure.

    stored ControllerRevisions, spec -> the revision to run, and its number

The newest record (highest `revision`) is the current one. Its input hash is compared with that of today's spec, so an
operator with another default image, other pod defaults or another renderer finds the spec unchanged and keeps what
runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.stored import UnknownField
from millstream_operator.api.validation.size_rules import too_large
from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.diagnosis.plan_refused import PlanRefused
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.fixes.patch import kubectl_patch
from millstream_operator.planning.plan import Infeasible, Plan, PlanDefaults
from millstream_operator.planning.planner import decide
from millstream_operator.planning.requires import refusal
from millstream_operator.planning.restart_fields import input_hash, input_hash_of_format_1, input_hash_of_newer
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.revision import Revision, controller_revision, read_revision, render_revision
from millstream_operator.rendering.revision_marks import NEW_MARKS, Failure, Marks, read_marks
from millstream_operator.rollout.same_pods import makes_the_same_pods

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PinnedRevision:
    """The revision to run, and its record's number and marks."""

    revision: Revision
    number: int
    marks: Marks = field(default_factory=Marks)


def pinned(
    owner: LLMDeployment,
    stored: Iterable[Manifest],
    unknown: Sequence[UnknownField] = (),
    drafts: Collection[str | None] | None = None,
) -> PinnedRevision | None:
    """The newest revision, if it was planned from what the spec still says, or the one that served before it.

    `unknown`: fields of the stored spec that a newer operator counted. `drafts`: the tuned drafts of which one may
    serve, by key, None for the draft as it is; None: any.
    """
    records = newest_first(stored)
    if not records:
        return None
    newest, answered = read_pin(records[0]), last_answered(records)
    if answered is not None and not _asks_for(owner, answered.revision, unknown, drafts):
        answered = None
    if (
        newest is not None
        and _asks_for(owner, newest.revision, unknown, drafts)
        and (newest.marks.failure is None or answered is None)
    ):
        return newest
    # Back from a revision that never served: what served before it still runs, so it is not rendered anew. Back, too,
    # from one that was adopted for the same spec and failed: what runs was planned from this spec.
    if answered is not None:
        return PinnedRevision(answered.revision, records[0]["revision"] + 1, replace(NEW_MARKS, answered=True))
    return None


def plan_anew(
    owner: LLMDeployment,
    plan_defaults: PlanDefaults,
    pod_defaults: PodDefaults,
    stored: Iterable[Manifest],
    facts: Facts,
) -> PinnedRevision:
    """Plan and render now.

    Raises:
        PlanRefused: there is no plan, or it cannot be run.
    """
    planned = plan_or_refuse(owner, plan_defaults, facts)
    records = newest_first(stored)
    number = (records[0]["revision"] if records else 0) + 1
    return PinnedRevision(render_revision(owner, planned, pod_defaults), number, NEW_MARKS)


def plan_or_refuse(owner: LLMDeployment, plan_defaults: PlanDefaults, facts: Facts) -> Plan:
    """Return a plan that can be run.

    Raises:
        PlanRefused: there is none, or the spec is too large to be kept with its revisions.
    """
    if (problem := too_large(owner.spec)) is not None:
        raise PlanRefused(Diagnosis(Reason.INVALID_SPEC, problem), None)
    planned = decide(owner, plan_defaults, facts)
    if isinstance(planned, Infeasible) or planned.requires:
        raise PlanRefused(_why_refused(owner, planned), planned.status_plan())
    return planned


def _asks_for(
    owner: LLMDeployment,
    revision: Revision,
    unknown: Sequence[UnknownField],
    drafts: Collection[str | None] | None,
) -> bool:
    if drafts is not None and revision.tuned_draft not in drafts:
        return False
    if unknown and revision.input_hash == input_hash_of_newer(owner, unknown):
        return True  # an operator that was downgraded keeps what the newer one rendered
    wanted = input_hash(owner) if revision.boot is not None else input_hash_of_format_1(owner)
    return revision.input_hash == wanted


def failed_before(fresh: Revision, stored: Iterable[Manifest]) -> Failure | None:
    """Why such pods failed before; None where they did not."""
    pins = [pin for record in newest_first(stored) if (pin := read_pin(record)) is not None]
    failed = [pin for pin in pins if pin.marks.failure is not None]
    return next((pin.marks.failure for pin in failed if makes_the_same_pods(pin.revision, fresh)), None)


def record_of(owner: LLMDeployment, pin: PinnedRevision) -> Manifest:
    """The ControllerRevision that stores a pinned revision."""
    return controller_revision(owner, pin.revision, pin.number, pin.marks)


def read_pin(record: Manifest) -> PinnedRevision | None:
    """A stored record; None when its format is not known here."""
    revision = read_revision(record)
    return PinnedRevision(revision, record["revision"], read_marks(record)) if revision is not None else None


def last_good(stored: Sequence[Manifest], running: str | None) -> PinnedRevision | None:
    """What continues to serve while a newer spec is refused: it is kept, and no rollout is begun or carried on for it.

    A revision that has answered: the one whose digest is `running`, which the workload makes pods of, else the newest.
    A record alone is no proof that a revision was ever applied, since a blocked rollout has one too. Where none has
    answered, the newest that did not fail continues to start.
    """
    pins = [pin for record in newest_first(stored) if (pin := read_pin(record)) is not None]
    answered = [pin for pin in pins if pin.marks.answered]
    if answered:
        return next((pin for pin in answered if pin.revision.digest == running), answered[0])
    return next((pin for pin in pins if pin.marks.failure is None), pins[0] if pins else None)


def revision_that_runs(stored: Iterable[Manifest], digest: str | None) -> PinnedRevision | None:
    """The revision of the digest that the workload makes pods of now; None where there is none, or no record of it."""
    pins = [pin for record in newest_first(stored) if (pin := read_pin(record)) is not None]
    return next((pin for pin in pins if pin.revision.digest == digest), None)


def last_answered(stored: Iterable[Manifest], but: PinnedRevision | None = None) -> PinnedRevision | None:
    """The newest revision that answered through the Service, other than `but`: what a failed one goes back to."""
    for record in newest_first(stored):
        pin = read_pin(record)
        if pin is not None and pin.marks.answered and (but is None or pin.revision.name != but.revision.name):
            return pin
    return None


def _why_refused(owner: LLMDeployment, planned: Plan | Infeasible) -> Diagnosis:
    """One reason and one sentence for a plan that must not be applied."""
    if isinstance(planned, Plan):
        return Diagnosis(Reason.UNSUPPORTED_BY_RUNTIME, refusal(planned.requires) or "")
    fixes = "; ".join(f"{fix.field}: {fix.value} gives {fix.summary}" for fix in planned.fixes)
    reason = Reason.BUDGET_EXCEEDED if planned.constraint == "budget" else Reason.INFEASIBLE
    patch = next((fix.patch for fix in planned.fixes if fix.patch is not None), None)
    first = f" The first edit: {kubectl_patch(owner.name, owner.metadata.namespace, patch)}" if patch else ""
    return Diagnosis(reason, f"{planned.message}{f' What would do: {fixes}.' if fixes else ''}{first}")


def newest_first(stored: Iterable[Manifest]) -> list[Manifest]:
    return sorted(stored, key=lambda record: (int(record["revision"]), record["metadata"]["name"]), reverse=True)
