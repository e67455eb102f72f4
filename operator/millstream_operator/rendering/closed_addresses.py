"""Addresses that no egress rule of ours opens: metadata services, and the API server at its own port. Pure.

NetworkPolicies only allow, so an allowed block is written without them:

    0.0.0.0/0  ->  0.0.0.0/0 except 169.254.0.0/16, 10.0.0.5/32        and, for the API server 10.0.0.5:6443,
                   10.0.0.5/32 at the same ports without 6443          because other things listen on that node too
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from millstream_runtime.sources.allowed_hubs import METADATA

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Fields = dict[str, Any]
IPV4_MAPPED = ipaddress.ip_network("::ffff:0:0/96")  # IPv4 addresses in another spelling
LAST_PORT = 65535


@dataclass(frozen=True, slots=True, order=True)
class ApiServer:
    """One address of the API server."""

    address: str
    port: int

    @property
    def network(self) -> Network:
        return ipaddress.ip_network(self.address)


def shielded(to: Sequence[Fields], ports: Sequence[Fields], api_servers: Iterable[ApiServer]) -> list[Fields]:
    """Return egress rules to these peers at these ports (none: all) without the closed addresses."""
    servers = sorted(set(api_servers))
    peers = [peer for one in to if (peer := _without_closed(one, servers)) is not None]
    rules = [_rule(peers, ports)] if peers else []
    blocks = [one["ipBlock"] for one in to if "ipBlock" in one]
    for address, closed in _ports_by_address(servers).items():
        if any(_allows(block, address) for block in blocks) and (rest := _less(ports, closed)):
            rules.append(_rule([{"ipBlock": {"cidr": str(address)}}], rest))
    return rules


def _ports_by_address(servers: Iterable[ApiServer]) -> dict[Network, list[int]]:
    """All ports of an address in one rule: rules add up, so one for each port would open the others."""
    found: dict[Network, list[int]] = {}
    for server in servers:
        found.setdefault(server.network, []).append(server.port)
    return found


def _rule(to: Sequence[Fields], ports: Sequence[Fields]) -> Fields:
    return {"to": [*to]} | ({"ports": [*ports]} if ports else {})


def _without_closed(peer: Fields, servers: Sequence[ApiServer]) -> Fields | None:
    """Return a peer without the closed addresses; None where nothing is left of it.

    Nor is anything left of a block that is not understood here: the network plugin may understand it.
    """
    if "ipBlock" not in peer:
        return peer
    block = _network(peer["ipBlock"]["cidr"])
    if block is None or _contains(IPV4_MAPPED, block):
        return None
    closed = [*METADATA, *(server.network for server in servers)]
    if any(_contains(one, block) for one in closed):
        return None
    given = peer["ipBlock"].get("except") or []
    already = [found for text in given if (found := _network(text)) is not None]
    added = [one for one in closed if _contains(block, one) and not any(_contains(known, one) for known in already)]
    excepted = [*given, *dict.fromkeys(map(str, added))]
    return {"ipBlock": {"cidr": peer["ipBlock"]["cidr"]} | ({"except": excepted} if excepted else {})}


def _allows(block: Fields, network: Network) -> bool:
    """Whether the block, as it was given, holds the address and does not except it."""
    whole = _network(block["cidr"])
    excepted = [found for text in block.get("except") or () if (found := _network(text)) is not None]
    if whole is None or any(_contains(one, network) for one in (*METADATA, *excepted)):
        return False
    return _contains(whole, network)


def _less(ports: Sequence[Fields], closed: Iterable[int]) -> list[Fields]:
    """Return the ports without some TCP ports."""
    left: list[Fields] = [*ports] or [{"protocol": "TCP"}, {"protocol": "UDP"}, {"protocol": "SCTP"}]
    for number in closed:
        left = [one for port in left for one in _port_less(port, number)]
    return left


def _port_less(port: Fields, closed: int) -> Iterator[Fields]:
    first = int(port.get("port", 1))
    last = int(port.get("endPort", first if "port" in port else LAST_PORT))
    if port["protocol"] != "TCP" or not first <= closed <= last:
        yield port
        return
    for low, high in ((first, closed - 1), (closed + 1, last)):
        if low <= high:
            yield {"protocol": "TCP", "port": low} | ({"endPort": high} if high > low else {})


def _network(text: str) -> Network | None:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


def _contains(outer: Network, inner: Network) -> bool:
    return outer.version == inner.version and inner.subnet_of(outer)  # type: ignore[arg-type]
