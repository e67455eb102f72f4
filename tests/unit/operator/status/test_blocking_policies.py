"""The policies that keep Ready False: their order, and that each is silent where it does not apply."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.planning.plan import PlanDefaults
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.status.blocking_policies import POLICIES, find_blocker
from millstream_operator.status.observation import Observation
from tests.support.llmdeployments import deployment
from tests.support.pinned_plans import choose

OWNER = deployment()
REVISION = choose(OWNER, PlanDefaults("registry.example.com/runtime:1"), PodDefaults(), []).revision
REFUSED = Diagnosis(Reason.APPLY_REFUSED, "The API server refuses the Service demo.")


def workload(*conditions: dict[str, Any]) -> dict[str, Any]:
    status = {"observedGeneration": 1, "conditions": [*conditions]}
    return {"metadata": {"generation": 1}, "spec": {"template": REVISION.template, "replicas": 1}, "status": status}


LATE = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
NOT_CREATED = {"type": "ReplicaFailure", "status": "True", "message": 'pods "demo-x" is forbidden: no'}


def test_no_policy_speaks_of_a_rollout_that_goes_well() -> None:
    observation = Observation(OWNER, REVISION, workload())
    assert [policy(observation) for policy in POLICIES] == [None] * len(POLICIES)
    assert find_blocker(observation) is None


@pytest.mark.parametrize(
    ("observation", "reason"),
    [
        (Observation(OWNER, REVISION, workload(LATE)), Reason.PROGRESS_DEADLINE_EXCEEDED),
        (Observation(OWNER, REVISION, workload(LATE, NOT_CREATED)), Reason.ADMISSION_DENIED),
        (Observation(OWNER, REVISION, workload(LATE, NOT_CREATED), problem=REFUSED), Reason.APPLY_REFUSED),
    ],
)
def test_the_first_policy_that_finds_something_decides(observation: Observation, reason: Reason) -> None:
    found = find_blocker(observation)
    assert found is not None
    assert found.reason is reason
