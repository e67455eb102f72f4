"""What is planned where the model's shape is known and the cluster's GPUs are not. Pure.

    accelerator.products names GPUs of the catalogue -> as for usual machines with them; pods wait for such a node
    parallelism says how many GPUs                   -> from the spec alone
    the model fits on one GPU of every product       -> from the spec alone: one GPU
    otherwise, or with nodes that are left out and
    objectives, a load or a budget to keep           -> refused: what is not known, and how to tell it

One GPU of an unknown product is no plan for a model that may need eight: it would start, fail and keep the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import replace

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.optimization import Parallelism
from millstream_operator.api.spec import Accelerator, LLMDeploymentSpec
from millstream_operator.catalog.gpu_names import UnknownGPUError, find_part
from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.inventory.left_out import SET_PARALLELISM
from millstream_operator.inventory.node_kinds import Inventory, inventory_of
from millstream_operator.inventory.unknown_gpus import (
    DECLARE_POOLS,
    NAME_PRODUCTS,
    UnknownGpus,
    not_looked_at,
    sentence_of,
)
from millstream_operator.planning.choices.outcome import Stage
from millstream_operator.planning.choices.placement import Choice, NoPlacement
from millstream_operator.planning.choices.rounded_weights import as_loaded
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.left_out_nodes import Verdict, reasons, with_sentences
from millstream_operator.planning.plan import Infeasible, PlanReason
from millstream_operator.planning.requires import INVENTORY, unknown_facts
from millstream_operator.planning.restart_fields import input_hash
from millstream_operator.planning.sizing.tensor_parallel import MOST_GPUS, allowed_sizes, tensor_parallel_problem
from millstream_operator.planning.sizing.weights import rank_weights, weight_format

FITS_ANYWHERE = PlanReason("parallelism.tensor", "The model fits on one GPU of any product of the catalogue.")
NOTHING_KNOWN = not_looked_at("The cluster's GPUs are not known.")


def named_machines(facts: Facts, spec: LLMDeploymentSpec, present: Container[str] = ()) -> Inventory | None:
    """The GPUs of accelerator.products, as usual machines have them, or as parallelism asks for more of them.

    None where the spec names none, none but `present` ones, or one that the catalogue lacks.
    """
    parallelism = spec.parallelism or Parallelism()
    tensor, nodes = parallelism.tensor or 1, parallelism.pipeline or 1
    try:
        parts = [find_part(facts.catalog, name) for name in (spec.accelerator or Accelerator()).products or ()]
    except UnknownGPUError:
        return None
    machines = [(part, max(part.gpus_per_node, tensor)) for part in parts if part.name not in present]
    if not machines:
        return None
    return inventory_of(machines * nodes, hypothetical=True)


def waits_for_machines(facts: Facts, machines: Inventory) -> PlanReason:
    """Why pods of a plan for machines that are not in the cluster may wait."""
    names = " or ".join(kind.part.name for kind in machines.kinds)
    unknown = _unknown(facts)
    is_seen = facts.inventory is not None or unknown.left_out
    why = f"No node that counts has {names}." if is_seen else unknown.why
    kinds = " or ".join(f"{kind.gpus} {kind.part.name}" for kind in machines.kinds)
    return PlanReason(
        "inventory",
        f"{why} accelerator.products is planned for as {kinds} in one node; pods wait until there is such a node.",
    )


def absent_machines(facts: Facts, spec: LLMDeploymentSpec) -> Inventory | None:
    """Usual machines of those products of the spec that no node or declared pool of the cluster has; None: none."""
    everything = facts.capacity or facts.inventory
    if not facts.may_grow or everything is None:
        return None
    return named_machines(facts, spec, {kind.part.name for kind in everything.kinds})


def counts_gpus(spec: LLMDeploymentSpec) -> bool:
    """Whether the spec itself says how many GPUs a replica takes."""
    return spec.parallelism is not None and (spec.parallelism.tensor or spec.parallelism.pipeline) is not None


def impossible_size(spec: LLMDeploymentSpec, shape: ModelShape) -> str | None:
    """Why no GPUs can share the layers as the spec asks, and the sizes that the model allows; None where they can."""
    method = shape.quantization.method if shape.quantization else "None"
    group = weight_format(shape, method).group_size
    asked = (spec.parallelism or Parallelism()).tensor or 1
    if (problem := tensor_parallel_problem(shape, asked, group)) is None:
        return None
    return f"parallelism.tensor is {asked}: {problem}. The model allows {allowed_sizes(shape, MOST_GPUS, group)}."


def fits_any_gpu(search: Callable[[Facts], Choice | NoPlacement], facts: Facts) -> bool:
    """Whether one GPU of each product holds the model, whatever its speed and price; the smallest is asked first."""
    supported = (part for part in facts.catalog if part.may_be_suggested)
    for part in sorted(supported, key=lambda part: (part.usable_memory_bytes, part.name)):
        found = search(replace(facts, inventory=inventory_of([(part, 1)], hypothetical=True), capacity=None))
        if isinstance(found, NoPlacement) and found.problem.stage <= Stage.MEMORY:
            return False
    return True


def refused(deployment: LLMDeployment, facts: Facts, found: Sequence[Verdict]) -> Infeasible:
    """No plan: what is not known, why it matters, and how to tell it. `found`: the verdicts on nodes that there are."""
    unknown, shape = _unknown(facts), facts.shape
    assert shape is not None  # noqa: S101 - without it the spec alone is planned
    if found and found[0].fits_as is not None:
        first, *others = reasons(found)
        return Infeasible("inventory", with_sentences(first.reason, others), input_hash(deployment))
    shape = as_loaded(deployment.spec, shape, facts.runtime)
    method = shape.quantization.method if shape.quantization else "None"
    weights = rank_weights(shape, weight_format(shape, method), 1, 1)
    what, instruction = f"How many GPUs hold {weights.total_bytes / 1e9:.1f} GB of weights", unknown.instruction
    if INVENTORY in unknown_facts(deployment.spec, facts):  # then a size that the spec gives is not enough
        what = "Whether GPUs keep the objectives, the load and the budget"
        remedies = [remedy for remedy in unknown.remedies if remedy != SET_PARALLELISM]
        instruction = sentence_of(remedies or [NAME_PRODUCTS])
    why = f"{what} depends on their product, which is not known."
    if found and all(verdict.group.gpus for verdict in found):
        instruction = sentence_of((NAME_PRODUCTS, DECLARE_POOLS))
        farthest = max((one.problem for one in found if one.problem is not None), key=lambda one: one.stage)
        why = f"There is no plan with them either: {farthest.sentence}."
    return Infeasible("inventory", f"{unknown.why} {why} {instruction}", input_hash(deployment))


def _unknown(facts: Facts) -> UnknownGpus:
    return facts.unknown_gpus or NOTHING_KNOWN
