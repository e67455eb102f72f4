"""Enumerate the placements that are worth evaluating.

kinds of nodes × tensor × pipeline × format -> Candidate
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.inventory.node_kinds import Inventory, Stock
from millstream_operator.planning.calibration import NO_CALIBRATION, NO_CORRECTION, Calibration, Correction
from millstream_operator.planning.choices.quantization import Formats
from millstream_operator.planning.plan import SpeculationPlan
from millstream_operator.planning.resolved_spec import ResolvedSpec
from millstream_operator.planning.sizing.tensor_parallel import sizes, tensor_parallel_problem
from millstream_operator.planning.sizing.weights import weight_format

MAX_PIPELINE = 16


@dataclass(frozen=True, slots=True)
class Question:
    """Everything that candidates are judged by."""

    resolved: ResolvedSpec
    shape: ModelShape
    formats: Formats
    speculation: SpeculationPlan
    draft_shape: ModelShape | None
    draft_method: str | None
    inventory: Inventory
    max_tensor: int  # that the planner may choose by itself; a size that the spec asks for is planned in any case
    max_pipeline: int
    calibration: Calibration = NO_CALIBRATION  # of this model with this image
    is_grouped: bool = False  # groups of layers have block tables of their own (`kv_layout`)
    only_free: bool = False  # the inventory is what is free, and there are GPUs that are taken


@dataclass(frozen=True, slots=True)
class Candidate:
    stock: Stock
    tensor: int
    pipeline: int
    method: str
    kv_cache: str
    dtype: str = "BF16"  # of weights that no method quantises

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline

    @property
    def over_pcie(self) -> bool:
        """Whether a layer is shared over PCIe: an all-reduce is as slow as the slowest link of its group."""
        return self.tensor > 1 and not (self.stock.part.has_nvlink and self.tensor <= self.stock.island_size)

    @property
    def summary(self) -> str:
        pipeline = f" PP{self.pipeline}" if self.pipeline > 1 else ""
        return f"{self.gpus}×{self.stock.part.name} TP{self.tensor}{pipeline} {self.weights}"

    @property
    def weights(self) -> str:
        """The format of the weights in words: `AWQ`, or the dtype where nothing is quantised."""
        return self.dtype if self.method == "None" else self.method


def correction_for(question: Question, candidate: Candidate) -> Correction:
    """What was measured of this placement; stages are not measured yet."""
    if candidate.pipeline > 1:
        return NO_CORRECTION
    return question.calibration.correction(candidate.stock.part.name, candidate.method, candidate.tensor)


def candidates(question: Question, *, pipelines: bool) -> Iterator[Candidate]:
    """Placements worth a look. `pipelines`: those of more than one stage, for when one stage cannot do it."""
    shape = question.shape
    stages = [size for size in _pipelines(question, pipelines) if size <= shape.num_layers]
    for stock in question.inventory.stocks():
        for method in question.formats.methods:
            for tensor in _tensors(question, stock, method, pipelines):
                groups = stock.groups(tensor)
                for pipeline in stages:
                    if pipeline == 1 or groups >= pipeline:
                        yield Candidate(stock, tensor, pipeline, method, question.formats.kv_cache, shape.dtype)


def _tensors(question: Question, stock: Stock, method: str, pipelines: bool) -> list[int]:
    """What the spec says, or what divides the heads; with stages, the largest that is valid in one island.

    Without stages the GPUs of one node may share a layer, over PCIe where an island is smaller: at its real cost that
    is often the only way. Between stages little is sent, so those keep to islands.
    """
    resolved, shape = question.resolved, question.shape
    if resolved.tensor is not None:
        return [resolved.tensor]
    if resolved.one_gpu:
        return [1]
    if not pipelines:
        return sizes(shape, min(stock.gpus, question.max_tensor))
    found = sizes(shape, min(stock.island_size, question.max_tensor))
    group = weight_format(shape, method).group_size
    return [size for size in found if tensor_parallel_problem(shape, size, group) is None][-1:]


def _pipelines(question: Question, pipelines: bool) -> list[int]:
    if question.resolved.pipeline is not None:
        return [question.resolved.pipeline]
    return list(range(2, min(MAX_PIPELINE, question.max_pipeline) + 1)) if pipelines else [1]
