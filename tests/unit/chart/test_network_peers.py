"""Peers of NetworkPolicies are written in three places, and all three take the same ones.

    spec.network of an LLMDeployment    the CRD's schema and CEL rules, then the operator
    network of the chart                values.schema.json, then the operator's settings

The rules are those of the API server for NetworkPolicies: a peer that it refuses would stop the policy.
"""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
import yaml

from millstream_operator.api.load import ManifestError, parse
from millstream_operator.rendering.network_policy import NetworkDefaults
from millstream_operator.settings import SettingsError, read_settings
from tests.support.fix_trials import broken_rules
from tests.support.helm_chart import CHART, ROOT
from tests.support.llmdeployments import manifest

Peer = dict[str, Any]
CRD = yaml.safe_load((ROOT / "crds" / "millstream.dev_llmdeployments.yaml").read_text())
SPEC = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
NETWORK = SPEC["properties"]["network"]
VALUES_SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = jsonschema.Draft7Validator(VALUES_SCHEMA)
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())  # Helm merges them before it validates


def pods(**labels: str) -> Peer:
    return {"podSelector": {"matchLabels": labels}}


def block(cidr: str, *left_out: str) -> Peer:
    return {"ipBlock": {"cidr": cidr} | ({"except": [*left_out]} if left_out else {})}


def key(text: str) -> Peer:
    return pods(**{text: "x"})


GOOD: dict[str, Peer] = {
    "all pods of the namespace": {"podSelector": {}},
    "all pods": {"namespaceSelector": {}},
    "pods of a namespace": {"namespaceSelector": {"matchLabels": {"a": "b"}}, **pods(app="web")},
    "no label": pods(),
    "a label without a value": pods(app=""),
    "a long value": pods(app="x" * 63),
    "a key with a prefix": key("kubernetes.io/metadata.name"),
    "a key in capitals": key("Team_1.a"),
    "a key of 63": key("k" * 63),
    "a prefix of 253": key("/".join([".".join(["p" * 62] * 4) + "pp", "k" * 63])),
    "eight labels": pods(**{f"l{number}": "x" for number in range(8)}),
    "everything": block("0.0.0.0/0"),
    "everything by IPv6": block("::/0"),
    "one address": block("192.0.2.7/32"),
    "one address of a network": block("192.0.2.7/24"),
    "a network by IPv6": block("2001:DB8::/32"),
    "all eight groups": block("2001:db8:0:0:0:0:0:1/128"),
    "a network without a part of it": block("10.0.0.0/8", "10.1.0.0/16"),
    "sixteen parts": block("10.0.0.0/8", *(f"10.{number}.0.0/16" for number in range(16))),
}
# The API server refuses all of them in a NetworkPolicy but four, which are our bounds: nine labels, seventeen parts,
# and addresses that readers take differently (a leading zero, an IPv4 address in IPv6).
BAD: dict[str, Peer] = {
    "nothing": {},
    "pods at an address": {**pods(app="web"), **block("192.0.2.0/24")},
    "a key of 64": key("k" * 64),
    "a prefix of 254": key("/".join([".".join(["p" * 62] * 4) + "ppp", "k"])),
    "an empty key": key(""),
    "an empty prefix": key("/app"),
    "an empty name": key("example.com/"),
    "two prefixes": key("a/b/c"),
    "a prefix in capitals": key("Example.com/app"),
    "a prefix with two dots": key("example..com/app"),
    "a prefix whose label ends with a dash": key("a-.com/app"),
    "a key with a space": key("a b"),
    "a key that ends with a dash": key("app-"),
    "a value of 64": pods(app="x" * 64),
    "a value with a space": pods(app="a b"),
    "a value that starts with a dot": pods(app=".x"),
    "nine labels": pods(**{f"l{number}": "x" for number in range(9)}),
    "no block": {"ipBlock": {}},
    "an address without a length": block("192.0.2.7"),
    "a length of 33": block("192.0.2.0/33"),
    "a number above 255": block("192.0.2.256/32"),
    "a leading zero": block("010.0.0.0/8"),
    "three numbers": block("192.0.2/24"),
    "a length of 129": block("::/129"),
    "colons alone": block("::::/0"),
    "two gaps": block("2001::db8::1/128"),
    "nine groups": block("1:2:3:4:5:6:7:8:9/128"),
    "five digits": block("12345::/16"),
    "an IPv4 address in IPv6": block("::ffff:169.254.169.254/128"),
    "a name": block("example.com/32"),
    "a part that is none": block("10.0.0.0/8", "10.1.0.0"),
    "seventeen parts": block("10.0.0.0/8", *(f"10.{number}.0.0/16" for number in range(17))),
}
# No schema can compare two blocks. Both readers do, before anything is applied.
BAD_FOR_THE_OPERATOR: dict[str, Peer] = {
    "a part of another network": block("10.0.0.0/8", "192.0.2.0/24"),
    "a part as large as the whole": block("10.0.0.0/8", "10.0.0.0/8"),
    "a part of the other family": block("10.0.0.0/8", "2001:db8::/32"),
}
# The API server prunes a field that it does not know, or refuses it where kubectl asks for strict validation.
UNKNOWN: dict[str, Peer] = {
    "an expression": {"podSelector": {"matchExpressions": [{"key": "a", "operator": "Exists"}]}},
    "a port": {**pods(app="web"), "port": 80},
}


