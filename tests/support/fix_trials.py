"""Applies what the operator offers as fixes: each patch and each node in a copy of the simulated cluster.

spec, nodes -> operator -> status.plan.fixes -> merge patch -> schema and CEL of the CRD -> operator -> workload
"""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jsonschema

from millstream_operator.api.crd import custom_resource_definition
from millstream_operator.api.load import ManifestError, parse
from millstream_operator.catalog.gpu import load_catalog
from millstream_operator.catalog.gpu_names import find_part
from millstream_operator.inventory.nodes import PRODUCT_LABEL
from millstream_operator.kube.kinds import DEPLOYMENT
from tests.support.cel import evaluate
from tests.support.fake_cluster import FakeCluster
from tests.support.fake_operator import FakeOperator, respec
from tests.support.gpu_nodes import gpu_node
from tests.support.infeasible_specs import Drawn, draw

Manifest = dict[str, Any]
OFFERED_NODES = re.compile(r"(?:(?P<nodes>\d+) nodes of )?(?P<part>[^,:]+):(?P<gpus>\d+)")
SCHEMA: Manifest = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


@dataclass
class Trials:
    """The outcome: counts by constraint, and one line for each offered fix that is not applied."""

    specs: Counter[str] = field(default_factory=Counter)
    fixes: Counter[str] = field(default_factory=Counter)
    unfixed: Counter[str] = field(default_factory=Counter)  # specs for which nothing is offered
    fields: Counter[str] = field(default_factory=Counter)  # of the fixes
    drawn: Counter[str] = field(default_factory=Counter)  # infeasible specs with such demands
    failures: list[str] = field(default_factory=list)

    def as_dict(self) -> Manifest:
        """Counts by constraint, and by what was drawn and what was offered."""
        return {
            "specs": self.specs.total(),
            "offered": self.fixes.total(),
            "not_applied": len(self.failures),
            "without_a_fix": self.unfixed.total(),
            "specs_by_constraint": dict(sorted(self.specs.items())),
            "offered_by_constraint": dict(sorted(self.fixes.items())),
            "offered_by_field": dict(sorted(self.fields.items())),
            "infeasible_with": dict(sorted(self.drawn.items())),
        }

    def table(self) -> str:
        """Specs and fixes by constraint."""
        rows = [
            f"{name:<14}{self.specs[name]:>6}{self.fixes[name]:>7}{self.unfixed[name]:>9}"
            for name in sorted(self.specs)
        ]
        total = f"{'all':<14}{self.specs.total():>6}{self.fixes.total():>7}{self.unfixed.total():>9}"
        head = f"{'constraint':<14}{'specs':>6}{'fixes':>7}{'without':>9}"
        return "\n".join([head, *rows, total, f"not applied: {len(self.failures)}"])


async def try_offered_fixes(seed: int, specs: int) -> Trials:
    """Draw until this number of specs was infeasible, and apply each fix that is offered for them."""
    trials = Trials()
    for drawn in draw(seed):
        if trials.specs.total() == specs:
            return trials
        cluster = FakeCluster()
        for one in (*drawn.nodes, drawn.manifest):
            cluster.put(one)
        operator = FakeOperator(cluster)
        await operator.settle()
        plan = operator.status().get("plan") or {}
        if plan.get("feasible", True):
            continue
        constraint = plan["summary"].removeprefix("Infeasible: ")
        trials.specs[constraint] += 1
        trials.fixes[constraint] += len(plan["fixes"])
        trials.unfixed[constraint] += not plan["fixes"]
        trials.fields.update(fix["field"] for fix in plan["fixes"])
        trials.drawn.update(_demands(drawn))
        for fix in plan["fixes"]:
            problem = await _problem_with(fix, cluster, drawn)
            if problem is not None:
                spec = json.dumps(drawn.manifest["spec"])
                trials.failures.append(f"no. {drawn.number} {spec}: {fix['field']}={fix['value']}: {problem}")
    return trials


def _demands(drawn: Drawn) -> Iterator[str]:
    """What the generator is meant to cover."""
    spec = drawn.manifest["spec"]
    if "autoscaling" in spec and "budget" in spec:
        yield "autoscaling and budget"
    present = {find_part(load_catalog(), node["metadata"]["labels"][PRODUCT_LABEL]).name for node in drawn.nodes}
    if any(name not in present for name in spec.get("accelerator", {}).get("products", ())):
        yield "products that no node has"
    if any(node["spec"]["taints"] for node in drawn.nodes):
        yield "tainted nodes"


