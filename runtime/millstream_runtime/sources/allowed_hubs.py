"""Addresses that downloads do not reach: loopback, link-local, and those of metadata services. Pure.

    MILLSTREAM_ALLOWED_HUBS=hub.models.svc,127.0.0.0/8     names, addresses and ranges that they do reach

An author chooses `HF_ENDPOINT`, and a server chooses where it redirects: each may name a service that answers to the
node or the pod alone, such as the one that hands out a node's credentials. Private ranges are open, because hubs and
registries stand there. `connections.py` asks these rules.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from millstream_runtime.errors import InvalidConfigError

VARIABLE = "MILLSTREAM_ALLOWED_HUBS"
CHART_VALUE = "podDefaults.allowedHubs"
LIMIT_CHARACTERS = 16384

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# Also what no egress rule of the operator's NetworkPolicies opens.
METADATA: tuple[Network, ...] = tuple(
    map(
        ipaddress.ip_network,
        (
            "169.254.0.0/16",  # link-local: AWS (also 169.254.170.2 and .23), Google, Azure, Oracle, OpenStack
            "100.100.100.200/32",  # Alibaba Cloud
            "168.63.129.16/32",  # Azure's wire server, which hands out the node's certificates and extension settings
            "192.0.0.192/32",  # Oracle Cloud Classic
            "fe80::/10",  # link-local: OpenStack (fe80::a9fe:a9fe), Azure's wire server by IPv6
            "fd00:ec2::254/128",  # AWS
            "fd00:ec2::23/128",  # the agent of EKS Pod Identity, which hands out a pod's credentials
            "fd20:ce::254/128",  # Google Cloud
            "fd00:c1::a9fe:a9fe/128",  # Oracle Cloud
            "fd00:42::42/128",  # Scaleway
        ),
    )
)
# 0.0.0.0 and :: lead to this machine on Linux.
LOOPBACK: tuple[Network, ...] = tuple(map(ipaddress.ip_network, ("127.0.0.0/8", "0.0.0.0/8", "::/127")))
CLOSED_TO_SERVERS = (*LOOPBACK, *METADATA)
CLOSED_TO_PROXIES = METADATA  # a proxy may listen on this machine
# IPv4 addresses in another spelling: mapped (RFC 4291, 2.5.5.2), compatible (2.5.5.1), and by NAT64 (RFC 6052).
WITH_IPV4: tuple[ipaddress.IPv6Network, ...] = tuple(
    map(ipaddress.IPv6Network, ("::ffff:0:0/96", "::/96", "64:ff9b::/96"))
)
_NAME = re.compile(r"[a-z0-9_]([-a-z0-9_.]*[a-z0-9_])?")


@dataclass(frozen=True, slots=True)
class AllowedHubs:
    """What an administrator admits: names in lower case, and ranges."""

    names: frozenset[str] = frozenset()
    ranges: tuple[Network, ...] = ()

    def names_host(self, host: str) -> bool:
        return host.lower().rstrip(".") in self.names

    def admits(self, host: str, address: Address, closed: Sequence[Network]) -> bool:
        """Whether a connection for `host` may lead to `address`."""
        spellings = _spellings(address)
        if not any(_contains(one, spelling) for one in closed for spelling in spellings) or self.names_host(host):
            return True
        return any(_contains(one, spelling) for one in self.ranges for spelling in spellings)


def read_allowed_hubs(environment: Mapping[str, str]) -> AllowedHubs:
    """Read `MILLSTREAM_ALLOWED_HUBS`; nothing is admitted without it.

    Raises:
        InvalidConfigError: it has an entry that is none.
    """
    text = environment.get(VARIABLE, "")
    if len(text) > LIMIT_CHARACTERS:
        raise InvalidConfigError(f"{VARIABLE} has {len(text)} characters; at most {LIMIT_CHARACTERS} are read.")
    names: set[str] = set()
    ranges: list[Network] = []
    for number, entry in enumerate(filter(None, map(str.strip, text.split(","))), 1):
        try:
            ranges.append(ipaddress.ip_network(entry, strict=False))
        except ValueError:
            name = entry.lower().rstrip(".")
            if not _NAME.fullmatch(name) or len(name) > 253:
                raise InvalidConfigError(
                    f"{VARIABLE}: entry {number} is no host name, address or range; give them like "
                    "hub.models.svc,10.0.0.0/8, without scheme, port and path."
                ) from None
            names.add(name)
    return AllowedHubs(frozenset(names), tuple(ranges))


def _spellings(address: Address) -> tuple[Address, ...]:
    """The address, and the IPv4 address in it."""
    if isinstance(address, ipaddress.IPv6Address) and any(address in one for one in WITH_IPV4):
        return address, ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return (address,)


def _contains(network: Network, address: Address) -> bool:
    return network.version == address.version and address in network
