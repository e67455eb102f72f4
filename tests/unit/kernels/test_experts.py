"""A mixture of experts by kernels: who is chosen, the order of rows, products, sums, and one result for one token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from millstream_kernels.arguments import KernelArgumentError
from millstream_kernels.experts.combine import combine
from millstream_kernels.experts.placement import Placement, max_tiles, place, tile_rows
from millstream_kernels.experts.product import expert_linear
from millstream_kernels.experts.routing import RoutingRule, route
from millstream_runtime.models.families.deepseek import GroupedRouter
from millstream_runtime.models.layers.moe import SoftmaxRouter
from tests.support.kernel_launches import recording_launches

pytestmark = pytest.mark.usefixtures("interpreter")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
V2 = RoutingRule(6, normalise=False, scale=16.0, num_groups=8, top_groups=3)
V3 = RoutingRule(8, normalise=True, scale=2.5, is_sigmoid=True, num_groups=8, top_groups=4)


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# Routing


@pytest.mark.parametrize(
    ("num_experts", "rule"),
    [
        (8, RoutingRule(2, normalise=True)),
        (60, RoutingRule(4, normalise=False)),
        (12, RoutingRule(12, normalise=True)),
        (1, RoutingRule(1, normalise=True)),
        (160, V2),
        (256, V3),
        (24, replace(V3, top_k=3, num_groups=3, top_groups=2)),
        (20, replace(V3, top_k=5, num_groups=1, top_groups=1, normalise=False)),
    ],
)
def test_tokens_get_the_engines_experts_and_shares(num_experts: int, rule: RoutingRule) -> None:
    logits = numbers(5, num_experts) * 2
    bias = numbers(num_experts, seed=2) / 4 if rule.is_sigmoid else None
    identity = torch.eye(num_experts)
    if rule.is_sigmoid or rule.num_groups > 1:
        options = (rule.top_k, rule.num_groups, rule.top_groups, rule.scale, rule.normalise)
        shares, experts = GroupedRouter(identity, bias, *options)(logits)
    else:
        shares, experts = SoftmaxRouter(identity, rule.top_k, rule.normalise)(logits)
    experts, order = experts.sort(dim=1)
    found = route(logits, rule, bias)
    assert torch.equal(found.experts, experts.int())
    torch.testing.assert_close(found.shares, shares.gather(1, order), rtol=1e-5, atol=1e-7)


def test_of_equal_experts_the_lower_number_is_chosen() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 2.0], [0.0] * 5])
    assert route(logits, RoutingRule(2, normalise=True)).experts.tolist() == [[1, 2], [0, 1]]


@pytest.mark.parametrize("rule", [RoutingRule(2, normalise=True), replace(V3, top_k=2)])
def test_a_token_with_nan_becomes_nan_and_chooses_experts_that_exist(rule: RoutingRule) -> None:
    logits = numbers(3, 32)
    logits[1, 9] = torch.nan
    logits[2] = -torch.inf
    found = route(logits, rule, torch.zeros(32) if rule.is_sigmoid else None)
    assert found.shares[1].isnan().any()
    assert found.shares[0].isfinite().all()
    assert ((found.experts >= 0) & (found.experts < 32)).all()
    assert all(len({*row}) == 2 for row in found.experts.tolist())


# The order of rows


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize(("tokens", "top_k", "num_experts"), [(1, 1, 1), (7, 2, 5), (300, 4, 9), (70, 8, 130)])
def test_the_rows_of_an_expert_follow_one_another_in_whole_tiles(
    tokens: int, top_k: int, num_experts: int, rows: int
) -> None:
    """More assignments than one block, experts without any, and rows of padding."""
    generator = torch.Generator().manual_seed(tokens)
    experts = torch.randint(0, max(1, num_experts - 1), (tokens, top_k), generator=generator, dtype=torch.int32)
    found = place(experts, num_experts, rows)
    wanted: list[int] = []
    of_tiles: list[int] = []
    flat = experts.flatten()
    for expert in range(num_experts):
        own = (flat == expert).nonzero().flatten().tolist()
        wanted += [*own, *[-1] * (-len(own) % rows)]
        of_tiles += [expert] * -(-len(own) // rows)
    assert found.rows[: len(wanted)].tolist() == wanted
    assert found.tile_experts.tolist() == [*of_tiles, *[-1] * (len(found.tile_experts) - len(of_tiles))]
    assert found.rows[found.places.long()].tolist() == [*range(tokens * top_k)]


def test_the_upper_bound_of_tiles_is_reached_and_never_passed() -> None:
    for counts in ([1, 1, 17], [16, 16, 1], [0, 33, 1], [1, 0, 0]):
        tiles = sum(-(-count // 16) for count in counts)
        assert tiles <= max_tiles(sum(counts), len(counts), 16)
    assert max_tiles(3, 8, 16) == 3
    assert (tile_rows(16, 128), tile_rows(4096, 128)) == (16, 64)


# Products and sums


def layer(x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, shares: Tensor, rows: int) -> Tensor:
    """By the kernels, added to zeros; what they do not write is poisoned."""
    placement = place(experts, len(gate_up), rows)
    inner = expert_linear(x, gate_up, placement, is_gated=True)
    computed = expert_linear(inner, down, placement)
    residual = torch.zeros_like(x)
    combine(residual, computed, placement, shares)
    return residual


def reference(x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, shares: Tensor, dtype: torch.dtype) -> Tensor:
    """In `dtype`, an expert after another, as `SparseMlp` does."""
    total = torch.zeros_like(x, dtype=dtype)
    for expert in range(len(gate_up)):
        tokens, places = (experts == expert).nonzero(as_tuple=True)
        gate, up = (x[tokens].to(dtype) @ gate_up[expert].to(dtype)).chunk(2, -1)
        computed = (F.silu(gate) * up) @ down[expert].to(dtype)
        total.index_add_(0, tokens, computed * shares[tokens, places, None].to(dtype))
    return total


Given = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def case(tokens: int, dtype: torch.dtype, *, hidden: int = 72, inner: int = 40, experts: int = 6) -> Given:
    """Sizes that are no multiple of a tile; rows of x with gaps, which are NaN."""
    memory = torch.full((tokens, hidden + 8), torch.nan, dtype=dtype)
    memory[:, :hidden] = numbers(tokens, hidden)
    gate_up = (numbers(experts, hidden, 2 * inner, seed=2) / 6).to(dtype)
    down = (numbers(experts, inner, hidden, seed=3) / 6).to(dtype)
    routing = route(numbers(tokens, experts, seed=4), RoutingRule(2, normalise=True))
    return memory[:, :hidden], gate_up, down, routing.experts, routing.shares


@pytest.mark.matrix("rows")
@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_a_layer_is_as_good_as_the_engines(dtype: torch.dtype, rows: int) -> None:
    given = case(11, dtype)
    truth = reference(*given, torch.float64)
    torch_error = (reference(*given, dtype).double() - truth).abs().max()
    error = (layer(*given, rows).double() - truth).abs().max()
    assert error <= max(2 * float(torch_error), torch.finfo(dtype).eps * float(truth.abs().max()))


def test_wide_weights_take_several_tiles_of_outputs_and_inputs() -> None:
    given = case(3, FP32, hidden=200, inner=136, experts=2)
    torch.testing.assert_close(layer(*given, 16).double(), reference(*given, torch.float64), rtol=1e-5, atol=1e-5)


def test_a_token_has_one_result_alone_in_company_and_in_tiles_of_64() -> None:
    x, gate_up, down, experts, shares = case(40, BF16)
    together = layer(x, gate_up, down, experts, shares, 64)
    alone = [
        layer(x[row : row + 1], gate_up, down, experts[row : row + 1], shares[row : row + 1], 16) for row in (0, 38)
    ]
    assert torch.equal(torch.cat(alone), together[[0, 38]])


def test_the_residual_is_added_to_in_place_in_float32() -> None:
    x, gate_up, down, experts, shares = case(3, BF16)
    placement = place(experts, len(gate_up), 16)
    computed = expert_linear(expert_linear(x, gate_up, placement, is_gated=True), down, placement)
    residual = numbers(3, 72, seed=9).to(BF16)
    rows = computed[placement.places.long()].view(3, 2, 72).float()
    wanted = residual.float() + (shares[:, 0, None] * rows[:, 0] + shares[:, 1, None] * rows[:, 1])
    combine(residual, computed, placement, shares)
    assert torch.equal(residual, wanted.to(BF16))


def test_an_expert_with_nan_spoils_its_own_tokens_alone() -> None:
    x, gate_up, down, experts, shares = case(9, FP32)
    gate_up[2] = torch.nan
    broken = (experts == 2).any(1)
    found = layer(x, gate_up, down, experts, shares, 16)
    assert 0 < int(broken.sum()) < 9
    assert torch.equal(found.isnan().any(1), broken)


# What is refused, and what is compiled ahead


def placement_of(tokens: int = 2) -> Placement:
    return place(torch.zeros(tokens, 2, dtype=torch.int32), 4, 16)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("logits", lambda: route(torch.zeros(2, 8).T, RoutingRule(1, True))),
        ("rule", lambda: route(torch.zeros(2, 8), RoutingRule(9, True))),
        ("rule", lambda: route(torch.zeros(2, 8), replace(V2, num_groups=3))),
        ("rule", lambda: route(torch.zeros(2, 8), replace(V3, top_k=1), torch.zeros(8))),
        ("bias", lambda: route(torch.zeros(2, 64), V3)),
        ("bias", lambda: route(torch.zeros(2, 8), RoutingRule(1, True), torch.zeros(8))),
        ("experts", lambda: place(torch.zeros(2, 2), 4, 16)),
        ("rows", lambda: place(torch.zeros(2, 2, dtype=torch.int32), 4, 32)),
        ("num_experts", lambda: place(torch.zeros(2, 2, dtype=torch.int32), 5000, 16)),
        ("x", lambda: expert_linear(torch.zeros(3, 8), torch.zeros(4, 8, 8), placement_of())),
        ("weights", lambda: expert_linear(torch.zeros(2, 8), torch.zeros(4, 8, 12), placement_of())),
        ("weights", lambda: expert_linear(torch.zeros(2, 8), torch.zeros(4, 8, 8, dtype=BF16), placement_of())),
        ("residual", lambda: combine(torch.zeros(2, 12), torch.zeros(64, 12), placement_of(), torch.ones(2, 2))),
        ("computed", lambda: combine(torch.zeros(2, 8), torch.zeros(4, 8), placement_of(), torch.ones(2, 2))),
        ("shares", lambda: combine(torch.zeros(2, 8), torch.zeros(64, 8), placement_of(), torch.ones(2, 3))),
    ],
)
def test_what_the_kernels_cannot_take_is_refused_by_name(argument: str, call: Any) -> None:
    with pytest.raises(KernelArgumentError) as caught:
        call()
    assert caught.value.argument == argument


def test_no_tokens_are_no_work() -> None:
    x, gate_up, down, experts, shares = case(1, BF16)
    assert layer(x[:0], gate_up, down, experts[:0], shares[:0], 16).shape == (0, 72)


@pytest.mark.parametrize("rows", [16, 64])
def test_production_starts_what_is_in_the_table(rows: int) -> None:
    with recording_launches(executing=False) as launches:
        for num_experts, rule, dtype in ((8, RoutingRule(2, True), BF16), (160, V2, FP32), (256, V3, FP32)):
            routing = route(
                torch.zeros(2, num_experts, dtype=dtype), rule, torch.zeros(num_experts) if rule.is_sigmoid else None
            )
            placement = place(routing.experts, num_experts, rows)
            x, gate_up = torch.zeros(2, 64, dtype=BF16), torch.zeros(num_experts, 64, 32, dtype=BF16)
            inner = expert_linear(x, gate_up, placement, is_gated=True)
            computed = expert_linear(inner, torch.zeros(num_experts, 16, 64, dtype=BF16), placement)
            combine(x, computed, placement, routing.shares)
    assert len(launches) == 18
    for launch in launches:
        assert len(launch.variant_names()) == 1, f"{launch} is compiled in service"
