"""Models that are inspected by a Job in the fake cluster, and where the inspection stands."""

from __future__ import annotations

import json
from typing import Any

from millstream_operator.kube.kinds import (
    CONFIG_MAP,
    JOB,
)
from millstream_operator.rendering.inspection_record import is_inspection
from tests.support.fake_cluster import FakeCluster
from tests.support.fake_operator import FakeOperator, world
from tests.support.llmdeployments import manifest

Manifest = dict[str, Any]
DIGEST = "sha256:" + "ab" * 32
TOKEN = {"tokenSecretRef": {"name": "hub", "key": "token"}}
UNAUTHORIZED = json.dumps({"reason": "DownloadUnauthorized", "message": "The hub answered HTTP 401 to org/name."})


def model(**source: Any) -> Manifest:
    return {"source": source or {"huggingFace": {"repository": "org/name"}}}


def hub(**fields: Any) -> Manifest:
    return model(huggingFace={"repository": "org/name", **fields})


def inspections(cluster: FakeCluster) -> list[Manifest]:
    return [record for record in cluster.all(CONFIG_MAP) if is_inspection(record)]


def the_job(cluster: FakeCluster) -> Manifest:
    (job,) = cluster.all(JOB)
    return job


def ready_reason(operator: FakeOperator) -> str:
    return str(operator.condition("Ready")["reason"])


async def under_way(stored: Manifest | None = None) -> FakeOperator:
    """An operator that has begun to inspect the model of the one LLMDeployment."""
    operator = FakeOperator(world(stored or manifest(model=hub())))
    await operator.turn()
    return operator
