"""What a model asks of a checkpoint: tensors by name and shape, in the engine's dtype, device and layout.

A family's `build` runs twice over the same code, so that names and shapes are written down once:

    ExpectedWeights   meta tensors; notes every name, shape and byte -> the memory estimate and `Checkpoint.check`
    LoadedWeights     the tensors themselves, after the whole checkpoint was checked

With several ranks each asks for its own share: shapes are always those of the checkpoint, a `Cut` says what of them is
kept, and only that is read.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from millstream_runtime.errors import InvalidConfigError
from millstream_runtime.models.arithmetic import Arithmetic
from millstream_runtime.models.linear.linear import (
    DenseExperts,
    ExpertLinears,
    Linear,
    MemoryLayout,
    PlainLayout,
    Projection,
)
from millstream_runtime.models.linear.several import LinearPerExpert, SideBySideLinear
from millstream_runtime.models.linear.shares import Cut, Size, kept_size, total_size
from millstream_runtime.models.linear.tables import DenseTable, Table
from millstream_runtime.models.linear.tensor_parallel import SINGLE_PROCESS, Ranks, RowParallelLinear
from millstream_runtime.models.loading.checkpoint import bad_numbers
from millstream_runtime.models.loading.layer_kernels import LayerKernels
from millstream_runtime.models.loading.placement import CheckedOnHost, Placement
from millstream_runtime.models.loading.tensor_store import TensorStore
from millstream_runtime.models.memory_layouts import memory_layout_for, planned_layout
from millstream_runtime.quantization.grouped_weight import GroupedWeight
from millstream_runtime.quantization.quantized_layout import invalid_tensor
from millstream_runtime.quantization.unquantized import UNQUANTIZED
from millstream_runtime.quantization.weight_layout import FLOATS, WeightLayout
from millstream_runtime.strict_json import read_strict_json

if TYPE_CHECKING:
    from millstream_kernels.cpu.bfloat16.product import Bfloat16Product
    from millstream_kernels.cpu.loaded_code import LoadedCode

LayoutOf = Callable[[str], WeightLayout]  # of a module, by its name in the checkpoint


class Weights(ABC):
    """The `TensorSource` of weight layouts, and what families build their layers from.

    Attributes: `ranks`, among whom the model is shared; `dtype` and `device` of the tensors; `weights_dtype`, which
    linear weights and tables are rounded to where `memory` holds them in 16 bits; `memory`, the layout of dense linear
    weights; `kernels`, what makes norms, gates and packed linears; `implementations`, quantized layers by what computes
    them, and why; `may_round_activations` and `may_round_products`, see `TensorSource`; `waits_for_device`, whether
    some layer reads numbers back from the device to go on.
    """

    def __init__(
        self,
        arithmetic: Arithmetic,
        device: torch.device,
        ranks: Ranks = SINGLE_PROCESS,
        memory: MemoryLayout | None = None,
        layout_of: LayoutOf | None = None,
        kernels: LayerKernels | None = None,
    ) -> None:
        """`memory`: `PlainLayout` by default. `layout_of`: how modules are stored; by default none is quantized."""
        self.kernels = kernels
        self.dtype, self.weights_dtype = arithmetic.dtype, arithmetic.weights
        self.device = device
        self.ranks = ranks
        self.memory: MemoryLayout = memory if memory is not None else PlainLayout()
        self._layout_of = layout_of or (lambda module: UNQUANTIZED)
        self.implementations: Counter[tuple[str, str]] = Counter()
        self.waits_for_device = False
        self.may_round_activations = self.may_round_products = True
        self._tensor_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes that the tensors handed out so far take on the device, copies of linear weights included."""
        return self._tensor_bytes + self.memory.copy_bytes

    @abstractmethod
    def read(self, name: str, shape: tuple[Size, ...], dtypes: tuple[str, ...] = FLOATS) -> Tensor:
        """One tensor of the checkpoint on `device`, in the file's dtype. It may be the mapped file: copy it."""

    @abstractmethod
    def read_optional(self, name: str, shape: tuple[Size, ...], dtypes: tuple[str, ...] = FLOATS) -> Tensor | None:
        """The same of a tensor that the checkpoint may lack; None on the meta device."""

    @abstractmethod
    def read_scale(self, name: str, shape: tuple[Size, ...]) -> Tensor:
        """The same of a small float tensor, whose dimensions of size one the file may leave out or add."""

    @abstractmethod
    def read_document(self, name: str) -> dict[str, Any] | None:
        """A JSON object that the checkpoint keeps as the bytes of a tensor; None on the meta device."""

    def count(self, num_bytes: int) -> None:
        """Add bytes of weights that were not made by `empty` to `num_bytes`."""
        self._tensor_bytes += num_bytes

    def note_implementation(self, name: str, reason: str) -> None:
        """Count a quantized layer by what computes it, and why."""
        self.implementations[name, reason] += 1

    def packed_linear(self, weight: GroupedWeight, bias: Tensor | None) -> Linear | None:
        """See `TensorSource`."""
        made = None if self.kernels is None else self.kernels.packed_linear(weight, bias)
        if made is None:
            return None
        linear, num_bytes = made
        self.count(num_bytes)
        self.note_implementation("computed by a Triton kernel", "the kernel takes its format")
        return linear

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialised tensor for a weight, counted in `num_bytes`."""
        tensor = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        self._tensor_bytes += tensor.numel() * tensor.element_size()
        return tensor

    def tensor(self, name: str, *shape: Size, dtype: torch.dtype | None = None) -> Tensor:
        """As it is in the checkpoint, but never the mapped file itself: that may be replaced under a running server."""
        return self.empty(*map(kept_size, shape), dtype=dtype).copy_(self.read(name, shape))

    def wide_tensor(self, name: str, *shape: int) -> Tensor:
        """`tensor` in at least float32, for the little weights whose rounding would show."""
        return self.tensor(name, *shape, dtype=torch.promote_types(self.dtype, torch.float32))

    def in_sixteen_bits(self, name: str, shape: tuple[Size, ...]) -> Tensor:
        """One tensor in the file's type, if that has 16 bits, else rounded to the type that weights are held in.

        Raises:
            InvalidConfigError: a number is beyond that type.
        """
        stored = self.read(name, shape)
        if stored.is_meta or stored.dtype in (torch.bfloat16, torch.float16):
            return stored
        rounded = stored.to(self.weights_dtype)
        if (is_beyond := bad_numbers(rounded)) is not None and bool(is_beyond):
            dtype = str(self.weights_dtype).removeprefix("torch.")
            raise InvalidConfigError(
                f"--dtype is {dtype}, but tensor {name} holds numbers too large for it; use bfloat16 or float32."
            )
        return rounded

    def table(self, name: str, num_rows: Size, num_columns: int, *, is_head: bool) -> Table:
        """The table of an embedding. `is_head`: its rows are the weight of the output head, too."""
        if not self.memory.holds_sixteen_bits:
            return DenseTable(self.tensor(name, num_rows, num_columns), self.dtype)
        stored = self.in_sixteen_bits(name, (num_rows, num_columns))
        if is_head and (table := self.memory.table_and_head(stored)) is not None:
            return table
        dtype = self.weights_dtype if stored.is_meta else stored.dtype
        weight = torch.empty(stored.shape, dtype=dtype, device=self.device)
        if not is_head:
            self.count(weight.numel() * weight.element_size())
        return DenseTable(weight.copy_(stored), self.dtype)

    def linear(self, parts: Mapping[str, Size], in_features: Size, bias: bool = False) -> Linear:
        """Modules that share their input (name to outputs) side by side, as one weight where their layouts allow."""
        layouts = {name: self._layout_of(name) for name in parts}
        if len(set(layouts.values())) > 1:
            return SideBySideLinear(tuple(self.linear({name: size}, in_features, bias) for name, size in parts.items()))
        layout = next(iter(layouts.values()))
        return layout.linear(self, parts, in_features, self._biases(parts) if bias else None)

    def linear_of(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """The layer of a dense `weight` `[in, out]` that is counted in `num_bytes` already."""
        made = None if self.kernels is None else self.kernels.dense_linear(weight, bias)
        return self.memory.linear(weight, bias) if made is None else made

    def is_output_major(self, num_elements: int) -> bool:
        """Whether a dense linear weight of that size is to lie in memory as `[out, in]`: for a kernel, or by
        `MemoryLayout`."""
        by_kernel = self.kernels is not None and self.kernels.is_output_major
        return by_kernel or self.memory.is_output_major(num_elements)

    def dense_weight(self, module: str, out_features: Size, in_features: Size) -> Tensor:
        """The weight `[out, in]` of a module that is not computed as a linear layer, dequantized where needed."""
        return self._layout_of(module).dense_weight(self, module, out_features, in_features)

    @contextmanager
    def wide_products(self) -> Iterator[None]:
        """Layers that are made meanwhile leave their results as the sums were: of the head, and of ranks' parts."""
        before, self.may_round_products = self.may_round_products, False
        try:
            yield
        finally:
            self.may_round_products = before

    def output_linear(self, name: str, out_features: int, in_features: Cut, bias: bool = False) -> Projection:
        """The linear that ends a block, of those inputs that this rank computes: its output is everybody's sum."""
        linear = self._part_of_sum(name, out_features, in_features, bias)
        return linear if self.ranks.size == 1 else RowParallelLinear(linear.without_bias(), linear.bias, self.ranks)

    def partial_linear(self, name: str, out_features: int, in_features: Cut, bias: bool = False) -> Linear:
        """The same without the sum, for a block that sums several at once. Rank 0 alone adds the bias."""
        linear = self._part_of_sum(name, out_features, in_features, bias)
        return linear if self.ranks.rank == 0 else linear.without_bias()

    def partial_expert_linears(self, experts: Sequence[Mapping[str, Size]], in_features: Size) -> ExpertLinears:
        """`expert_linears` whose outputs are summed over the ranks by the caller."""
        with nullcontext() if self.ranks.size == 1 else self.wide_products():
            return self.expert_linears(experts, in_features)

    def _part_of_sum(self, name: str, out_features: int, in_features: Cut, bias: bool) -> Linear:
        with nullcontext() if self.ranks.size == 1 else self.wide_products():
            return self.linear({name: out_features}, in_features, bias)

    def expert_linears(self, experts: Sequence[Mapping[str, Size]], in_features: Size) -> ExpertLinears:
        """`linear` for each expert: one tensor for all where nothing is quantized."""
        is_quantized = any(self._layout_of(name) != UNQUANTIZED for parts in experts for name in parts)
        if is_quantized or self.memory.holds_sixteen_bits:
            return LinearPerExpert([self.linear(parts, in_features) for parts in experts])
        outputs = sum(map(kept_size, experts[0].values()))
        weights = self.empty(len(experts), kept_size(in_features), outputs)
        for weight, parts in zip(weights, experts, strict=True):
            UNQUANTIZED.fill(self, weight, parts, in_features)
        return DenseExperts(weights)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Side by side along the first dimension."""
        return torch.cat(list(parts))

    def _biases(self, parts: Mapping[str, Size]) -> Tensor:
        biases = [self.read(f"{name}.bias", (size,)).to(self.dtype) for name, size in parts.items()]
        return self.empty(sum(map(kept_size, parts.values()))).copy_(self.joined(biases))


class ExpectedWeights(Weights):
    """No data, only demands.

    Attributes:
        expected: name and shape of every tensor that the checkpoint must hold.
        dtypes: what each may be, as safetensors names it.
        optional: the tensors that may be absent.
        squeezable: those whose dimensions of size one do not count.
        documents: those that hold text of any length.
        reads: name and number of elements of everything that will be read, in order.
    """

    def __init__(
        self,
        numbers: Arithmetic | torch.dtype,
        ranks: Ranks = SINGLE_PROCESS,
        layout_of: LayoutOf | None = None,
    ) -> None:
        """`numbers`: a type is that of all."""
        arithmetic = Arithmetic.of(numbers)
        super().__init__(arithmetic, torch.device("meta"), ranks, planned_layout(arithmetic), layout_of)
        self.expected: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, tuple[str, ...]] = {}
        self.optional: set[str] = set()
        self.squeezable: set[str] = set()
        self.documents: set[str] = set()
        self.reads: list[tuple[str, int]] = []

    def read(self, name: str, shape: tuple[Size, ...], dtypes: tuple[str, ...] = FLOATS) -> Tensor:
        self.expected[name] = tuple(map(total_size, shape))
        self.dtypes[name] = dtypes
        self.reads.append((name, math.prod(map(kept_size, shape))))
        return torch.empty(tuple(map(kept_size, shape)), dtype=self.dtype, device="meta")

    def read_optional(self, name: str, shape: tuple[Size, ...], dtypes: tuple[str, ...] = FLOATS) -> Tensor | None:
        self.read(name, shape, dtypes)
        self.optional.add(name)
        return None

    def read_scale(self, name: str, shape: tuple[Size, ...]) -> Tensor:
        self.squeezable.add(name)
        return self.read(name, shape)

    def read_document(self, name: str) -> dict[str, Any] | None:
        self.expected[name], self.dtypes[name] = (0,), ("U8",)
        self.documents.add(name)
        return None

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        # On meta tensors, torch.cat first imports torch's symbolic shapes: five seconds of every start.
        return torch.empty(sum(len(part) for part in parts), *parts[0].shape[1:], dtype=self.dtype, device="meta")


class LoadedWeights(Weights):
    """Tensors of a checkpoint that was checked before."""

    def __init__(
        self,
        checkpoint: TensorStore,
        numbers: Arithmetic | torch.dtype,
        device: torch.device,
        ranks: Ranks = SINGLE_PROCESS,
        on_read: Callable[[], None] = lambda: None,
        copy_budget_bytes: int = 0,
        layout_of: LayoutOf | None = None,
        kernels: LayerKernels | None = None,
        placement: Placement | None = None,
        *,
        may_round_activations: bool = True,
        code: LoadedCode | None = None,
        product: Bfloat16Product | None = None,
    ) -> None:
        """`on_read`: called after each tensor, whose pages are in memory then. `numbers`, `code`, `product`: as in
        `registry.load_model`.

        `copy_budget_bytes`: what second copies of linear weights may take on a device that uses them. `placement`: by
        default each tensor is checked on the host and copied at once.
        """
        arithmetic = Arithmetic.of(numbers)
        memory = memory_layout_for(device, arithmetic, copy_budget_bytes, code, product)
        super().__init__(arithmetic, device, ranks, memory, layout_of, kernels)
        self.may_round_activations = may_round_activations
        self._checkpoint = checkpoint
        self._on_read = on_read
        self._placement = placement or CheckedOnHost(device)

    def read(self, name: str, shape: tuple[Size, ...], dtypes: tuple[str, ...] = FLOATS) -> Tensor:
        cut = [size for size in shape if isinstance(size, Cut) and not size.is_whole]
        source = (
            self._checkpoint.read_cut(name, [_ranges(size) for size in shape]) if cut else self._checkpoint.read(name)
        )
        placed = self._placement.place(self._checkpoint.label(name), source)
        self._on_read()
        return placed

    def read_optional(self, name: str, shape: tuple[Size, ...], dtypes: tuple[str, ...] = FLOATS) -> Tensor | None:
        return self.read(name, shape, dtypes) if name in self._checkpoint else None

    def read_document(self, name: str) -> dict[str, Any] | None:
        try:
            found = read_strict_json(self._checkpoint.read_document(name))
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise invalid_tensor(name, "holds no JSON object")
        return found

    def read_scale(self, name: str, shape: tuple[Size, ...]) -> Tensor:
        scale = self.read(name, tuple(map(total_size, shape))).reshape(tuple(map(total_size, shape)))
        for dimension, size in enumerate(shape):
            if isinstance(size, Cut):
                kept = [index for one in size.kept for index in one]
                scale = scale.index_select(dimension, torch.tensor(kept, device=scale.device))
        return scale


def _ranges(size: Size) -> tuple[range, ...]:
    return (range(size),) if isinstance(size, int) else size.kept
