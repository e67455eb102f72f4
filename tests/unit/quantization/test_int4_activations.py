"""4-bit layers that a CPU computes by bfloat16 activations: values, groups, company, when they are chosen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from millstream_runtime.boot import BootLedger
from millstream_runtime.config import DType, RuntimeConfig
from millstream_runtime.models.linear.shares import rank_config
from millstream_runtime.models.linear.tensor_parallel import SINGLE_PROCESS, Ranks
from millstream_runtime.models.loading.checkpoint import Checkpoint
from millstream_runtime.models.loading.weights import LoadedWeights
from millstream_runtime.models.registry import expected_weights, load_model, load_model_config
from millstream_runtime.quantization.cpu.int4_linear import OUTPUTS_PACKED_AT_ONCE, Int4Linear, fits, int4_linear
from millstream_runtime.quantization.grouped_weight import GroupedWeight, pack_halves, runs_of
from millstream_runtime.quantization.layouts import layout_for
from millstream_runtime.server.openai.response_schemas import Readiness
from millstream_runtime.server.operations.readiness import ready_body
from tests.support.family_cases import dense
from tests.support.quantized_checkpoints import awq, quantized
from tests.support.thread_ranks import on_ranks
from tests.support.tiny_families import logits_of, make_engine, model_logits, prompts_of, write_family

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    not torch.backends.cpu.get_cpu_capability().startswith("AVX"), reason="torch has vector code for x86 alone"
)
ROWS = (1, 2, 5, 70)
ROUNDING = 2.0**-8  # of bfloat16: inputs, scales, results


def weight_of(
    num_inputs: int, num_outputs: int, group_size: int, *, zeros: bool = True, first: int = 0, act_order: bool = False
) -> GroupedWeight:
    """Random codes. `first`: where a rank's share begins within the first group."""
    generator = torch.Generator().manual_seed(num_inputs + num_outputs)
    groups = (torch.arange(num_inputs) + first) // group_size
    scales = torch.rand(int(groups.max()) + 1, num_outputs, generator=generator).half() + 0.01
    of_groups = torch.randint(0, 16, scales.shape, generator=generator).to(torch.uint8)
    codes = torch.randint(0, 16, (num_inputs, num_outputs), generator=generator).to(torch.uint8)
    order = torch.randperm(num_inputs, generator=generator).to(torch.int32) if act_order else None
    return GroupedWeight(
        pack_halves(codes), scales, pack_halves(of_groups) if zeros else 8, runs_of(groups), num_outputs, 4, order
    )


@pytest.mark.matrix("num_inputs", "group_size", "first")
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(
    ("num_inputs", "group_size", "first"), [(576, 64, 0), (256, 128, 0), (64, 1024, 0), (512, 256, 0), (96, 128, 64)]
)
def test_a_layer_computes_what_the_dequantized_weight_computes(
    num_inputs: int, group_size: int, first: int, zeros: bool, act_order: bool
) -> None:
    """Within the rounding of bfloat16, whole groups or blocks of a group."""
    weight = weight_of(num_inputs, 48, group_size, zeros=zeros, first=first, act_order=act_order)
    assert fits(weight)
    bias = torch.randn(48)
    linear, exact = int4_linear(weight, bias), weight.dense(torch.float64)
    for num_rows in ROWS:
        x = torch.randn(num_rows, num_inputs, generator=torch.Generator().manual_seed(num_rows))
        wanted = x.double() @ exact
        error = (linear(x).double() - bias - wanted).norm() / wanted.norm()
        assert error < 2 * ROUNDING
        with_rounded_rows = int4_linear(weight, None)(x.bfloat16().float())
        assert torch.equal(with_rounded_rows, int4_linear(weight, None)(x))


def test_many_outputs_are_packed_in_parts() -> None:
    weight = weight_of(64, 2 * OUTPUTS_PACKED_AT_ONCE + 80, 32)
    x = torch.randn(3, 64)
    wanted = x.double() @ weight.dense(torch.float64)
    assert (int4_linear(weight, None)(x) - wanted).norm() / wanted.norm() < 2 * ROUNDING


@pytest.mark.parametrize(
    "weight",
    [
        weight_of(96, 48, 64, first=40),  # a border of groups within 32 inputs
        weight_of(100, 48, 128),
        weight_of(64, 40, 32),
        weight_of(64, 48, 16),
    ],
    ids=["border", "inputs", "outputs", "groups"],
)
def test_other_shapes_are_not_taken(weight: GroupedWeight) -> None:
    assert not fits(weight)


@pytest.fixture(scope="module")
def linear() -> Int4Linear:
    return int4_linear(weight_of(576, 96, 64), None)


def test_a_row_has_the_same_bits_alone_and_in_company(linear: Int4Linear) -> None:
    x = torch.randn(100, 576) * torch.logspace(-30, 30, 100).unsqueeze(1)
    together = linear(x)
    assert together.isfinite().all()
    for several in (1, 3, 64):
        for row in range(0, 100 - several, 7):
            assert torch.equal(linear(x[row : row + several]), together[row : row + several])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_number_stays_in_its_row_and_is_seen(bad: float, linear: Int4Linear) -> None:
    for num_rows in (3, 80):
        x = torch.randn(num_rows, 576)
        good = linear(x)
        x[1, 3] = bad
        found = linear(x)
        assert not found[1].isfinite().any()
        others = torch.arange(num_rows) != 1
        assert torch.equal(found[others], good[others])


def test_rows_of_zeros_and_no_rows(linear: Int4Linear) -> None:
    assert torch.equal(linear(torch.zeros(3, 576)), torch.zeros(3, 96))
    assert linear(torch.empty(0, 576)).shape == (0, 96)


