"""`reconcile(key)`: make the cluster hold what one LLMDeployment says, and write down what is.

    index -> parse -> pinned revision -> apply what differs -> prune -> ask the model -> status, if it changed

Level-triggered: it looks at everything each time and remembers nothing that it could not find out again, so it may
be killed before or after any of its writes. Reads come from the index; a live GET comes before anything destructive.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.load import ManifestError, parse
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.plan import PlanDefaults
from millstream_operator.reconciling import conditions
from millstream_operator.reconciling.children import Children, namespace_is_going
from millstream_operator.reconciling.claims import Claims
from millstream_operator.reconciling.cluster_client import ApiError, ApiUnreachable, ClusterClient
from millstream_operator.reconciling.conditions import find
from millstream_operator.reconciling.diagnosis import Diagnosis
from millstream_operator.reconciling.events import event_for
from millstream_operator.reconciling.index import Index, OwnerKey
from millstream_operator.reconciling.inspector import Inspector
from millstream_operator.reconciling.kinds import (
    CONTROLLER_REVISION,
    DEPLOYMENT,
    LLM_DEPLOYMENT,
    OWNED,
    PERSISTENT_VOLUME_CLAIM,
    POD,
)
from millstream_operator.reconciling.reasons import Reason
from millstream_operator.reconciling.revisions import Pin, PlanRefused, choose, last_good, pinned, superfluous
from millstream_operator.reconciling.service_probe import ServiceAccess, ask
from millstream_operator.reconciling.status import Answer, Seen, rolled_out, status_of, status_of_invalid
from millstream_operator.reconciling.work_queue import RetryLater
from millstream_operator.rendering.deployment import deployment
from millstream_operator.rendering.names import LEADER, ROLE_LABEL
from millstream_operator.rendering.objects import objects
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.revision import controller_revision

log = logging.getLogger(__name__)
Manifest = dict[str, Any]
RECHECK_OBSTACLE_SECONDS = 30.0
# The node's proxy learns of a new pod a moment after we do: that many unanswered questions are no news.
PATIENCE = 4


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the operator's own configuration gives to new plans and renderings."""

    plan: PlanDefaults = field(default_factory=PlanDefaults)
    pods: PodDefaults = field(default_factory=PodDefaults)


