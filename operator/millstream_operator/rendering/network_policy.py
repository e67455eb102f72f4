"""The NetworkPolicy of a deployment's pods: what they may reach, and, where it is declared, who may reach them.

    egress    DNS of the cluster; TCP to hub and registry for a model that is downloaded; spec.network.egress
    ingress   with spec.network.ingress or the chart's: those peers and the operator, at the HTTP port

Policies add up, so one that admits everyone would open a namespace whose own policies deny everyone. Where no peer is
declared ours is silent about ingress, and the namespace decides. Of egress that the spec or a download opens, two
things are taken out: metadata services, which give away the node's credentials, and the API server. The pods that
inspect a model need the same as those that serve, so the policy covers every pod of the deployment. A revision that
serves may download what today's spec does not: a new pod of it needs the hub, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import Field, field_validator

from millstream_operator.api.access import IPBlock, LabelSelector, Network, NetworkMode, NetworkPeer
from millstream_operator.api.base import ApiModel
from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.planning.made_model import made_method
from millstream_operator.planning.requires import usable_draft
from millstream_operator.rendering.closed_addresses import ApiServer, shielded
from millstream_operator.rendering.model_source import downloads
from millstream_operator.rendering.names import DEPLOYMENT_LABEL, HTTP_PORT_NAME, child
from millstream_operator.rendering.preparation_job import gate_of
from millstream_operator.rendering.runtime_config import RUNTIME_PORT
from millstream_runtime.config import CAPABILITIES, Capabilities

NAMESPACE_LABEL = "kubernetes.io/metadata.name"
NODE_LOCAL_DNS = "169.254.20.10/32"  # where NodeLocal DNSCache listens on every node
Peer = dict[str, Any]
# A hub or a registry may be anywhere, also in the cluster: some network plugins do not count pods to an ipBlock.
ANYWHERE: tuple[Peer, ...] = (
    {"ipBlock": {"cidr": "0.0.0.0/0"}},
    {"ipBlock": {"cidr": "::/0"}},
    {"namespaceSelector": {}},
)


CLUSTER_DNS = (
    NetworkPeer(
        namespace_selector=LabelSelector(match_labels={NAMESPACE_LABEL: "kube-system"}),
        pod_selector=LabelSelector(match_labels={"k8s-app": "kube-dns"}),
    ),
    NetworkPeer(ip_block=IPBlock(cidr=NODE_LOCAL_DNS)),
)
DNS_PORTS = (53,)


class NetworkDefaults(ApiModel):
    """The chart's settings for the policies of all models. They reach no pod, so they are not pinned."""

    mode: NetworkMode = NetworkMode.MANAGED
    ingress: Annotated[list[NetworkPeer], Field(max_length=32)] = Field(default_factory=list)
    dns: Annotated[list[NetworkPeer], Field(max_length=32)] = Field(default_factory=list)  # empty: CLUSTER_DNS
    dns_ports: Annotated[list[Annotated[int, Field(ge=1, le=65535)]], Field(max_length=8)] = Field(default_factory=list)

    @field_validator("ingress", "dns")
    @classmethod
    def _are_blocks_or_pods(cls, peers: list[NetworkPeer]) -> list[NetworkPeer]:
        """What `api/rules.py` asks of the peers of a spec: here one mistake would stop the policies of all models."""
        for peer in peers:
            names_pods = peer.namespace_selector is not None or peer.pod_selector is not None
            if (peer.ip_block is not None) == names_pods:
                raise ValueError("give either ipBlock, or namespaceSelector, podSelector or both")
        return peers


def network_policy(
    owner: LLMDeployment,
    defaults: NetworkDefaults,
    operator_namespace: str = "",
    api_servers: Iterable[ApiServer] = (),
    runtime: Capabilities = CAPABILITIES,
    *,
    pods_download: bool = False,
) -> dict[str, Any] | None:
    """Return the policy; None where the mode is Disabled.

    `pods_download`: pods of a revision that runs download, whatever the spec says now.
    """
    network = owner.spec.network or Network()
    if (network.mode or defaults.mode) is NetworkMode.DISABLED:
        return None
    ingress = [*defaults.ingress, *(network.ingress or ())]
    spec: dict[str, Any] = {
        "podSelector": {"matchLabels": {DEPLOYMENT_LABEL: owner.name}},
        "policyTypes": ["Ingress", "Egress"] if ingress else ["Egress"],
        "egress": _egress(network, defaults, [*api_servers], pods_download or spec_downloads(owner, runtime)),
    }
    if ingress:
        admitted = [*_operator(operator_namespace), *map(_plain, ingress)]
        spec["ingress"] = [{"from": admitted, "ports": [{"port": _port(owner), "protocol": "TCP"}]}]
    return child(owner, "networking.k8s.io/v1", "NetworkPolicy") | {"spec": spec}


def spec_downloads(owner: LLMDeployment, runtime: Capabilities = CAPABILITIES) -> bool:
    """Whether a pod of the spec, or of one of its Jobs, must reach a hub or a registry.

    A draft model counts where the runtime drafts with it: elsewhere its spec is refused.
    """
    draft = usable_draft(owner.spec, runtime)
    gate = owner.spec.quantization.quality_gate if owner.spec.quantization is not None else None
    sources = (owner.spec.model.source, draft, gate.base if gate is not None else None)
    return any(downloads(source) for source in sources if source is not None)


def _port(owner: LLMDeployment) -> str | int:
    """By number where Jobs make or judge the model: their pods answer there, too, and name no port."""
    has_jobs = made_method(owner.spec) is not None or gate_of(owner) is not None
    return RUNTIME_PORT if has_jobs else HTTP_PORT_NAME


def _egress(
    network: Network, defaults: NetworkDefaults, api_servers: list[ApiServer], has_downloads: bool
) -> list[dict[str, Any]]:
    dns = {
        "to": [*map(_plain, defaults.dns or CLUSTER_DNS)],
        "ports": [
            {"port": port, "protocol": protocol}
            for port in defaults.dns_ports or DNS_PORTS
            for protocol in ("UDP", "TCP")
        ],
    }
    found = [dns]
    if has_downloads:
        found += shielded(ANYWHERE, [{"protocol": "TCP"}], api_servers)
    for rule in network.egress or ():
        ports = [{"protocol": "TCP", **_plain(port)} for port in rule.ports or ()]
        found += shielded([*map(_plain, rule.to)], ports, api_servers)
    return found


def _operator(namespace: str) -> list[Peer]:
    """The operator's pods, which ask whether the model is ready."""
    if not namespace:
        return []
    labels = {"matchLabels": {"app.kubernetes.io/name": "millstream"}}
    return [{"namespaceSelector": {"matchLabels": {NAMESPACE_LABEL: namespace}}, "podSelector": labels}]


def _plain(value: ApiModel) -> dict[str, Any]:
    """As the API server stores it: without empty maps and lists, so that no repair finds a difference."""
    dumped = value.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {name: _filled(field) for name, field in dumped.items()}


def _filled(field: Any) -> Any:
    return {name: inner for name, inner in field.items() if inner} if isinstance(field, dict) else field
