"""What a GPU computes quantized weights with: kernels that were compared with the weight, else the whole weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from millstream_kernels.prebuilt.lookup import MissingKernelError
from millstream_runtime.models.layers.triton_layers import TritonLayers
from millstream_runtime.models.linear.linear import Linear
from millstream_runtime.quantization import implementations
from millstream_runtime.quantization.gpu import kernel_check, whole_linear
from millstream_runtime.quantization.gpu.int4_linear import TritonInt4Linear, int4_weight
from millstream_runtime.quantization.gpu.kernel_check import KernelCheck
from millstream_runtime.quantization.grouped_weight import GroupedWeight
from millstream_runtime.quantization.implementations import linear_for
from tests.support.tiny_families import model_logits, prompts_of
from tests.support.triton_interpreter import interpreting
from tests.unit.quantization.test_cpu_products import grouped
from tests.unit.quantization.test_formats import FORMATS, Folders

KINDS = [(4, "zeros"), (4, "center"), (8, "zeros"), (8, "signed")]


def rows(num_rows: int, num_inputs: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(num_rows, num_inputs, generator=torch.Generator().manual_seed(num_rows)).to(dtype)


@pytest.mark.matrix("bits", "kind")
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("group_size", [48, 1 << 10])
@pytest.mark.parametrize(("bits", "kind"), KINDS)
def test_a_whole_weight_is_dequantized_a_part_at_a_time(
    bits: int, kind: str, group_size: int, act_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts end within groups; the product is that of the dense weight, rounded to the model's type."""
    monkeypatch.setattr(whole_linear, "MOST_ELEMENTS", 37 * 50)
    weight, _ = grouped(bits, (129, 37), group_size, kind=kind, act_order=act_order)
    bias = torch.randn(37, generator=torch.Generator().manual_seed(1)).bfloat16()
    linear = whole_linear.whole_linear(weight, bias)
    x = rows(5, 129, torch.bfloat16)
    torch.testing.assert_close(linear(x), torch.addmm(bias, x, weight.dense(torch.bfloat16)), rtol=0.02, atol=0.02)
    order = [*range(36, -1, -1)]
    assert torch.equal(linear.reordered(order)(x), linear(x)[:, order])
    assert torch.equal(linear.without_bias()(x), linear.without_bias().reordered([*range(37)])(x))
    residual = torch.ones(5, 37, dtype=torch.bfloat16)
    linear.add_to(residual, x)
    assert torch.equal(residual, 1 + linear(x))


def test_scales_that_outputs_share_are_found_by_output() -> None:
    weight, _ = grouped(8, (64, 12), 1 << 10, kind="signed")
    columns = torch.tensor([0, 1, 0, 1, 2, 2, 0, 1, 0, 1, 2, 2], dtype=torch.int32)
    weight = replace(weight, scales=weight.scales[:, :3], columns=columns)
    x = rows(3, 64, torch.float32)
    torch.testing.assert_close(whole_linear.whole_linear(weight, None)(x), x @ weight.dense(torch.float32))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("quantized"))


