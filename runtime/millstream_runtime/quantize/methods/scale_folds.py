"""Where a scale per input of linear modules can be moved into what makes that input, without changing the layer.

    norm:  norm.weight[c] /= s[c]        and the columns c of every module that reads the norm's output *= s[c]
    rows:  up_proj.weight[c, :] /= s[c]  and the columns c of down_proj *= s[c]

AWQ and SmoothQuant need to know which norm or module feeds which modules. That is not written down a second time here:
it is found by experiment on the model's own code. A candidate is changed in one place; it feeds a module if that
module's input changes in just that place. Then a random fold must leave the layer's output as it was.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from millstream_runtime.quantize.layers.layer_calibration import LayerSample
from millstream_runtime.quantize.model_outline import LayerOutline, LinearGroup

Modules = tuple[str, ...]  # that read one input
Run = Callable[[dict[str, Tensor]], LayerSample]  # a layer with these tensors on a few tokens
SAME, NEARLY = 1e-4, 2e-3  # relative: other inputs that did not change; outputs before and after a fold
KEPT_OFFSETS = (0.0, 1.0)  # checkpoints store norm weights as they are, or minus one (Gemma)
GROWTH = 4.0
SEED_SCALES = 7


@dataclass(frozen=True, slots=True)
class ScaleFold:
    """Names are within a layer (`input_layernorm.weight`), so that layers of one kind share their folds.

    Attributes:
        producer: the tensor of a norm, or the weight of a linear module whose last rows are divided.
        offset: what the norm's stored weight lacks; None: `producer` is a linear module.
        consumers: groups of modules that read the scaled input.
        routers: further matrices that read it, whose columns are multiplied.
    """

    producer: str
    offset: float | None
    consumers: tuple[tuple[str, ...], ...]
    routers: tuple[str, ...] = ()

    @property
    def changed(self) -> tuple[str, ...]:
        """Tensors that change and are not weights of linear modules; some may not exist."""
        own = self.producer if self.offset is not None else f"{self.producer.removesuffix('.weight')}.bias"
        return (own, *self.routers)

    def apply(self, layer: LayerOutline, tensors: dict[str, Tensor], scales: Tensor, stored: torch.dtype) -> Tensor:
        """Move `scales` `[in]` in place of `tensors`.

        Returns the scales that the consumers' columns were multiplied by: those that a norm in its stored dtype gives.
        """
        name = layer.prefix + self.producer
        if self.offset is not None:
            old = tensors[name] + self.offset
            tensors[name] = (old / scales - self.offset).to(stored).float()
            new = tensors[name] + self.offset
            scales = torch.where((old == 0) | (new == 0), torch.ones_like(scales), old / new)
            tensors[name] = torch.where((old == 0) | (new == 0), old - self.offset, tensors[name])
        else:
            for part in (name, f"{name.removesuffix('.weight')}.bias"):
                if part in tensors:
                    tensors[part] = tensors[part].clone()
                    rows = tensors[part][-len(scales) :]
                    rows /= scales.unsqueeze(1) if rows.dim() == 2 else scales
        weights = [f"{module}.weight" for group in self.consumers for module in group]
        for weight in (*weights, *self.routers):
            tensors[layer.prefix + weight] = tensors[layer.prefix + weight] * scales
        return scales


def find_folds(
    layer: LayerOutline, groups: Sequence[LinearGroup], tensors: dict[str, Tensor], run: Run
) -> list[ScaleFold]:
    """Return the folds of a layer, in the order in which the layer computes the modules that read the scaled inputs.

    Args:
        groups: the modules whose inputs shall be scaled; a fold that scales others too is left out.
    """
    base = run(dict(tensors))
    found: list[ScaleFold] = []
    for name, tensor in tensors.items():
        if tensor.dim() == 1 and not name.endswith(".bias"):
            found += _norm_fold(layer, groups, tensors, run, base, name)
    covered = {group for fold in found for group in fold.consumers}
    for group in groups:
        if _inner(layer, group) not in covered and group.modules in base.inputs:
            found += _rows_fold(layer, groups, tensors, run, base, group)
    order = [_inner(layer, group) for group in groups]
    return sorted(found, key=lambda fold: min(order.index(one) for one in fold.consumers))


def _norm_fold(
    layer: LayerOutline, groups: Sequence[LinearGroup], tensors: dict[str, Tensor], run: Run, base: LayerSample,
    name: str,
) -> list[ScaleFold]:  # fmt: skip
    size = len(tensors[name])
    routers = [
        one
        for one, tensor in tensors.items()
        if tensor.dim() == 2 and tensor.shape[1] == size and one.removesuffix(".weight") not in _modules(layer)
    ]
    wanted = {group.modules for group in groups}
    for offset in KEPT_OFFSETS:
        readers = _readers(tensors, run, base, name, offset, routers)
        if not readers or not wanted.issuperset(readers):
            continue
        consumers, inner = _alike(layer, groups, readers), name.removeprefix(layer.prefix)
        for scaled in (sorted(one.removeprefix(layer.prefix) for one in routers), []):
            fold = ScaleFold(inner, offset, consumers, tuple(scaled))
            if _keeps_output(layer, tensors, run, base, fold, size):
                return [fold]
    return []


def _readers(
    tensors: dict[str, Tensor], run: Run, base: LayerSample, name: str, offset: float, routers: Sequence[str]
) -> list[Modules]:
    """The modules whose inputs grow in one channel alone, by GROWTH, as the norm's weight does. Routers are made to
    read what they read before: a token that goes to another expert would look like a change of everything."""
    found = []
    runs: dict[int, LayerSample] = {}
    for modules, x in base.inputs.items():
        if x.shape[1] != len(tensors[name]):
            continue
        channel = int(x.abs().mean(0).argmax())
        if channel not in runs:
            weight = tensors[name][channel]
            changed = {**tensors, name: _with(tensors[name], channel, (weight + offset) * GROWTH - offset)}
            for router in routers:
                changed[router] = tensors[router].clone()
                changed[router][:, channel] /= GROWTH
            runs[channel] = run(changed)
        factor = _factor(x, runs[channel].inputs.get(modules), channel)
        if factor is not None and abs(factor - GROWTH) <= GROWTH * NEARLY:
            found.append(modules)
    return found


def _rows_fold(
    layer: LayerOutline, groups: Sequence[LinearGroup], tensors: dict[str, Tensor], run: Run, base: LayerSample,
    group: LinearGroup,
) -> list[ScaleFold]:  # fmt: skip
    """A fold of modules that no norm feeds, from a module of the same block whose last rows make their inputs."""
    parent = group.modules[0].rpartition(".")[0]
    x = base.inputs[group.modules]
    channel = int(x.abs().mean(0).argmax())
    for other in groups:
        for module in other.modules:
            name = f"{module}.weight"
            rows = len(tensors[name])
            if other is group or module.rpartition(".")[0] != parent or rows < group.num_inputs:
                continue
            row = rows - group.num_inputs + channel
            changed = {**tensors, name: _with(tensors[name], row, tensors[name][row] * GROWTH)}
            if f"{module}.bias" in tensors:
                bias = tensors[f"{module}.bias"]
                changed[f"{module}.bias"] = _with(bias, row, bias[row] * GROWTH)
            factor = _factor(x, run(changed).inputs.get(group.modules), channel)
            if factor is None or abs(factor - GROWTH) > GROWTH * NEARLY:
                continue
            fold = ScaleFold(name.removeprefix(layer.prefix), None, (_inner(layer, group),))
            if _keeps_output(layer, tensors, run, base, fold, group.num_inputs):
                return [fold]
    return []


def _factor(before: Tensor, after: Tensor | None, channel: int) -> float | None:
    """By what one channel of an input grew; None where another channel changed too, or other tokens came."""
    if after is None or before.shape != after.shape:
        return None
    change = (after - before).abs()
    others = torch.ones(before.shape[1], dtype=torch.bool, device=before.device)
    others[channel] = False
    if change[:, others].max() > SAME * before.abs().max():
        return None
    old, new = before[:, channel].double(), after[:, channel].double()
    factor = float((old @ new) / (old @ old))
    return factor if (new - factor * old).abs().max() <= NEARLY * new.abs().max() else None


def _keeps_output(
    layer: LayerOutline, tensors: dict[str, Tensor], run: Run, base: LayerSample, fold: ScaleFold, size: int
) -> bool:
    generator = torch.Generator().manual_seed(SEED_SCALES)
    scales = torch.exp2(2 * torch.rand(size, generator=generator) - 1).to(base.output.device)
    folded = dict(tensors)
    fold.apply(layer, folded, scales, torch.float32)
    output = run(folded).output
    return bool((output - base.output).abs().max() <= NEARLY * base.output.abs().max())


def _alike(
    layer: LayerOutline, groups: Sequence[LinearGroup], readers: Sequence[tuple[str, ...]]
) -> tuple[tuple[str, ...], ...]:
    """The groups that differ from a reader in numbers alone: experts that no token of the sample chose."""
    kinds = {_kind(modules) for modules in readers}
    return tuple(_inner(layer, one) for one in groups if _kind(one.modules) in kinds)


def _kind(modules: tuple[str, ...]) -> str:
    return re.sub(r"\d+", "#", " ".join(modules))


def _inner(layer: LayerOutline, group: LinearGroup) -> tuple[str, ...]:
    return tuple(module.removeprefix(layer.prefix) for module in group.modules)


def _modules(layer: LayerOutline) -> set[str]:
    return {module for group in layer.groups for module in group.modules}


def _with(tensor: Tensor, index: int, value: Tensor) -> Tensor:
    changed = tensor.clone()
    changed[index] = value
    return changed
