"""A mixture of experts: each token goes through the few MLPs that a router chooses for it (Shazeer et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from millstream_runtime.models.config.fields import Fields
from millstream_runtime.models.layers.mlp import GatedMlp
from millstream_runtime.models.layers.torch_layers import layers_of
from millstream_runtime.models.linear.linear import ExpertLinears
from millstream_runtime.models.linear.shares import Cut, even_share
from millstream_runtime.models.linear.tensor_parallel import Ranks
from millstream_runtime.models.loading.layer_kernels import AddExperts, RouterSpec
from millstream_runtime.models.loading.weights import Weights

EXPERTS_LIMIT = 4096


class Router(Protocol):
    """Chooses the experts of each token."""

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`[T, hidden]` to the shares `[T, k]`, float32, and the experts `[T, k]`, int64, of each token."""

    @property
    def spec(self) -> RouterSpec:
        """The same, for a kernel."""


@dataclass(frozen=True, slots=True)
class SoftmaxRouter:
    """The `top_k` greatest of a softmax in float32; `normalise` makes the shares sum to one."""

    gate: Tensor  # [experts, hidden]
    top_k: int
    normalise: bool

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares, experts = F.linear(x, self.gate).softmax(dim=-1, dtype=torch.float32).topk(self.top_k, dim=-1)
        return shares / shares.sum(dim=-1, keepdim=True) if self.normalise else shares, experts

    @property
    def spec(self) -> RouterSpec:
        return RouterSpec(self.gate, self.top_k, self.normalise)


@dataclass(frozen=True, slots=True)
class SparseMlp:
    """Routed experts and, in some families, one MLP that every token goes through as well.

    Rows are sorted by expert, so that each expert that was chosen computes all of its tokens as one product. A token's
    experts are added in the order of their numbers, so that the sum never depends on other tokens of the batch.

    Every rank has its share of the units of every expert, so that all are equally busy whatever the router chooses, and
    the layer ends in one sum. (With whole experts on one rank each, ranks would wait for the busiest.)
    """

    router: Router
    gate_up: ExpertLinears  # hidden -> 2 intermediate of this rank
    down: ExpertLinears  # intermediate of this rank -> hidden
    ranks: Ranks
    shared: GatedMlp | None = None  # leaves the sum over ranks to this layer
    add_experts: AddExperts | None = None  # kernels in place of a product per expert

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        if self.ranks.size == 1:
            self._add_part_to(residual, x)
        else:
            part = torch.zeros_like(residual)
            self._add_part_to(part, x)
            residual.add_(self.ranks.all_reduce(part))

    def _add_part_to(self, total: Tensor, x: Tensor) -> None:
        (self.add_experts or self._add_experts)(total, x)
        if self.shared is not None:
            self.shared.add_to(total, x)

    def _add_experts(self, total: Tensor, x: Tensor) -> None:
        shares, experts = self.router(x)
        top_k = experts.shape[1]
        by_expert = experts.flatten().argsort(stable=True)
        tokens, shares = by_expert // top_k, shares.flatten()[by_expert].to(x.dtype).unsqueeze(1)
        # The one place where a layer waits for the device: how many rows each expert has.
        counts = torch.bincount(experts.flatten(), minlength=self.gate_up.num_experts).tolist()
        start = 0
        for expert, count in enumerate(counts):
            if count:
                rows = tokens[start : start + count]
                gate, up = self.gate_up.product(expert, x[rows]).chunk(2, dim=-1)
                computed = self.down.product(expert, F.silu(gate).mul_(up))
                total.index_add_(0, rows, computed.mul_(shares[start : start + count]))
                start += count


def sparse_mlp(
    weights: Weights,
    router: Router,
    experts: list[str],
    hidden_size: int,
    intermediate_size: int,
    *,
    size_field: str,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    shared: GatedMlp | None = None,
) -> SparseMlp:
    """Load one.

    Args:
        experts: the prefix of each.
        size_field: what config.json calls `intermediate_size`.
        names: what the family calls gate, up and down.
        shared: loaded with `partial_sum`.

    Raises:
        InvalidConfigError: the units do not divide among the ranks.
    """
    gate, up, down = names
    units = Cut(intermediate_size, (even_share(intermediate_size, weights.ranks, size_field),))
    inputs = [{f"{expert}.{gate}": units, f"{expert}.{up}": units} for expert in experts]
    outputs = [{f"{expert}.{down}": hidden_size} for expert in experts]
    gate_up, down_linears = weights.expert_linears(inputs, hidden_size), weights.partial_expert_linears(outputs, units)
    add_experts = layers_of(weights).routed_experts(router.spec, gate_up, down_linears)
    if add_experts is None:
        weights.waits_for_device = True
    return SparseMlp(
        router=router,
        gate_up=gate_up,
        down=down_linears,
        ranks=weights.ranks,
        shared=shared,
        add_experts=add_experts,
    )


def read_experts(fields: Fields, count_field: str) -> tuple[int, int]:
    """Number of routed experts, and how many a token goes through."""
    count, top_k = fields.integer(count_field, maximum=EXPERTS_LIMIT), fields.integer("num_experts_per_tok")
    if top_k > count:
        raise fields.invalid("num_experts_per_tok", f"{top_k}; it must be at most {count_field} ({count})")
    return count, top_k