@pytest.mark.deep
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_computes_what_its_dequantized_weights_compute(
    name: str, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, by what a GPU without a kernel computes."""
    on_a_gpu = implementations.Implementation((4, 8), "cpu", 0, implementations._on_a_gpu)
    monkeypatch.setattr(implementations, "_IMPLEMENTATIONS", (on_a_gpu,))
    packed, dequantized = folders.written("llama", name)
    (prompt,) = prompts_of([9])
    torch.testing.assert_close(model_logits(packed, prompt, 2), model_logits(dequantized, prompt, 2), rtol=0, atol=1e-4)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_a_gpu_without_a_kernel_dequantizes(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    notes: list[tuple[str, str]] = []
    counted: list[int] = []
    source = SimpleNamespace(
        device=torch.device("cuda", 0),
        packed_linear=lambda weight, bias: None,
        count=counted.append,
        note_implementation=lambda name, reason: notes.append((name, reason)),
    )
    weight, _ = grouped(4, (64, 32), 32)
    linear = linear_for(source, weight, None)
    assert isinstance(linear, whole_linear.WholeDequantizingLinear)
    assert (notes, counted) == ([("dequantized in each product", "no kernel was chosen for it")], [weight.num_bytes])


@pytest.fixture
def interpreter() -> Iterator[None]:
    with interpreting():
        yield


def layers(check: KernelCheck) -> TritonLayers:
    return TritonLayers(norms=False, activations=False, linears=True, rotates=False, experts=False, check=check)


@pytest.mark.usefixtures("interpreter")
def test_kernels_that_compute_what_the_weights_say_are_used() -> None:
    check = KernelCheck(torch.float32)
    for weight in (grouped(4, (64, 32), 32)[0], grouped(4, (64, 32), 32, kind="center", act_order=True)[0]):
        made = layers(check).packed_linear(weight, None)
        assert made is not None, check.problem
        assert isinstance(made[0], TritonInt4Linear)
    eight = replace(grouped(8, (64, 32), 1 << 10, kind="signed")[0], quantizes_activations=True)
    assert layers(check).packed_linear(eight, None) is not None, check.problem


class Wrong:
    """A layer that forgets a zero point, as a kernel with a fault might."""

    bias = None

    def __init__(self, weight: GroupedWeight, num_rows: int) -> None:
        self._right, self._num_rows = weight.dense(torch.float32), num_rows
        self._wrong = self._right + weight.scales[0].float()

    def __call__(self, x: Tensor) -> Tensor:
        return x @ (self._wrong if len(x) == self._num_rows else self._right)

    def without_bias(self) -> Linear:
        return self  # type: ignore[return-value]


@pytest.mark.parametrize("num_rows", kernel_check.NUM_ROWS)
def test_a_wrong_product_of_one_number_of_rows_is_found(num_rows: int) -> None:
    weight, _ = grouped(4, (128, 32), 32)
    found = kernel_check.problem(Wrong(weight, num_rows), weight, torch.float32)  # type: ignore[arg-type]
    assert found == f"the kernel's product of {num_rows} rows is not that of the weight"
    assert kernel_check.problem(Wrong(weight, 0), weight, torch.float32) is None  # type: ignore[arg-type]


def test_nan_is_a_wrong_product() -> None:
    weight, _ = grouped(4, (128, 32), 32)
    broken = whole_linear.whole_linear(replace(weight, scales=weight.scales * float("nan")), None)
    assert kernel_check.problem(broken, weight, torch.float32) is not None


def test_a_kernel_that_does_not_start_is_not_used_for_any_layer() -> None:
    """Outside the interpreter a CPU has no driver for it, as a pod without a compiler has none."""
    check = KernelCheck(torch.float32)
    weight, _ = grouped(4, (64, 32), 32)
    assert int4_weight(weight) is not None
    assert layers(check).packed_linear(weight, None) is None
    assert check.problem is not None
    assert check.problem.startswith("the kernel does not start: ")
    assert "\n" not in check.problem
    other, _ = grouped(4, (96, 32), 32)
    assert layers(check).packed_linear(other, None) is None


def test_a_kernel_that_the_image_should_have_is_no_problem_of_the_check() -> None:
    """The boot ends with it: see `execution.compiled_kernels`."""

    class Missing(Wrong):
        def __call__(self, x: Tensor) -> Tensor:
            raise MissingKernelError("none", "key")

    weight, _ = grouped(4, (64, 32), 32)
    with pytest.raises(MissingKernelError):
        kernel_check.problem(Missing(weight, 0), weight, torch.float32)  # type: ignore[arg-type]


def test_each_kind_of_weight_is_asked_about_once() -> None:
    asked: list[tuple[int, ...]] = []

    def ask(linear: Linear, weight: GroupedWeight, dtype: torch.dtype) -> None:
        asked.append(tuple(weight.codes.shape))

    check = KernelCheck(torch.float32, ask)
    for shape in ((64, 32), (64, 32), (96, 32)):
        weight, _ = grouped(4, shape, 32)
        assert layers(check).packed_linear(weight, None) is not None
    assert asked == [(64, 16), (96, 16)]