async def _problem_with(fix: Manifest, before: FakeCluster, drawn: Drawn) -> str | None:
    """Why a fix is not applied; None where it is."""
    cluster = copy.deepcopy(before)
    for node in _added_nodes(fix):
        cluster.put(node)
    stored = {name: value for name, value in drawn.manifest.items() if name != "status"}
    changed = merged(stored, json.loads(fix["patch"])) if "patch" in fix else stored
    refused = refusal_of_the_api_server(changed, stored)
    if refused is not None:
        return refused
    cluster.put(changed)
    operator = FakeOperator(cluster)
    await operator.settle()
    most = changed["spec"].get("autoscaling", {}).get("maxReplicas")
    if most is not None and most < changed["spec"].get("replicas", 1):
        respec(cluster, replicas=most)  # an autoscaler writes at most its limit
        await operator.settle()
    status = operator.status()
    plan, planned = status["plan"], operator.condition("Planned")
    if planned.get("status") != "True":
        return f"{planned.get('reason')}: {planned.get('message')}"
    if plan["requires"] or not plan["feasible"]:
        return f"planned as {plan['summary']} that requires {plan['requires']}"
    if cluster.get(DEPLOYMENT, "demo") is None:
        return "no workload"
    budget = changed["spec"].get("budget") or {}
    paid = budget.get("enforcement") == "Observe" or not budget
    if not paid and plan["cost"]["monthlyUSD"] > budget["maxMonthlyUSD"]:
        return f"costs {plan['cost']['monthlyUSD']}"
    exceeded = operator.condition("BudgetExceeded")
    if fix["field"].split(".")[0] in ("autoscaling", "budget") and exceeded.get("status") == "True" and not paid:
        return f"BudgetExceeded: {exceeded['message']}"
    return None


def _added_nodes(fix: Manifest) -> Iterator[Manifest]:
    """The nodes that a fix asks for, as the cluster would have them."""
    if fix["field"].split(",")[0] != "gpus":
        return
    match = OFFERED_NODES.match(fix["value"])
    assert match is not None, fix["value"]
    (label, *_) = find_part(load_catalog(), match["part"]).product_labels
    for number in range(int(match["nodes"] or 1)):
        yield gpu_node(f"added-{number}", label, int(match["gpus"]))


def merged(value: Any, patch: Any) -> Any:
    """RFC 7386, as `kubectl patch --type merge` applies it."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    found = copy.deepcopy(value) if isinstance(value, dict) else {}
    for name, inner in patch.items():
        if inner is None:
            found.pop(name, None)
        else:
            found[name] = merged(found.get(name), inner)
    return found


def refusal_of_the_api_server(changed: Manifest, stored: Manifest) -> str | None:
    """Why the API server would refuse an edit: by the CRD's schema, its CEL rules, or (here too) the API's types."""
    try:
        jsonschema.validate({"spec": changed["spec"]}, {"properties": {"spec": SCHEMA["properties"]["spec"]}})
        parse(changed)
    except jsonschema.ValidationError as error:
        return f"schema: {error.message}"
    except ManifestError as error:
        return str(error)
    return next(broken_rules(SCHEMA, changed, stored), None)


def broken_rules(schema: Manifest, value: Any, old: Any) -> Iterator[str]:
    """The messages of the CEL rules that do not hold, at any depth."""
    for rule in schema.get("x-kubernetes-validations", ()):
        if ("oldSelf" not in rule["rule"] or old is not None) and not evaluate(rule["rule"], value, old):
            yield rule["message"]
    if isinstance(value, dict):
        for name, inner in value.items():
            below = schema.get("properties", {}).get(name) or schema.get("additionalProperties")
            if isinstance(below, dict) and name not in ("metadata", "status"):
                yield from broken_rules(below, inner, old.get(name) if isinstance(old, dict) else None)
    if isinstance(value, list) and "items" in schema:
        for inner in value:
            yield from broken_rules(schema["items"], inner, None)