def _utc_now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Reconciler:
    """Works on one key at a time; different keys may be worked on concurrently in one event loop."""

    def __init__(
        self,
        client: ClusterClient,
        index: Index,
        access: ServiceAccess,
        defaults: Defaults,
        now: Callable[[], str] = _utc_now,
    ) -> None:
        self._client, self._index, self._access, self._defaults, self._now = client, index, access, defaults, now
        self._children = Children(client, index)
        self._claims = Claims(client, index)
        self._inspector = Inspector(self._children, index, defaults.plan, defaults.pods, lambda: self._now())
        # By owner's uid: which revision and pods were asked, and what came of it.
        self._answers: dict[str, tuple[object, Answer]] = {}
        self._unanswered: dict[str, int] = {}  # failures in a row

    async def reconcile(self, key: OwnerKey) -> None:
        """Raises RetryLater when the work is not finished; the queue comes back with backoff."""
        manifest = self._index.get(LLM_DEPLOYMENT, key.namespace, key.name)
        if manifest is None or manifest["metadata"].get("deletionTimestamp"):
            return  # its children go by their owner references
        try:
            await self._reconcile(key, manifest)
        except ApiUnreachable as error:
            raise RetryLater(str(error)) from error
        except ApiError as error:
            if namespace_is_going(error):
                return
            raise RetryLater(f"{error.status} {error.message}", error.retry_after_seconds) from error

    async def _reconcile(self, key: OwnerKey, manifest: Manifest) -> None:
        try:
            owner = parse({k: v for k, v in manifest.items() if k != "status"})
        except ManifestError as error:
            await self._write_invalid(manifest, Diagnosis(Reason.INVALID_SPEC, str(error)))
            return
        records = self._children.own(owner, key, CONTROLLER_REVISION)
        try:
            facts = Facts() if pinned(owner, records) is not None else await self._inspector.facts(owner, key)
            pin = choose(owner, self._defaults.plan, self._defaults.pods, records, facts)
        except PlanRefused as refused:
            # The pods stay what they were, and are repaired; what no plan decides (replicas, Service) follows the spec.
            if (kept := last_good(records)) is not None:
                await self._bring_about(owner, kept)
            await self._write_invalid(manifest, refused.problem, refused.plan)
            if refused.recheck_seconds is not None:
                raise RetryLater(refused.problem.message, refused.recheck_seconds) from None
            return
        problem = await self._claims.problem(owner, deployment(owner, pin.revision.template))
        problem = problem or await self._bring_about(owner, pin)
        if problem is None:
            await self._prune(owner, key, pin)
        workload = self._children.get(owner, key, DEPLOYMENT)
        pods = self._index.children(key, POD)
        answer = await self._answer(owner, pin, workload, pods) if problem is None else None
        previous = manifest.get("status") or {}
        seen = Seen(owner, pin.revision, workload, pods, answer, problem, previous)
        await self._write_status(owner, previous, status_of(seen, self._now()))
        if problem is not None:
            raise RetryLater(problem.message, RECHECK_OBSTACLE_SECONDS)
        if answer is not None and answer.failure is not None:
            raise RetryLater(answer.failure.message)
        if answer is None and self._unanswered.get(owner.metadata.uid or ""):
            raise RetryLater("the model does not answer through its Service yet")

    # Children

    async def _bring_about(self, owner: LLMDeployment, pin: Pin) -> Diagnosis | None:
        """The record first: a pod never runs a revision that is not written down."""
        record = controller_revision(owner, pin.revision, pin.number)
        return await self._children.bring_about(owner, [record, *objects(owner, pin.revision)])

    async def _prune(self, owner: LLMDeployment, key: OwnerKey, pin: Pin) -> None:
        """Delete what is ours and no longer wanted."""
        wanted = {(o["kind"], o["metadata"]["name"]) for o in objects(owner, pin.revision)}
        live = self._children.get(owner, key, DEPLOYMENT)
        for kind in OWNED:
            mine = self._children.own(owner, key, kind)
            if kind is PERSISTENT_VOLUME_CLAIM and not rolled_out(owner, pin.revision, live):
                continue  # pods of an older revision may still load from it
            if kind is CONTROLLER_REVISION:
                doomed = superfluous(mine, pin.revision)
            else:
                doomed = [child for child in mine if (kind.kind, child["metadata"]["name"]) not in wanted]
            await self._children.delete(owner, doomed)

    # The model

    async def _answer(
        self, owner: LLMDeployment, pin: Pin, workload: Manifest | None, pods: Sequence[Manifest]
    ) -> Answer | None:
        """Ask once for each revision and set of pods; a failure is asked again at the next try."""
        uid = owner.metadata.uid or ""
        if owner.spec.replicas == 0 or not rolled_out(owner, pin.revision, workload):
            self.forget(uid)
            return None
        asked = (pin.revision.name, owner.spec.service, _serving(pods))
        known = self._answers.get(uid)
        if known is not None and known[0] == asked and known[1].failure is None:
            return known[1]
        answer = await ask(self._access, owner, pin.revision)
        self._answers[uid] = (asked, answer)
        if answer.failure is None:
            self._unanswered.pop(uid, None)
            return answer
        self._unanswered[uid] = self._unanswered.get(uid, 0) + 1
        return answer if self._unanswered[uid] > PATIENCE else None

    # Status

    async def _write_status(self, owner: LLMDeployment, before: Manifest, after: Manifest) -> None:
        """One patch, and only if something changed: our own write wakes us again."""
        after = {name: value for name, value in after.items() if value is not None}
        if {name: before.get(name) for name in after} == after and before.keys() <= after.keys():
            return
        metadata = {"name": owner.name, "namespace": owner.metadata.namespace}
        manifest = {"apiVersion": owner.api_version, "kind": owner.kind, "metadata": metadata, "status": after}
        answer = await self._client.apply(manifest, subresource="status")
        self._index.put(LLM_DEPLOYMENT, answer)
        if (event := event_for(owner, before, after, self._now())) is not None:
            try:
                await self._client.create(event)
            except (ApiError, ApiUnreachable) as error:  # news, not state: the conditions say the same
                log.info("%s/%s: no Event written: %s", owner.metadata.namespace, owner.name, error)

    async def _write_invalid(self, manifest: Manifest, problem: Diagnosis, plan: Manifest | None = None) -> None:
        metadata, previous = manifest["metadata"], manifest.get("status") or {}
        after = status_of_invalid(previous, metadata.get("generation", 0), problem, self._now(), plan)
        if after == previous:
            return
        body = {
            "apiVersion": manifest["apiVersion"],
            "kind": manifest["kind"],
            "metadata": {"name": metadata["name"], "namespace": metadata["namespace"]},
            "status": after,
        }
        self._index.put(LLM_DEPLOYMENT, await self._client.apply(body, subresource="status"))

    def forget(self, uid: str) -> None:
        """Nothing is known any more about an LLMDeployment that is gone, or whose pods are."""
        self._answers.pop(uid, None)
        self._unanswered.pop(uid, None)
        self._claims.forget(uid)


def _serving(pods: Sequence[Manifest]) -> frozenset[str]:
    """The leader pods that are ready: other pods, another question."""
    return frozenset(
        pod["metadata"]["uid"]
        for pod in pods
        if pod["metadata"].get("labels", {}).get(ROLE_LABEL) == LEADER
        and find(pod.get("status", {}).get("conditions") or [], conditions.READY).get("status") == "True"
    )