def test_outputs_are_reordered_and_a_bias_added_and_taken_away() -> None:
    bias, x, residual = torch.randn(48), torch.randn(2, 64), torch.ones(2, 48)
    linear = int4_linear(weight_of(64, 48, 32), bias)
    order = torch.randperm(48).tolist()
    assert torch.equal(linear.reordered(order)(x), linear(x)[:, order])
    assert torch.equal(linear.without_bias()(x) + bias, linear(x))
    linear.add_to(residual, x)
    assert torch.equal(residual, 1 + linear(x))


def test_a_layer_takes_at_most_a_twentieth_more_than_its_tensors() -> None:
    """A second term of 16 bits per group where the format has a zero point of 4."""
    weight = weight_of(1024, 512, 64)
    assert weight.num_bytes < int4_linear(weight, None).num_bytes < 1.05 * weight.num_bytes


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An AWQ folder of a tiny Llama, and that of its dequantized weights. Its MLP has three groups of 64 inputs."""
    root = tmp_path_factory.mktemp("awq")
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
    write_family(root / "plain", **dense("llama", **sizes, head_dim=16))
    settings = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}
    return root / "packed", quantized(root / "plain", root / "packed", settings, awq(64))


def test_a_checkpoint_is_computed_so_where_memory_has_room(folders: tuple[Path, Path]) -> None:
    assert _implementation(folders[0], 1 << 20) == "4-bit weights by bfloat16 activations"
    assert _implementation(folders[0], 0) == "computed from packed codes"
    assert _implementation(folders[0], 1 << 20, torch.float64) == "dequantized when loaded"


def test_ready_lists_by_which_arithmetic_the_layers_are_computed_and_why(folders: tuple[Path, Path]) -> None:
    linears = make_engine(folders[0]).linears
    body = ready_body(
        RuntimeConfig(model=str(folders[0]), served_model_name="tiny"),
        BootLedger().snapshot(),
        topology=None,
        memory=None,
        linears=linears,
        now_seconds=0.0,
    )
    config = load_model_config(folders[0])
    (found,) = body["linears"]
    assert found == {
        "computed_by": "4-bit weights by bfloat16 activations",
        "layers": 4 * config.num_layers,  # queries, keys and values side by side, gates and ups too
        "reason": "torch's kernel takes its groups, and memory has room for the kernel's form",
    }
    Readiness.model_validate(body)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_model_stays_close_to_its_dequantized_weights(num_ranks: int, folders: tuple[Path, Path]) -> None:
    """A share of two ranks (96 of 192 inputs) ends within a group: its blocks have 32 inputs."""
    packed, dequantized = folders
    [prompt] = prompts_of([40])
    config = load_model_config(packed)

    def of_rank(ranks: Ranks) -> Tensor:
        model = load_model(config, packed, torch.float32, CPU, ranks, copy_budget_bytes=1 << 30)
        return logits_of(model, rank_config(config, ranks), prompt, 13, torch.float32)

    found = (on_ranks(num_ranks, of_rank) if num_ranks > 1 else of_rank(SINGLE_PROCESS)).double()
    wanted = model_logits(dequantized, prompt, 13)
    assert 1e-5 < (found - wanted).norm() / wanted.norm() < 0.1  # random weights: a wrong layer is off by 1 and more


@pytest.mark.parametrize("room_bytes", [1 << 30, 0])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_float32_that_was_asked_for_is_float32(num_ranks: int, room_bytes: int, folders: tuple[Path, Path]) -> None:
    """Log-probabilities were off by 2e-2 to 4e-2: activations and scales were rounded to bfloat16 all the same."""
    packed, dequantized = folders
    [prompt] = prompts_of([40])
    config = load_model_config(packed)
    counted_bytes = []

    def of_rank(ranks: Ranks) -> Tensor:
        model = load_model(
            config, packed, torch.float32, CPU, ranks, copy_budget_bytes=room_bytes, may_round_activations=False
        )
        counted_bytes.append(model.weight_bytes)
        return logits_of(model, rank_config(config, ranks), prompt, 13, torch.float32)

    found = on_ranks(num_ranks, of_rank) if num_ranks > 1 else of_rank(SINGLE_PROCESS)
    wanted = model_logits(dequantized, prompt, 13, torch.float64).log_softmax(-1)
    assert (found.double().log_softmax(-1) - wanted).abs().max() <= 1e-3
    plain_bytes = expected_weights(load_model_config(dequantized), torch.float32).num_bytes
    assert (sum(counted_bytes) >= plain_bytes) == (room_bytes > 0)  # the dequantized weights are counted


def test_an_engine_takes_float32_at_its_word_and_says_so(folders: tuple[Path, Path]) -> None:
    (found,) = make_engine(folders[0], dtype=DType.FLOAT32).linears
    assert found.computed_by == "dequantized when loaded"
    (found,) = make_engine(folders[0]).linears
    assert found.computed_by == "4-bit weights by bfloat16 activations"


def _implementation(folder: Path, room_bytes: int, dtype: torch.dtype = torch.float32) -> str:
    """What computes the MLP's `down_proj` of the first layer; its bytes are counted."""
    config = load_model_config(folder)
    assert config.quantization is not None
    with Checkpoint(folder) as checkpoint:
        weights = LoadedWeights(checkpoint, dtype, CPU, copy_budget_bytes=room_bytes)
        linear = layout_for(config.quantization.format).linear(weights, {"model.layers.0.mlp.down_proj": 64}, 192, None)
    if isinstance(linear, Int4Linear):
        assert weights.num_bytes == linear.num_bytes
    [(name, _)] = weights.implementations
    return name
