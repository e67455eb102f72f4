"""What the pods may reach and who may reach them, decided for single connections as a network plugin decides."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Any

import pytest

from millstream_operator.api.access import IPBlock, LabelSelector, NetworkMode, NetworkPeer
from millstream_operator.api.load import ManifestError
from millstream_operator.rendering.closed_addresses import ApiServer, shielded
from millstream_operator.rendering.network_policy import NetworkDefaults, network_policy
from tests.support.llmdeployments import deployment

Manifest = dict[str, Any]
API = (ApiServer("10.0.0.5", 6443), ApiServer("10.96.0.1", 443), ApiServer("fd12::5", 6443))
HUB = {"source": {"huggingFace": {"repository": "org/name"}}}
IMAGE = {"source": {"image": {"reference": "registry.example.com/model:1"}}}
METADATA = (
    "169.254.169.254",
    "169.254.170.23",  # EKS Pod Identity
    "100.100.100.200",  # Alibaba Cloud
    "168.63.129.16",  # Azure's wire server
    "192.0.0.192",  # Oracle Cloud Classic
    "fd00:ec2::254",
    "fd00:ec2::23",
    "fd20:ce::254",
    "fd00:c1::a9fe:a9fe",
    "fd00:42::42",
    "fe80::a9fe:a9fe",
)
DNS_PODS = {"namespace": {"kubernetes.io/metadata.name": "kube-system"}, "labels": {"k8s-app": "kube-dns"}}
OPERATOR = {
    "namespace": {"kubernetes.io/metadata.name": "millstream-system"},
    "labels": {"app.kubernetes.io/name": "millstream"},
}


def policy(defaults: NetworkDefaults | None = None, **spec: Any) -> Manifest:
    found = network_policy(deployment(**spec), defaults or NetworkDefaults(), "millstream-system", API)
    assert found is not None
    rendered: Manifest = found["spec"]
    return rendered


def peers_hold(peers: list[Manifest], other: str | Manifest) -> bool:
    """`other`: an address, or a pod by its namespace's labels and its own."""
    return any(_holds(peer, other) for peer in peers)


def _holds(peer: Manifest, other: str | Manifest) -> bool:
    if isinstance(other, str):
        address = ipaddress.ip_address(other)
        block = peer.get("ipBlock", {"cidr": "255.255.255.255/32"})
        inside = address in ipaddress.ip_network(block["cidr"])
        return inside and not any(address in ipaddress.ip_network(one) for one in block.get("except", ()))
    if "ipBlock" in peer:
        return False
    parts = (("namespaceSelector", "namespace"), ("podSelector", "labels"))
    return all(peer.get(selector, {}).get("matchLabels", {}).items() <= other[part].items() for selector, part in parts)


def reaches(spec: Manifest, to: str | Manifest, port: int, protocol: str = "TCP") -> bool:
    return any(
        peers_hold(rule["to"], to) and any(_port_holds(one, port, protocol) for one in rule.get("ports", [{}]))
        for rule in spec["egress"]
    )


def _port_holds(entry: Manifest, port: int, protocol: str) -> bool:
    if not entry:
        return True
    first = int(entry.get("port", 1))
    last = int(entry.get("endPort", first if "port" in entry else 65535))
    return bool(entry["protocol"] == protocol and first <= port <= last)


