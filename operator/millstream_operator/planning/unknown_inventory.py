"""What is planned where the model's shape is known and the cluster's GPUs are not. Pure.

    accelerator.products names GPUs of the catalogue -> as for usual machines with them; pods wait for such a node
    parallelism says how many GPUs                   -> from the spec alone
    the model fits on one GPU of every product       -> from the spec alone: one GPU
    otherwise                                        -> refused: what is not known, and how to tell it

One GPU of an unknown product is no plan for a model that may need eight: it would start, fail and keep the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.optimization import Parallelism
from millstream_operator.api.spec import Accelerator, LLMDeploymentSpec
from millstream_operator.catalog.gpu_names import UnknownGPUError, find_part
from millstream_operator.inventory.node_kinds import Inventory, inventory_of
from millstream_operator.inventory.unknown_gpus import UnknownGpus, not_looked_at
from millstream_operator.planning.choices.outcome import Stage
from millstream_operator.planning.choices.placement import Choice, NoPlacement
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.plan import Infeasible, PlanReason
from millstream_operator.planning.restart_fields import input_hash
from millstream_operator.planning.sizing.weights import rank_weights, weight_format

FITS_ANYWHERE = PlanReason("parallelism.tensor", "The model fits on one GPU of any product of the catalogue.")
NOTHING_KNOWN = not_looked_at("The cluster's GPUs are not known.")


def named_machines(facts: Facts, spec: LLMDeploymentSpec) -> Inventory | None:
    """The GPUs of accelerator.products, as usual machines have them, or as parallelism asks for more of them.

    None where the spec names none, or one that the catalogue lacks.
    """
    parallelism = spec.parallelism or Parallelism()
    tensor, nodes = parallelism.tensor or 1, parallelism.pipeline or 1
    try:
        parts = [find_part(facts.catalog, name) for name in (spec.accelerator or Accelerator()).products or ()]
    except UnknownGPUError:
        return None
    if not parts:
        return None
    machines = [(part, max(part.gpus_per_node, tensor)) for part in parts]
    return inventory_of(machines * nodes, hypothetical=True)


def waits_for_machines(facts: Facts, machines: Inventory) -> PlanReason:
    """Why pods of a plan for machines that are not in the cluster may wait."""
    kinds = " or ".join(f"{kind.gpus} {kind.part.name}" for kind in machines.kinds)
    return PlanReason(
        "inventory",
        f"{_unknown(facts).why} accelerator.products is planned for as {kinds} in one node; pods wait until there is "
        "such a node.",
    )


def counts_gpus(spec: LLMDeploymentSpec) -> bool:
    """Whether the spec itself says how many GPUs a replica takes."""
    return spec.parallelism is not None and (spec.parallelism.tensor or spec.parallelism.pipeline) is not None


def fits_any_gpu(search: Callable[[Facts], Choice | NoPlacement], facts: Facts) -> bool:
    """Whether one GPU of each product holds the model, whatever its speed and price; the smallest is asked first."""
    supported = (part for part in facts.catalog if part.may_be_suggested)
    for part in sorted(supported, key=lambda part: (part.usable_memory_bytes, part.name)):
        found = search(replace(facts, inventory=inventory_of([(part, 1)], hypothetical=True), capacity=None))
        if isinstance(found, NoPlacement) and found.problem.stage <= Stage.MEMORY:
            return False
    return True


def refused(deployment: LLMDeployment, facts: Facts) -> Infeasible:
    """No plan: what is not known, why it matters, and how to tell it."""
    unknown, shape = _unknown(facts), facts.shape
    assert shape is not None  # noqa: S101 - without it the spec alone is planned
    method = shape.quantization.method if shape.quantization else "None"
    weights = rank_weights(shape, weight_format(shape, method), 1, 1)
    gigabytes = weights.total_bytes / 1e9
    message = (
        f"{unknown.why} How many GPUs hold {gigabytes:.1f} GB of weights depends on their product, which is not known. "
        f"{unknown.instruction}"
    )
    return Infeasible("inventory", message, input_hash(deployment))


def _unknown(facts: Facts) -> UnknownGpus:
    return facts.unknown_gpus or NOTHING_KNOWN
