"""What the operator may do by the chart's roles: verb by verb, and no more than it does."""

from __future__ import annotations

import yaml

from millstream_operator.kube.kinds import BY_KIND, LLM_DEPLOYMENT, OPTIONAL, WATCHED
from tests.support.fake_operator import served
from tests.support.helm_chart import (
    Document,
    environment,
    of_kind,
    operator_of,
    render,
)

BINDINGS = ("ClusterRoleBinding", "RoleBinding")
AGGREGATE = "rbac.authorization.k8s.io/aggregate-to-"
OWN_SECRET = [
    {"apiGroups": [""], "resources": ["secrets"], "resourceNames": ["millstream-probe-key"], "verbs": ["get", "patch"]}
]


def operators_role(documents: list[Document]) -> Document:
    """The one that is bound to the operator, where the inventory is left out."""
    bound = {one["roleRef"]["name"] for kind in BINDINGS for one in of_kind(documents, kind)}
    (role,) = (one for one in of_kind(documents, "ClusterRole") if one["metadata"]["name"] in bound)
    return role


def test_the_operator_reads_one_secret_its_own_which_helm_leaves_empty() -> None:
    documents = render()
    cluster_wide = [rule for role in of_kind(documents, "ClusterRole") for rule in role["rules"]]
    assert not any("secrets" in rule["resources"] for rule in cluster_wide)
    (role,) = (one for one in of_kind(documents, "Role") if one["rules"] == OWN_SECRET)
    assert role["metadata"]["namespace"] == "system"
    (secret,) = of_kind(documents, "Secret")
    assert secret["metadata"]["name"] == "millstream-probe-key"
    assert not {"data", "stringData"} & secret.keys(), "an upgrade must not take the operator's value away"
    (container,) = operator_of(documents)["spec"]["template"]["spec"]["containers"]
    environment = {one["name"]: one.get("value") for one in container["env"]}
    assert environment["MILLSTREAM_PROBE_KEY_SECRET"] == "millstream-probe-key"


def test_rights_are_spelled_out_and_leave_secrets_alone() -> None:
    documents = render()
    bound = {one["roleRef"]["name"] for kind in BINDINGS for one in of_kind(documents, kind)}
    roles = [role for kind in ("ClusterRole", "Role") for role in of_kind(documents, kind)]
    rules = [rule for role in roles if role["metadata"]["name"] in bound for rule in role["rules"]]
    assert rules
    for rule in rules:
        assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]], rule
        assert "secrets" not in rule["resources"] or rule in OWN_SECRET, rule
        assert not any(resource.endswith(("/exec", "/attach")) for resource in rule["resources"]), rule
    writable = {
        r for rule in rules if {"create", "patch", "update", "delete"} & {*rule["verbs"]} for r in rule["resources"]
    }
    assert "llmdeployments" not in writable, "the spec is the user's; the operator writes the status alone"


def test_named_namespaces_are_all_that_the_operator_gets() -> None:
    documents = render('operator.watchNamespaces=["a","b"]')
    assert not of_kind(documents, "ClusterRoleBinding")
    bindings = [b for b in of_kind(documents, "RoleBinding") if b["roleRef"]["kind"] == "ClusterRole"]
    assert [binding["metadata"]["namespace"] for binding in bindings] == ["a", "b"]
    assert {subject["namespace"] for binding in bindings for subject in binding["subjects"]} == {"system"}
    env = operator_of(documents)["spec"]["template"]["spec"]["containers"][0]["env"]
    assert {"name": "MILLSTREAM_WATCH_NAMESPACES", "value": "a,b"} in env


def test_the_inventory_is_looked_at_and_nothing_more() -> None:
    documents = render()
    (role,) = (found for found in of_kind(documents, "ClusterRole") if found["metadata"]["name"].endswith("-inventory"))
    looks: list[Document] = [
        {"apiGroups": [""], "resources": [of], "verbs": ["list", "watch"]} for of in ("nodes", "pods")
    ]
    assert role["rules"] == looks[:1], "pods in every namespace are in the operator's other role"
    bound = {binding["roleRef"]["name"] for binding in of_kind(documents, "ClusterRoleBinding")}
    assert role["metadata"]["name"] in bound
    for values in (["inventory.mode=Disabled"], ['operator.watchNamespaces=["a"]']):
        without = render(*values)
        assert "-inventory" not in yaml.safe_dump_all(without)
        assert environment(without)["MILLSTREAM_INVENTORY"] == "Disabled"
    insisted = render('operator.watchNamespaces=["a"]', "inventory.mode=Enabled")
    (all_pods,) = (one for one in of_kind(insisted, "ClusterRole") if one["metadata"]["name"].endswith("-inventory"))
    assert all_pods["rules"] == looks
    (binding,) = of_kind(insisted, "ClusterRoleBinding")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]


def test_leadership_has_rights_on_one_lease_of_its_own_namespace() -> None:
    documents = render(release="one")
    name = operator_of(documents)["metadata"]["name"]
    roles = {role["metadata"]["name"]: role for role in of_kind(documents, "Role")}
    role = roles[f"{name}-leader-election"]
    assert role["metadata"]["namespace"] == "system"
    verbs = {tuple(rule.get("resourceNames", ())): set(rule["verbs"]) for rule in role["rules"]}
    assert verbs == {(name,): {"get", "update"}, (): {"create"}}, "a name cannot be given to create"
    env = {
        variable["name"]: variable.get("value")
        for variable in operator_of(documents)["spec"]["template"]["spec"]["containers"][0]["env"]
    }
    assert (env["MILLSTREAM_LEADER_ELECTION"], env["MILLSTREAM_LEASE_NAME"]) == ("Enabled", name)
    (binding,) = [b for b in of_kind(documents, "RoleBinding") if b["metadata"]["name"] == f"{name}-leader-election"]
    assert binding["roleRef"]["kind"] == "Role"
    assert [(s["name"], s["namespace"]) for s in binding["subjects"]] == [(name, "system")]


