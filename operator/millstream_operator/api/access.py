"""`spec.auth` and `spec.network`: who may ask the model, and what its pods may reach.

Peers and ports have NetworkPolicy's own paths, in the subset that a rule can be checked for.
"""

from __future__ import annotations

import ipaddress
from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints, model_validator

from millstream_operator.api.base import ApiModel, LabelValue, QualifiedName
from millstream_operator.api.model import ObjectKey


class AuthMode(StrEnum):
    ENABLED = "Enabled"
    DISABLED = "Disabled"


class Auth(ApiModel):
    """Who may ask the model. Without it everyone who reaches the Service may."""

    mode: AuthMode | None = Field(
        None,
        description="Enabled: a request needs an API key. Disabled: it needs none, and a Service of type NodePort or "
        "LoadBalancer is accepted without keys. Default: Enabled where apiKeysSecretRef is given.",
    )
    api_keys_secret_ref: ObjectKey | None = Field(
        None,
        description="Key of a Secret with the API keys: one per line, lines that start with # are comments, at most "
        "1000. A request sends one as Authorization: Bearer. The pods read the Secret again when it changes; nothing "
        "restarts.",
    )


_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"  # without leading zeros, which readers take differently
_GROUP = "[0-9a-fA-F]{1,4}"
_IPV6 = "|".join(  # all eight groups, or :: in the place of some
    [
        f"({_GROUP}:){{7}}{_GROUP}",
        f"({_GROUP}:){{1,7}}:",
        *(f"({_GROUP}:){{1,{7 - after}}}(:{_GROUP}){{1,{after}}}" for after in range(1, 7)),
        f":((:{_GROUP}){{1,7}}|:)",
    ]
)
CIDR_PATTERN = f"^(({_OCTET}[.]){{3}}{_OCTET}/(3[0-2]|[12]?[0-9])|({_IPV6})/(12[0-8]|1[01][0-9]|[1-9]?[0-9]))$"
CIDR = Annotated[str, StringConstraints(pattern=CIDR_PATTERN, min_length=4, max_length=43)]
ATOMIC = {"x-kubernetes-list-type": "atomic"}


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise ValueError(f"{text} is no block of addresses; write for example 192.0.2.0/24 or 2001:db8::/32") from None


class LabelSelector(ApiModel):
    """Objects by their labels. Without labels: all."""

    match_labels: Annotated[dict[QualifiedName, LabelValue], Field(max_length=8)] | None = Field(
        None, description="Labels that an object must have, for example kubernetes.io/metadata.name of a namespace."
    )


class IPBlock(ApiModel):
    """Addresses outside the cluster."""

    cidr: CIDR = Field(description="Addresses, for example 192.0.2.0/24.")
    except_: Annotated[list[CIDR], Field(max_length=16, json_schema_extra=ATOMIC)] | None = Field(
        None, alias="except", description="Addresses of the block that are left out, for example 192.0.2.8/29."
    )

    @model_validator(mode="after")
    def _holds_what_it_leaves_out(self) -> IPBlock:
        """As the API server asks it of NetworkPolicies: a policy that it refuses would stop all that follows it."""
        block = _network(self.cidr)
        for text in self.except_ or ():
            left_out = _network(text)
            inside = left_out.version == block.version and left_out.subnet_of(block)  # type: ignore[arg-type]
            if not inside or left_out == block:
                raise ValueError(f"except {text} must lie inside cidr {self.cidr}, and be smaller")
        return self


class NetworkPeer(ApiModel):
    """The other end of a connection: pods by namespaceSelector, podSelector or both, or addresses by ipBlock."""

    namespace_selector: LabelSelector | None = Field(
        None, description="Pods of these namespaces. Default: with podSelector, those of the LLMDeployment's own."
    )
    pod_selector: LabelSelector | None = Field(None, description="Pods with these labels. Default: all.")
    ip_block: IPBlock | None = Field(None, description="Addresses outside the cluster.")


class NetworkProtocol(StrEnum):
    TCP = "TCP"
    UDP = "UDP"
    SCTP = "SCTP"


class NetworkPort(ApiModel):
    """A port, or a range of them."""

    port: int = Field(ge=1, le=65535, description="Port, or the first one of a range.")
    end_port: int | None = Field(None, ge=1, le=65535, description="Last port of a range. Default: the port alone.")
    protocol: NetworkProtocol | None = Field(None, description="TCP, UDP or SCTP. Default: TCP.")


class NetworkEgress(ApiModel):
    """What the pods may reach besides DNS and, where they download, the hub."""

    to: Annotated[list[NetworkPeer], Field(min_length=1, max_length=8, json_schema_extra=ATOMIC)] = Field(
        description="Where to. The API server and link-local addresses (metadata services) stay closed."
    )
    ports: Annotated[list[NetworkPort], Field(min_length=1, max_length=8, json_schema_extra=ATOMIC)] | None = Field(
        None, description="At which ports. Default: all."
    )


class NetworkMode(StrEnum):
    MANAGED = "Managed"
    DISABLED = "Disabled"


class Network(ApiModel):
    """Which connections the pods may have, by a NetworkPolicy. A change restarts nothing."""

    mode: NetworkMode | None = Field(
        None,
        description="Managed: the operator keeps a NetworkPolicy for the pods. Disabled: it keeps none, and the "
        "cluster's own policies decide. Default: the chart's network.mode, which is Managed.",
    )
    ingress: Annotated[list[NetworkPeer], Field(min_length=1, max_length=16, json_schema_extra=ATOMIC)] | None = Field(
        None,
        description="Who may reach the pods' HTTP port, besides the operator and the chart's network.ingress. All "
        "others are denied. Default: the policy says nothing of ingress, so the namespace's own policies decide.",
    )
    egress: Annotated[list[NetworkEgress], Field(min_length=1, max_length=8, json_schema_extra=ATOMIC)] | None = Field(
        None, description="What the pods may reach besides, for example an OTLP collector."
    )