def crd_takes(peer: Peer) -> bool:
    stored = {"ingress": [peer], "egress": [{"to": [peer]}]}
    return jsonschema.Draft7Validator(NETWORK).is_valid(stored) and not [*broken_rules(NETWORK, stored, None)]


def operator_takes_the_spec(peer: Peer) -> bool:
    try:
        parse(manifest(network={"ingress": [peer], "egress": [{"to": [peer]}]}))
    except ManifestError:
        return False
    return True


def chart_takes(peer: Peer) -> bool:
    return VALUES.is_valid(DEFAULTS | {"network": {"ingress": [peer], "dns": [peer]}})


def settings_take(peer: Peer) -> bool:
    network = json.dumps({"ingress": [peer], "dns": [peer]})
    try:
        read_settings({"MILLSTREAM_RUNTIME_IMAGE": "r:1", "MILLSTREAM_NETWORK": network})
    except SettingsError:
        return False
    return True


def verdicts(peer: Peer) -> tuple[bool, bool, bool, bool]:
    """Of the CRD, the chart's schema, the operator for a spec, and the operator for its settings."""
    return crd_takes(peer), chart_takes(peer), operator_takes_the_spec(peer), settings_take(peer)


@pytest.mark.parametrize("name", GOOD)
def test_a_good_peer_is_taken_everywhere(name: str) -> None:
    assert verdicts(GOOD[name]) == (True, True, True, True)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_peer_is_refused_everywhere(name: str) -> None:
    assert verdicts(BAD[name]) == (False, False, False, False)


@pytest.mark.parametrize("name", BAD_FOR_THE_OPERATOR)
def test_what_no_schema_can_compare_the_operator_refuses_in_words(name: str) -> None:
    peer = BAD_FOR_THE_OPERATOR[name]
    assert verdicts(peer)[2:] == (False, False)
    with pytest.raises(ManifestError, match=r"ingress\[0\]\.ipBlock: except \S+ must lie inside cidr 10.0.0.0/8"):
        parse(manifest(network={"ingress": [peer]}))


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_field_of_a_peer_is_refused_by_name(name: str) -> None:
    assert verdicts(UNKNOWN[name])[1:] == (False, False, False)


@pytest.mark.parametrize(("count", "is_taken"), [(32, True), (33, False)])
def test_the_chart_and_the_settings_take_equally_many_peers(count: int, is_taken: bool) -> None:
    assert VALUES.is_valid(DEFAULTS | {"network": {"ingress": [pods()] * count}}) is is_taken
    text = json.dumps({"ingress": [pods()] * count})
    if is_taken:
        read_settings({"MILLSTREAM_RUNTIME_IMAGE": "r:1", "MILLSTREAM_NETWORK": text})
    else:
        with pytest.raises(SettingsError, match="at most 32"):
            read_settings({"MILLSTREAM_RUNTIME_IMAGE": "r:1", "MILLSTREAM_NETWORK": text})


def test_the_patterns_and_bounds_of_the_chart_are_those_of_the_types() -> None:
    """What the table cannot show: that both were written from one source."""
    types = NetworkDefaults.model_json_schema(by_alias=True)["$defs"]
    cidr = types["IPBlock"]["properties"]["cidr"]
    chart = VALUES_SCHEMA["definitions"]
    assert chart["cidr"] == {name: cidr[name] for name in ("type", "pattern", "minLength", "maxLength")}
    labels = next(one for one in types["LabelSelector"]["properties"]["matchLabels"]["anyOf"] if "maxProperties" in one)
    (key_pattern, value), *others = labels["patternProperties"].items()
    assert not others
    assert chart["labelKey"]["pattern"] == key_pattern
    assert chart["labelValue"] == value
    assert chart["selector"]["properties"]["matchLabels"]["maxProperties"] == labels["maxProperties"]


@pytest.mark.parametrize("peer", [block("::::/0"), key("a b"), pods(app="a b"), key("k" * 64)])
def test_a_refusal_says_what_is_possible_and_not_a_pattern(peer: Peer) -> None:
    with pytest.raises(ManifestError) as refused:
        parse(manifest(network={"ingress": [peer]}))
    said = str(refused.value)
    assert said.startswith("spec.network.ingress[0].")
    assert not re.search(r"[\^$\\]|Value error|pattern", said), said