def test_the_lease_of_another_release_may_be_read_by_its_name_and_nothing_more() -> None:
    """Its name is the other release's, and in the status: it cannot be listed here."""
    role = operators_role(render("inventory.mode=Disabled"))
    rules = [rule for rule in role["rules"] if "leases" in rule["resources"]]
    assert rules == [{"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get"]}]


def test_what_was_measured_is_one_config_map_of_the_operators_own_namespace() -> None:
    documents = render('operator.watchNamespaces=["a"]', release="one")
    name = operator_of(documents)["metadata"]["name"]
    (role,) = [one for one in of_kind(documents, "Role") if one["metadata"]["name"] == f"{name}-calibration"]
    assert role["metadata"]["namespace"] == "system"
    rights = {tuple(rule.get("resourceNames", ())): set(rule["verbs"]) for rule in role["rules"]}
    assert rights == {(f"{name}-calibration",): {"get", "patch"}, (): {"create"}}
    assert {resource for rule in role["rules"] for resource in rule["resources"]} == {"configmaps"}
    (binding,) = [b for b in of_kind(documents, "RoleBinding") if b["metadata"]["name"] == f"{name}-calibration"]
    assert [(s["name"], s["namespace"]) for s in binding["subjects"]] == [(name, "system")]
    everywhere = render("inventory.mode=Disabled")
    (rule,) = (one for one in operators_role(everywhere)["rules"] if "configmaps" in one["resources"])
    assert {"get", "create", "patch"} <= {*rule["verbs"]}
    assert "-calibration" not in yaml.safe_dump_all(of_kind(everywhere, "Role")), "the same rights twice"


def test_every_kind_that_is_read_or_written_is_granted_and_no_more() -> None:
    """A missing right shows only in the first cluster that has the kind."""
    role = operators_role(render("inventory.mode=Disabled"))  # nodes are a role of their own
    granted = {
        (group, resource): set(rule["verbs"])
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    written = {"get", "list", "create", "patch", "delete"}
    for kind in (*WATCHED, *OPTIONAL):
        wanted = {"get", "list"} | ({"watch"} if kind in WATCHED else set()) | (written if kind.owned else set())
        assert granted[kind.group, kind.plural] == wanted, kind.kind


async def test_no_right_is_missing_where_a_deleted_llmdeployment_is_stopped() -> None:
    role = operators_role(render("inventory.mode=Disabled"))
    granted = {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    operator = await served()
    operator.cluster.remove(LLM_DEPLOYMENT, "demo")
    await operator.turn()
    verbs = {"get": "get", "merge": "patch"}
    asked = [(BY_KIND[one.kind], verbs[one.verb]) for one in operator.client.requests]
    assert "patch" in {verb for _, verb in asked}
    assert {(kind.group, kind.plural, verb) for kind, verb in asked} <= granted


def test_the_role_in_the_namespace_default_can_be_left_out() -> None:
    """An administrator of some namespaces may have no right to make a Role there."""

    def namespaces(documents: list[Document]) -> set[str]:
        return {one["metadata"]["namespace"] for kind in ("Role", "RoleBinding") for one in of_kind(documents, kind)}

    documents = render()
    assert namespaces(documents) == {"system", "default"}
    (role,) = [one for one in of_kind(documents, "Role") if one["metadata"]["namespace"] == "default"]
    (rule,) = role["rules"]
    assert (rule["resources"], rule["resourceNames"], rule["verbs"]) == (["endpointslices"], ["kubernetes"], ["get"])
    without = render("network.apiServerEndpoints=Disabled")
    assert namespaces(without) == {"system"}
    left_out = [one for one in documents if one not in without]
    assert [one["kind"] for one in left_out] == ["Role", "RoleBinding"], "and nothing else differs"
    assert environment(documents)["MILLSTREAM_NETWORK"] == environment(without)["MILLSTREAM_NETWORK"]


def test_users_get_rights_by_the_clusters_own_roles_and_the_status_stays_the_operators() -> None:
    """view, edit and admin take the rules of each ClusterRole with their label; edit holds what view has."""
    documents = render()
    rights: dict[str, set[tuple[str, str]]] = {"view": set(), "edit": set(), "admin": set()}
    for role in of_kind(documents, "ClusterRole"):
        for user in rights:
            if role["metadata"]["labels"].get(AGGREGATE + user) == "true":
                rights[user] |= {
                    (one, verb) for rule in role["rules"] for one in rule["resources"] for verb in rule["verbs"]
                }
    names = ("llmdeployments", "llmdeployments/status", "llmdeployments/scale")
    looks = {(name, verb) for name in names for verb in ("get", "list", "watch")}
    assert rights["view"] == looks
    writes = {("llmdeployments", verb) for verb in ("create", "update", "patch", "delete", "deletecollection")}
    writes |= {("llmdeployments/scale", verb) for verb in ("update", "patch")}
    assert rights["edit"] == rights["admin"] == looks | writes
    without = [one for one in documents if one not in render("userRoles.enabled=false")]
    assert {one["kind"] for one in without} == {"ClusterRole"}
    assert len(without) == 2
    operators = {one["roleRef"]["name"] for kind in BINDINGS for one in of_kind(documents, kind)}
    assert not operators & {one["metadata"]["name"] for one in without}, "they are no rights of the operator"
