"""Show what the operator would choose for an LLMDeployment, before anything is applied.

    millstream plan examples/mid.yaml --gpus A100-80GB:4     on the GPUs that you name; one node with 4
    millstream plan examples/mid.yaml --nodes nodes.yaml     on the output of `kubectl get nodes -o yaml`
    millstream plan examples/mid.yaml --nodes nodes.yaml --pods pods.yaml   less what running pods hold
    millstream plan examples/mid.yaml --kubeconfig FILE      on the nodes of a cluster, less what pods hold
    millstream plan examples/mid.yaml --kubeconfig FILE --diff   what applying would change there
    millstream plan examples/mid.yaml                        on the best GPUs of the catalogue
    millstream plan examples/mid.yaml --compare gpus         side by side, by cost and latency

Runs the operator's own code on this machine. Exit code 0: there is a plan that this version
can apply, 2: there is none, 1: bad input.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from millstream.arguments import CommandLineParser
from millstream.manifest import manifest_reader
from millstream.output_streams import can_redraw, columns_of, is_utf_8
from millstream_runtime.errors import FailureReason, InvalidConfigError, RuntimeFailure

EXIT_FEASIBLE, EXIT_INFEASIBLE = 0, 2
NARROWEST = 60  # characters of a line of prose: bars and their names take no fewer
FORMATS = ("table", "json", "yaml", "manifests")
AXES = ("tiers", "gpus", "quantizations")
PLACEHOLDER_IMAGE = "millstream-runtime"


def run(argv: Sequence[str]) -> int:
    """Plan each file and print it.

    Raises:
        RuntimeFailure: something that was given cannot be used.
    """
    try:
        arguments = command_parser().parse_args(list(argv))
    except InvalidConfigError as error:  # 2 means infeasible here, so a bad command line is bad input like any other
        raise RuntimeFailure(error.reason, error.message) from None
    _require_flags_that_go_together(arguments)
    read = manifest_reader()
    deployments = [read(path) for path in arguments.files]
    from millstream.plan_inputs import read_catalog, require_a_draft_for

    require_a_draft_for(arguments.draft_config, deployments)
    catalog = read_catalog(arguments.catalog)
    results = [_work(deployment, catalog, arguments) for deployment in deployments]
    _print(results, arguments)
    return EXIT_FEASIBLE if all(result.can_be_applied for result in results) else EXIT_INFEASIBLE


def _require_flags_that_go_together(arguments: argparse.Namespace) -> None:
    """Raises RuntimeFailure: a flag would have no effect."""
    for is_wrong, message in (
        (arguments.diff and arguments.kubeconfig is None, "--diff needs --kubeconfig: it compares with a cluster."),
        (arguments.pods and arguments.nodes is None, "--pods needs --nodes: pods hold GPUs of nodes."),
        (arguments.diff and arguments.compare, "--diff and --compare exclude each other."),
        (arguments.diff and arguments.output != "table", f"--diff has no -o {arguments.output}: it is a text."),
        (
            arguments.compare and arguments.output == "manifests",
            "-o manifests and --compare exclude each other.",
        ),
        (arguments.image == "", "--image is empty; name an image, or leave the flag out."),
    ):
        if is_wrong:
            raise RuntimeFailure(FailureReason.INVALID_CONFIG, message)


@dataclass(frozen=True, slots=True)
class Result:
    """What is to be printed for one deployment. `found`: its plan, or the rows of a comparison."""

    deployment: Any
    found: Any
    calibration: str  # which measurements the predictions were corrected with

    @property
    def can_be_applied(self) -> bool:
        plans = [row.plan for row in self.found] if isinstance(self.found, list) else [self.found]
        return any(plan.feasible and not plan.requires for plan in plans)


def command_parser() -> CommandLineParser:
    """Return the flags of the command."""
    parser = CommandLineParser(
        prog="millstream plan",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help="YAML file with one LLMDeployment")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--gpus", action="append", default=[], metavar="NAME:COUNT", help="one node; repeat for more")
    where.add_argument("--nodes", type=Path, metavar="FILE", help="output of `kubectl get nodes -o yaml` (or json)")
    where.add_argument("--kubeconfig", type=Path, metavar="FILE", help="ask a cluster for its nodes")
    add("--pods", type=Path, metavar="FILE", help="with --nodes: output of `kubectl get pods --all-namespaces -o yaml`")
    add("-o", "--output", choices=FORMATS, default="table", help="table (default), json, yaml, or the manifests")
    add("--diff", action="store_true", help="what applying would change in the cluster of --kubeconfig")
    add("--compare", choices=AXES, help="the same deployment with other tiers, GPUs or formats")
    add("--config", type=Path, metavar="FILE", help="the model's config.json, if it cannot be found")
    add(
        "--draft-config",
        type=Path,
        metavar="FILE",
        help="the draft model's config.json, or that in a folder of the head",
    )
    add("--catalog", type=Path, metavar="FILE", help="YAML with own prices and GPUs over the shipped catalogue")
    add("--image", help="runtime image, if the spec has none; default: that of the operator of --kubeconfig")
    add(
        "--ignore-runtime-limits",
        action="store_true",
        help="plan as if the runtime supported everything in the API; `requires` still lists what is missing",
    )
    return parser


def _work(deployment: Any, catalog: Any, arguments: argparse.Namespace) -> Result:
    from millstream.plan_inputs import DEFAULT_NAMESPACE, NOT_READ, bad_input
    from millstream_operator.explaining.comparison import compare
    from millstream_operator.planning.plan import PlanDefaults
    from millstream_operator.planning.planner import decide
    from millstream_operator.planning.scaling_cost import planned_with_scaling_cost

    if _is_on_cpu(deployment) and arguments.compare == "gpus":
        raise bad_input(f"{deployment.name}: accelerator.type is CPU, so there are no GPUs to compare.")
    if _is_on_cpu(deployment) and arguments.gpus:
        print(f"{deployment.name}: accelerator.type is CPU, so --gpus has no effect.", file=sys.stderr)
    cluster = _cluster(arguments, deployment.metadata.namespace or DEFAULT_NAMESPACE)
    image = arguments.image or (cluster.image if cluster is not None else None) or PLACEHOLDER_IMAGE
    facts, defaults = _facts(deployment, catalog, cluster, arguments), PlanDefaults(image)
    calibration = cluster.calibration_note if cluster is not None else NOT_READ
    if arguments.compare:
        return Result(deployment, compare(arguments.compare, deployment, defaults, facts), calibration)
    for left_out in facts.inventory.refused if facts.inventory is not None else ():
        print(left_out.sentence, file=sys.stderr)
    found = planned_with_scaling_cost(decide(deployment, defaults, facts), deployment.spec)
    return Result(deployment, found, calibration)


def _is_on_cpu(deployment: Any) -> bool:
    accelerator = deployment.spec.accelerator
    return accelerator is not None and accelerator.type == "CPU"


def _facts(deployment: Any, catalog: Any, cluster: Any, arguments: argparse.Namespace) -> Any:
    from millstream.plan_inputs import draft_shape_of, inventory_for, shape_of
    from millstream_operator.planning.facts import CHOOSABLE, EVERYTHING, Facts

    draft = draft_shape_of(deployment.spec, arguments.draft_config)
    shape = shape_of(deployment.spec.model.source, arguments.config, "--config")
    if cluster is not None:
        facts = cluster.facts(deployment, catalog, shape)
    else:
        facts = Facts(shape=shape, inventory=inventory_for(deployment, catalog, gpus=arguments.gpus), catalog=catalog)
    return replace(
        facts,
        draft_shape=draft,
        draft_is_inspected=draft is not None,  # as it will be in the cluster
        choosable=EVERYTHING if arguments.ignore_runtime_limits else CHOOSABLE,
    )


def _cluster(arguments: argparse.Namespace, namespace: str) -> Any:
    """The nodes and pods that were given or asked for; None where GPUs were named, or nothing."""
    from millstream.cluster_inputs import objects_of_cluster
    from millstream.plan_inputs import objects_of_files

    if arguments.nodes is not None:
        return objects_of_files(arguments.nodes, arguments.pods)
    if arguments.kubeconfig is None:
        return None
    found = objects_of_cluster(arguments.kubeconfig, namespace)
    for note in (*found.notes, f"calibration: {found.calibration_note}"):
        print(note, file=sys.stderr)
    return found


def _print(results: list[Result], arguments: argparse.Namespace) -> None:
    if arguments.output == "table":
        print("\n\n".join(_table(result, arguments) for result in results))
        return
    if arguments.output == "manifests":
        documents = [document for result in results for document in _manifests(result.deployment, result.found)]
    else:
        documents = [_plain(result.found) for result in results]
    if arguments.output == "json":
        document = documents[0] if len(documents) == 1 else documents
        print(json.dumps(document, indent=2, ensure_ascii=not is_utf_8()))
        return
    import yaml

    print(yaml.safe_dump_all(documents, sort_keys=False, allow_unicode=is_utf_8(), width=120), end="")


def _diff(deployment: Any, found: Any, kubeconfig: Path, style: Any) -> str:
    from millstream.cluster_inputs import live_deployment
    from millstream.plan_inputs import bad_input
    from millstream_operator.api.load import ManifestError, parse
    from millstream_operator.explaining.plan_diff import plan_diff

    stored = live_deployment(kubeconfig, deployment)
    if stored is None:
        return plan_diff(deployment, found, None, {}, style)
    try:
        live = parse({name: value for name, value in stored.items() if name != "status"})
    except ManifestError as error:
        raise bad_input(f"{deployment.name}: the stored LLMDeployment is not valid here: {error}") from None
    return plan_diff(deployment, found, live, stored.get("status") or {}, style)


def _table(result: Result, arguments: argparse.Namespace) -> str:
    from millstream_operator.explaining.comparison import comparison_table
    from millstream_operator.explaining.plan_table import plan_table
    from millstream_operator.explaining.text import WIDEST, Style

    deployment, found = result.deployment, result.found
    colour = can_redraw(sys.stdout) and not os.environ.get("NO_COLOR")
    width = min(WIDEST, max(NARROWEST, columns_of(sys.stdout) or WIDEST))
    style = Style(colour=colour, unicode=is_utf_8(), width=width)
    if arguments.diff:
        return _diff(deployment, found, arguments.kubeconfig, style)
    if isinstance(found, list):
        return f"{style.bold(deployment.name)}\n\n{comparison_table(found, style)}"
    return plan_table(deployment.name, found, style, deployment.metadata.namespace, result.calibration)


def _plain(found: Any) -> Any:
    return [row.as_dict() for row in found] if isinstance(found, list) else found.status_plan()


def _manifests(deployment: Any, found: Any) -> list[dict[str, Any]]:
    """What the operator would apply, without owner references: there is no owner yet."""
    from millstream.plan_inputs import bad_input
    from millstream_operator.planning.requires import refusal
    from millstream_operator.rendering.companions import Autoscaler, CompanionDefaults, autoscaler
    from millstream_operator.rendering.objects import objects
    from millstream_operator.rendering.pod_defaults import PodDefaults
    from millstream_operator.rendering.revision import render_revision

    if not found.feasible:
        raise bad_input(f"{deployment.name}: there are no manifests, the plan is infeasible: {found.message}")
    if (missing := refusal(found.requires)) is not None:
        raise bad_input(f"{deployment.name}: there are no manifests. {missing}")
    rendered = objects(deployment, render_revision(deployment, found, PodDefaults()))
    # Of the companion objects, the one whose kind every cluster has.
    scaler = autoscaler(deployment, (), CompanionDefaults())
    if isinstance(scaler, Autoscaler):
        rendered.append(scaler.manifest)
    for manifest in rendered:
        manifest["metadata"].pop("ownerReferences", None)
        if manifest["metadata"].get("namespace") is None:
            manifest["metadata"].pop("namespace", None)
    return rendered
