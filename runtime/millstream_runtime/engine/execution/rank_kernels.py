"""The kernels of all ranks: rank 0 chooses, each rank starts them, and what one cannot start none uses.

rank 0 ── LoadShard(choices) ──▶ each rank loads its share for them and starts them, without the others
       ◀── ShardLoaded(choices, torch and the reason where a kernel cannot start) ──
       ── LoadShard(choices) ──▶ again, where weights lie for kernels that another rank lacks
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from millstream_runtime.config import RuntimeConfig
from millstream_runtime.engine.execution import shard
from millstream_runtime.engine.execution.kernel_choice import (
    PARTS_OF_LAYERS,
    after_loading,
    backend_of,
    compiled_layers,
    layer_kernels,
)
from millstream_runtime.engine.execution.shard_config import ShardConfig
from millstream_runtime.engine.kernel_backends import Backend, KernelChoice
from millstream_runtime.models.layers.decoder import Decoder
from millstream_runtime.models.linear.tensor_parallel import Ranks
from millstream_runtime.models.registry import OnRead

Choices = tuple[KernelChoice, ...]


class LoadedShard(NamedTuple):
    """`kernels`: what computes its parts. `lookups`: what was found of the kernels that were compiled ahead."""

    model: Decoder
    kernels: Choices
    lookups: Mapping[str, int]


def load(
    config: RuntimeConfig,
    shard_config: ShardConfig,
    ranks: Ranks,
    kernels: Choices,
    on_read: OnRead | None = None,
) -> LoadedShard:
    """Load this rank's weights for the kernels that were chosen, and on a GPU start these. Nothing is exchanged.

    Raises:
        RuntimeFailure: as `shard.load`; UnsupportedByRuntime, the image lacks a kernel that it should have.
    """

    def load_for(choices: Choices) -> tuple[Decoder, Choices]:
        layers = layer_kernels(choices, shard_config.device, shard_config.dtype) or compiled_layers(
            choices, shard_config.policy.compiled_code
        )
        model = shard.load(config, shard_config, ranks, on_read, layers)
        return model, after_loading(choices, layers, waits_for_device=model.waits_for_device)

    if shard_config.device.type != "cuda" or all(choice.backend is Backend.TORCH for choice in kernels):
        return LoadedShard(*load_for(kernels), {})
    from millstream_runtime.engine.execution import compiled_kernels

    probe = shard.make_kv_cache(config, shard_config, 1, ranks)
    with ranks.alone():  # a rank whose kernel does not start would keep the others waiting
        model, kernels = compiled_kernels.load_and_start(kernels, load_for, probe, config, shard_config)
    return LoadedShard(model, kernels, compiled_kernels.PROCESS.counts())


def agree(by_rank: Sequence[Choices]) -> Choices:
    """Return the choices that hold for all: those of rank 0, the first, with torch for what another rank cannot start.

    The others may know fewer parts: rank 0 alone samples.
    """
    first, *others = by_rank
    agreed = list(first)
    for rank, choices in enumerate(others, start=1):
        refused = {one.part: one.reason for one in choices if one.backend is Backend.TORCH}
        agreed = [
            KernelChoice(one.part, Backend.TORCH, f"rank {rank}: {refused[one.part]}")
            if one.backend is Backend.TRITON and one.part in refused
            else one
            for one in agreed
        ]
    return tuple(agreed)


def lies_for(agreed: Choices, loaded: Choices) -> bool:
    """Whether weights that were loaded for some choices lie as others ask for."""
    return all(
        backend_of(one.part, loaded) is one.backend
        for one in agreed
        if one.part in PARTS_OF_LAYERS and any(one.part == other.part for other in loaded)
    )
