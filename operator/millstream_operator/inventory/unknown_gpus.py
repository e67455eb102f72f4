"""Why no GPU of a cluster can be planned on, and how a person tells the operator about its GPUs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millstream_operator.inventory.left_out import SET_PARALLELISM, LeftOut

REASONS_SHOWN = 2
# What always helps, in the order of how much the planner then knows.
DECLARE_POOLS = "declare the node pools of an autoscaler (the chart's value inventory.nodePools)"
NAME_PRODUCTS = "name the GPUs in accelerator.products"


@dataclass(frozen=True, slots=True)
class UnknownGpus:
    """`why` is a sentence. `remedies` are instructions, the best first; each of them alone is enough.

    `left_out`: the nodes that there are, none of which counts.
    """

    why: str
    remedies: tuple[str, ...]
    left_out: tuple[LeftOut, ...] = ()

    @property
    def instruction(self) -> str:
        """The remedies as one sentence."""
        return sentence_of(self.remedies)


def sentence_of(remedies: Sequence[str]) -> str:
    """Instructions, each of which is enough, as one sentence."""
    *others, last = remedies
    text = f"{', '.join(others)}, or {last}" if others else last
    return f"{text[:1].upper()}{text[1:]}."


def not_looked_at(problem: str) -> UnknownGpus:
    """The operator cannot see nodes, or does not look."""
    remedies = (NAME_PRODUCTS, "let the operator read nodes and pods (the chart's value inventory.mode)")
    return UnknownGpus(problem, (*remedies, DECLARE_POOLS, SET_PARALLELISM))


def no_gpu_nodes() -> UnknownGpus:
    """There is no node with GPUs: an autoscaler has removed all of them, or the device plugin does not run."""
    why = "No node offers nvidia.com/gpu: GPU nodes are scaled to zero, or NVIDIA's device plugin does not run."
    return UnknownGpus(why, (NAME_PRODUCTS, DECLARE_POOLS, SET_PARALLELISM))


def none_usable(left_out: tuple[LeftOut, ...]) -> UnknownGpus:
    """There are nodes with GPUs, and each is left out for a reason."""
    shown = left_out[:REASONS_SHOWN]
    remedies = dict.fromkeys(remedy for one in shown for remedy in one.remedies)
    last = [SET_PARALLELISM] if SET_PARALLELISM in remedies else []
    first = [remedy for remedy in remedies if remedy != SET_PARALLELISM]
    return UnknownGpus(" ".join(one.sentence for one in shown), (*first, *last), left_out)
