"""All objects that one LLMDeployment owns besides its revisions, in the order in which they are applied."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.status import AppliedStrategy
from millstream_operator.planning.rollout_strategy import rollout_strategy
from millstream_operator.rendering.config_maps import boot_config_map, live_config_map
from millstream_operator.rendering.deployment import deployment
from millstream_operator.rendering.model_cache import model_cache
from millstream_operator.rendering.network_policy import network_policy
from millstream_operator.rendering.pod_disruption_budget import pod_disruption_budget
from millstream_operator.rendering.revision import Revision
from millstream_operator.rendering.service import service
from millstream_operator.rendering.service_account import service_account
from millstream_operator.rendering.surroundings import Surroundings

ALONE = Surroundings()
RenderWorkload = Callable[[LLMDeployment, dict[str, Any], AppliedStrategy], dict[str, Any]]


def objects(
    owner: LLMDeployment,
    revision: Revision,
    strategy: AppliedStrategy | None = None,
    also_running: Iterable[Revision] = (),
    surroundings: Surroundings = ALONE,
    render_workload: RenderWorkload = deployment,
) -> list[dict[str, Any]]:
    """Return the objects; those that a pod needs come before what makes the pods.

    `strategy`: how the revision reaches the pods; None: as the spec and the plan decide. `also_running`:
    older revisions with pods, whose configuration must stay while they do. `render_workload`: renders what makes the
    pods.
    """
    also_running = [*also_running]
    boots = {one.config_hash: one.boot for one in (*also_running, revision) if one.boot is not None}
    has_keys = any(boot.get("api_keys_file") for boot in boots.values())
    digests = surroundings.probe_keys.digests(owner) if has_keys else ()
    # What its pods do before the runtime starts is to download.
    pods_download = any(one.template["spec"].get("initContainers") for one in (*also_running, revision))
    around = surroundings.network, surroundings.operator_namespace, surroundings.api_servers
    wanted = [
        service_account(owner),
        network_policy(owner, *around, pods_download=pods_download),
        service(owner),
        pod_disruption_budget(owner),
        model_cache(owner),
        *(boot_config_map(owner, boot, config_hash) for config_hash, boot in boots.items()),
        live_config_map(owner, digests) if revision.boot is not None else None,
        render_workload(owner, revision.template, strategy or rollout_strategy(owner, revision.plan, None)),
    ]
    return [rendered for rendered in wanted if rendered is not None]
