"""Which plan an LLMDeployment runs over time: made once per spec, kept, and replaced only where the spec says so.

    spec changed                       -> planned anew, from today's facts
    spec the same, world changed       -> kept; PlanOutdated says what a new plan would gain
    … and it was planned without knowing the GPUs, and never answered -> planned anew (`unproven_plans.py`)
    … and none of its pods ever had a GPU, which others hold -> planned anew on GPUs that are free
    … and updatePolicy FollowOperator  -> planned anew if that gains enough and its pods could start, unless such pods
                                          failed before, or too many others adopt a plan at the moment

Everything is found again from the records. What is remembered here only saves work: a plan whose record is not in the
index yet, and the last comparison of each plan with the cluster (once per change of nodes, prices or defaults).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.spec import UpdatePolicy
from millstream_operator.diagnosis.decisions import Decision
from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.facts.cluster_facts import FactsSource
from millstream_operator.facts.restored_status import RestoredStatus
from millstream_operator.kube.index import OwnerKey
from millstream_operator.planning.calibration import of_plan
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.inspected import Inspected
from millstream_operator.planning.plan import Infeasible, Plan, PlanDefaults
from millstream_operator.planning.planner import decide
from millstream_operator.planning.restart_fields import input_hash
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.revision import Revision, render_revision
from millstream_operator.rendering.revision_marks import NEW_MARKS
from millstream_operator.rollout.adoption import with_adoption
from millstream_operator.rollout.adoption_limit import AdoptionLimit
from millstream_operator.rollout.journal_marks import Entries
from millstream_operator.rollout.outdated import NewPlan, already_failed, outdated, same_choice
from millstream_operator.rollout.revisions import (
    PinnedRevision,
    failed_before,
    newest_first,
    plan_anew,
    plan_or_refuse,
)
from millstream_operator.rollout.same_pods import makes_the_same_pods
from millstream_operator.rollout.unproven_plans import is_replaced_by, is_unproven

Manifest = dict[str, Any]
OTHERS_ADOPT_HINT = (
    "It waits for other LLMDeployments that adopt a plan at the moment; the operator's MILLSTREAM_MAX_ADOPTIONS says "
    "how many may at a time."
)


@dataclass(frozen=True, slots=True)
class Chosen:
    """The revision to run. `outdated`: what a new plan would gain; `decisions`: an adoption that the journal lacks."""

    pin: PinnedRevision
    outdated: Diagnosis | None = None
    decisions: tuple[Decision, ...] = ()


class Pinning:
    """For use within one event loop. What it remembers may be lost at any moment."""

    def __init__(
        self,
        facts: FactsSource,
        plan_defaults: PlanDefaults,
        pod_defaults: PodDefaults,
        limit: AdoptionLimit | None = None,
    ) -> None:
        self._facts, self._plans, self._pods, self._limit = facts, plan_defaults, pod_defaults, limit
        self._made: dict[str, PinnedRevision] = {}  # by uid: planned, and the record is not in the index yet
        self._compared: dict[str, tuple[object, NewPlan | None]] = {}  # by uid
        self.waiting: dict[str, OwnerKey] = {}  # by uid: would adopt another plan if GPUs were free

    def choose(
        self,
        owner: LLMDeployment,
        records: Sequence[Manifest],
        kept: PinnedRevision | None,
        inspected: Inspected | None = None,
        restored: RestoredStatus | None = None,
        journal: Entries = (),
    ) -> Chosen:
        """The pinned plan, or a new one. No await in between: two plans never take the same free GPUs.

        `kept` is `pinned(owner, records)`. What an earlier process found out of a pinned plan (`restored`) is not
        computed again, unless a better plan would be adopted.

        Raises:
            PlanRefused: there is no plan for the spec, or it cannot be run.
        """
        uid, read = owner.metadata.uid or "", inspected or Inspected()
        self.waiting.pop(uid, None)
        if kept is None or not follows(owner):
            self.leave(_key_of(owner))
        if (made := self._made.pop(uid, None)) is not None and _is_on_its_way(made, owner, records):
            return self._promised(owner, made)
        if kept is None:
            facts = read.over(self._facts.of(owner))
            return self._promised(owner, plan_anew(owner, self._plans, self._pods, records, facts))
        if (elsewhere := self._elsewhere(owner, kept, records, read)) is not None:
            return self._promised(owner, elsewhere)
        kept, decisions = with_adoption(kept, records, journal)
        adopts = follows(owner) or is_unproven(kept)
        if restored is not None and not adopts and uid not in self._compared:
            return Chosen(kept, restored.outdated, decisions)
        new = self._outdated(owner, kept.revision, read, adopts=adopts)
        problem: Diagnosis | None = new
        if new is not None and not self._counts(owner, new):
            problem = None
        if new is not None and (follows(owner) or (adopts and new.reason is Reason.NEW_FACTS)):
            fresh = self._adopted(owner, kept, records, read) if problem is not None and new.gains else None
            if fresh is not None and (failure := failed_before(fresh.revision, records)) is not None:
                self.leave(_key_of(owner))
                return Chosen(kept, already_failed(problem or new, failure), decisions)
            if fresh is not None and self._may_adopt(owner, kept, fresh):
                return self._promised(owner, fresh)
            if fresh is not None and problem is not None:
                problem = replace(problem, hint=OTHERS_ADOPT_HINT)
            self.waiting[uid] = _key_of(owner)
        else:
            self.leave(_key_of(owner))
        return Chosen(kept, problem, decisions)

    def preview(self, owner: LLMDeployment, inspected: Inspected) -> Plan:
        """The plan that `choose` would make anew: what a model is prepared for. It reserves nothing.

        Raises:
            PlanRefused: there is no plan for the spec, or it cannot be run.
        """
        return plan_or_refuse(owner, self._plans, inspected.over(self._facts.of(owner)))

    def leave(self, key: OwnerKey) -> None:
        """It adopts nothing now (its spec is refused, say), so it must not keep its place before others."""
        if self._limit is not None:
            self._limit.leave(key)

    def forget(self, uid: str) -> None:
        """The LLMDeployment is gone."""
        for known in (self._made, self._compared, self.waiting):
            known.pop(uid, None)

    def _promised(self, owner: LLMDeployment, made: PinnedRevision) -> Chosen:
        self._made[owner.metadata.uid or ""] = made
        self._facts.promise(owner, made.revision)
        return Chosen(made)

    def _counts(self, owner: LLMDeployment, new: NewPlan) -> bool:
        """Other pods of the same plan always count; another plan does while its pods could start."""
        if new.reason is not Reason.NEW_FACTS or new.revision is None:
            return True
        return self._facts.could_start(owner, new.revision, give_up=True)

    def _may_adopt(self, owner: LLMDeployment, kept: PinnedRevision, fresh: PinnedRevision) -> bool:
        """Whether the fleet's limit lets this one replace what serves."""
        if self._limit is None or not kept.marks.answered or owner.spec.replicas == 0:
            return True
        if not self._limit.may_start(_key_of(owner)):
            return False
        self._limit.start(_key_of(owner), fresh.revision.name)
        return True

    def _elsewhere(
        self, owner: LLMDeployment, kept: PinnedRevision, records: Sequence[Manifest], read: Inspected
    ) -> PinnedRevision | None:
        """A plan on GPUs that are free, for one that never served and whose GPUs others hold; None where there is none.

        Its pods wait, so nothing is lost by planning again.
        """
        revision, marks = kept.revision, kept.marks
        if marks.answered or marks.failure is not None or not revision.plan.get("gpusPerReplica"):
            return None
        if owner.spec.replicas == 0 or self._facts.holds_gpus(owner, revision.digest):
            return None
        if self._facts.could_start(owner, revision, give_up=False):
            return None
        self.waiting[owner.metadata.uid or ""] = _key_of(owner)
        planned = decide(owner, self._plans, read.over(self._facts.of(owner)))
        if isinstance(planned, Infeasible) or planned.requires or planned.waits:
            return None
        if planned.product is None or same_choice(revision.plan, planned.status_plan()):
            return None
        fresh = render_revision(owner, planned, self._pods)
        if not self._facts.could_start(owner, fresh, give_up=False) or failed_before(fresh, records) is not None:
            return None
        return PinnedRevision(fresh, int(newest_first(records)[0]["revision"]) + 1, NEW_MARKS)

    def _outdated(self, owner: LLMDeployment, kept: Revision, read: Inspected, *, adopts: bool) -> NewPlan | None:
        """Compare once per change of the cluster, however often it is asked."""
        uid = owner.metadata.uid or ""
        state = (self._facts.stamp, read, kept.name, owner.spec.replicas, adopts)
        known = self._compared.get(uid)
        if known is not None and known[0] == state:
            return known[1]

        def today(facts: Facts) -> Plan | Infeasible:
            return decide(owner, self._plans, facts, explain=False)

        def rendered(plan: Plan) -> Revision:
            return render_revision(owner, plan, self._pods)

        facts = with_corrections_of(kept, read.over(self._facts.of(owner)))
        found = outdated(kept, facts, today, rendered, follows=adopts)
        self._compared[uid] = state, found
        return found

    def _adopted(
        self, owner: LLMDeployment, kept: PinnedRevision, records: Sequence[Manifest], read: Inspected
    ) -> PinnedRevision | None:
        """A new plan for the same spec; None where it would change no pod, or give up GPUs and wait for others."""
        facts = with_corrections_of(kept.revision, read.over(self._facts.of(owner)))
        planned = decide(owner, self._plans, facts)
        if isinstance(planned, Infeasible) or planned.requires:
            return None
        holds_gpus = self._facts.holds_gpus(owner)
        if planned.waits and holds_gpus:
            return None
        if not follows(owner) and not is_replaced_by(kept, planned, holds_gpus):
            return None
        fresh = render_revision(owner, planned, self._pods)
        if makes_the_same_pods(fresh, kept.revision):
            return None
        return PinnedRevision(fresh, int(newest_first(records)[0]["revision"]) + 1, NEW_MARKS)


def _key_of(owner: LLMDeployment) -> OwnerKey:
    return OwnerKey(owner.metadata.namespace or "", owner.name)


def _is_on_its_way(made: PinnedRevision, owner: LLMDeployment, records: Sequence[Manifest]) -> bool:
    """Planned for this spec, and its record is not in the index: the write failed, or its answer was lost."""
    return made.revision.input_hash == input_hash(owner) and all(
        record["metadata"]["name"] != made.revision.name for record in records
    )


def follows(owner: LLMDeployment) -> bool:
    return owner.spec.runtime is not None and owner.spec.runtime.update_policy is UpdatePolicy.FOLLOW_OPERATOR


def with_corrections_of(kept: Revision, facts: Facts) -> Facts:
    """Return the facts with the measurements that the pinned plan was made with, so that newer ones change nothing."""
    return replace(facts, calibration=of_plan(kept.plan))