def everything_open() -> Iterator[Manifest]:
    """Specs that open as much as a spec can."""
    anywhere = [{"ipBlock": {"cidr": "0.0.0.0/0"}}, {"ipBlock": {"cidr": "::/0"}}, {"namespaceSelector": {}}]
    api_ports = [{"port": 6443}, {"port": 443}]
    yield {"model": HUB}
    yield {"model": IMAGE}
    yield {"network": {"egress": [{"to": anywhere}]}}
    yield {"network": {"egress": [{"to": anywhere, "ports": [{"port": 1, "endPort": 65535}]}]}}
    yield {"network": {"egress": [{"to": [{"ipBlock": {"cidr": "10.0.0.5/32"}}]}]}}
    yield {"network": {"egress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "ports": api_ports}]}}
    for address in ("100.100.100.200/32", "168.63.129.16/32", "192.0.0.192/32", "168.63.0.0/16", "fd00::/8"):
        yield {"network": {"egress": [{"to": [{"ipBlock": {"cidr": address}}]}]}}
    yield {"network": {"egress": [{"to": [{"ipBlock": {"cidr": "fe80::/16"}}]}]}}
    yield {"network": {"egress": [{"to": [{"ipBlock": {"cidr": "::ffff:a9fe:a9fe/128"}}]}]}}


@pytest.mark.parametrize("spec", [*everything_open()])
def test_no_spec_opens_metadata_services_or_the_api_server(spec: Manifest) -> None:
    rendered = policy(**spec)
    for address in METADATA:
        for port in (80, 53, 443, 8080):
            assert not reaches(rendered, address, port), address
    for server in API:
        assert not reaches(rendered, server.address, server.port), server


@pytest.mark.parametrize("cidr", ["00.0.0.0/0", "10.00.0.5/32", "0169.254.169.254/32"])
def test_an_address_that_readers_take_differently_is_refused(cidr: str) -> None:
    with pytest.raises(ManifestError, match="cidr"):
        policy(network={"egress": [{"to": [{"ipBlock": {"cidr": cidr}}]}]})


@pytest.mark.parametrize("cidr", ["00.0.0.0/0", "::::/0", "::ffff:a9fe:a9fe/128"])
def test_a_block_that_is_not_understood_is_never_passed_on(cidr: str) -> None:
    """A chart's peer, or one that was stored, does not pass the pattern of the CRD again."""
    assert shielded([{"ipBlock": {"cidr": cidr}}], [], []) == []


def test_other_programs_on_the_api_servers_node_stay_reachable() -> None:
    """A registry or a collector may listen there; a cluster of one node has everything there."""
    rendered = policy(model=HUB)
    assert reaches(rendered, "10.0.0.5", 5000)
    assert reaches(rendered, "10.0.0.5", 6442)
    assert reaches(rendered, "10.0.0.5", 6444)
    one = {"to": [{"ipBlock": {"cidr": "10.0.0.5/32"}}], "ports": [{"port": 4317}]}
    assert reaches(policy(network={"egress": [one]}), "10.0.0.5", 4317)
    excepted = {"to": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.0.0.0/24"]}}]}
    assert not reaches(policy(network={"egress": [excepted]}), "10.0.0.5", 5000), "what the spec excepts stays closed"


def test_an_api_server_at_two_ports_of_one_address_is_closed_at_both() -> None:
    """Rules add up: one for each port would open the other."""
    servers = [ApiServer("10.0.0.5", 6443), ApiServer("10.0.0.5", 443)]
    rendered = shielded([{"ipBlock": {"cidr": "0.0.0.0/0"}}], [{"protocol": "TCP"}], servers)
    assert [rule["ports"] for rule in rendered[1:]] == [
        [
            {"protocol": "TCP", "port": 1, "endPort": 442},
            {"protocol": "TCP", "port": 444, "endPort": 6442},
            {"protocol": "TCP", "port": 6444, "endPort": 65535},
        ]
    ]


@pytest.mark.parametrize(("model", "may"), [(HUB, True), (IMAGE, True), (None, False)])
def test_only_a_pod_that_downloads_may_call_out(model: Manifest | None, may: bool) -> None:
    rendered = policy(model=model) if model is not None else policy()
    assert reaches(rendered, "203.0.113.7", 443) is may
    assert reaches(rendered, {"namespace": {"team": "mirrors"}, "labels": {"app": "hub"}}, 8080) is may
    assert reaches(rendered, "2001:db8::7", 443) is may
    assert not reaches(rendered, "203.0.113.7", 443, "UDP")


def test_dns_is_the_clusters_alone() -> None:
    rendered = policy()
    for protocol in ("UDP", "TCP"):
        assert reaches(rendered, DNS_PODS, 53, protocol)
        assert reaches(rendered, "169.254.20.10", 53, protocol), "NodeLocal DNSCache"
        assert not reaches(rendered, "8.8.8.8", 53, protocol)
        assert not reaches(rendered, {**DNS_PODS, "labels": {"k8s-app": "metrics-server"}}, 53, protocol)
        assert not reaches(rendered, {**DNS_PODS, "namespace": {"team": "a"}}, 53, protocol)
    assert not reaches(rendered, DNS_PODS, 8080)
    openshift = NetworkDefaults(
        dns=[NetworkPeer(namespace_selector=LabelSelector(match_labels={"name": "openshift-dns"}))], dns_ports=[5353]
    )
    assert reaches(policy(openshift), {"namespace": {"name": "openshift-dns"}, "labels": {}}, 5353, "UDP")
    assert not reaches(policy(openshift), DNS_PODS, 53, "UDP")


def test_a_resolver_at_a_closed_address_answers_dns_and_nothing_else() -> None:
    """Azure's 168.63.129.16 is the resolver of a cluster whose pods use none of their own, and the wire server too."""
    azure = NetworkDefaults(dns=[NetworkPeer(ip_block=IPBlock(cidr="168.63.129.16/32"))])
    rendered = policy(azure, model=HUB)
    for protocol in ("UDP", "TCP"):
        assert reaches(rendered, "168.63.129.16", 53, protocol)
    for port in (80, 443, 32526):
        assert not reaches(rendered, "168.63.129.16", port)


def test_without_declared_peers_a_namespace_that_denies_everyone_stays_closed() -> None:
    """Policies add up: an ingress rule of ours would admit what the namespace's own policy denies."""
    rendered = policy()
    assert rendered["policyTypes"] == ["Egress"]
    assert "ingress" not in rendered


def test_pods_of_jobs_are_asked_for_their_progress_though_they_name_no_port() -> None:
    held_out = {"configMapRef": {"name": "held-out", "key": "h.jsonl"}}
    gate = {"qualityGate": {"dataset": held_out, "base": {"local": {"path": "base"}}}}
    peers = [{"podSelector": {"matchLabels": {"app": "web"}}}]
    rendered = policy(network={"ingress": peers}, quantization=gate)
    (rule,) = rendered["ingress"]
    assert rule["ports"] == [{"port": 8000, "protocol": "TCP"}]


def test_declared_peers_and_the_operator_are_admitted_and_no_one_else() -> None:
    peers = [{"podSelector": {"matchLabels": {"app": "web"}}}, {"ipBlock": {"cidr": "192.0.2.0/24"}}]
    prometheus = NetworkPeer(namespace_selector=LabelSelector(match_labels={"name": "monitoring"}))
    rendered = policy(NetworkDefaults(ingress=[prometheus]), network={"ingress": peers})
    assert rendered["policyTypes"] == ["Ingress", "Egress"]
    (rule,) = rendered["ingress"]
    assert rule["ports"] == [{"port": "http", "protocol": "TCP"}]
    web: Manifest = {"namespace": {}, "labels": {"app": "web"}}
    for admitted in (web, "192.0.2.7", OPERATOR, {"namespace": {"name": "monitoring"}, "labels": {}}):
        assert peers_hold(rule["from"], admitted)
    others: tuple[str | Manifest, ...] = (
        "198.51.100.7",
        {"namespace": {}, "labels": {}},
        {**OPERATOR, "labels": {}},
    )
    for refused in others:
        assert not peers_hold(rule["from"], refused)


def test_the_mode_is_the_specs_then_the_charts() -> None:
    disabled = NetworkDefaults(mode=NetworkMode.DISABLED)
    assert network_policy(deployment(), disabled) is None
    assert network_policy(deployment(network={"mode": "Disabled"}), NetworkDefaults()) is None
    assert network_policy(deployment(network={"mode": "Managed"}), disabled) is not None


def test_nothing_empty_is_rendered() -> None:
    """The API server drops empty maps, and every comparison would see a difference."""
    peers = [{"namespaceSelector": {"matchLabels": {}}}, {"ipBlock": {"cidr": "192.0.2.0/24", "except": []}}]
    (rule,) = policy(network={"ingress": peers})["ingress"]
    assert rule["from"][1:] == [{"namespaceSelector": {}}, {"ipBlock": {"cidr": "192.0.2.0/24"}}]
