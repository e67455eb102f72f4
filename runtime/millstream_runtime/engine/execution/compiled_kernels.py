"""Make sure, when an engine starts, that the kernels it chose start without a compiler; torch where they cannot.

    /opt/kernels has code for the GPU     every kernel of the model is started; one that the image lacks ends the boot
    an entry is damaged                   compiled anew where ptxas is, else torch
    no folder, or one of another Triton   compiled at the first launch where ptxas is, else torch
    another GPU (sm_100), or model        torch

Weights are laid out for the kernels that compute with them. So where a kernel of the layers cannot start, the model is
read again with layers of torch; attention and the sampler are left out alone.

Importing this imports triton: only an engine that chose these kernels does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path

import torch
from triton.runtime.errors import OutOfResources

from millstream_kernels.arguments import KernelArgumentError
from millstream_kernels.prebuilt.cuda_library import CudaError
from millstream_kernels.prebuilt.folder import PrebuiltError
from millstream_kernels.prebuilt.install import install, install_compiling
from millstream_kernels.prebuilt.key import compiled_for, variant_key
from millstream_kernels.prebuilt.launcher import UnsupportedKernelError
from millstream_kernels.prebuilt.lookup import Lookup, MissingKernelError, ptxas_is_there
from millstream_kernels.tuning.candidates import FEW_ROWS, SPLIT_ROWS
from millstream_kernels.variants import VARIANTS
from millstream_runtime.config import RuntimeConfig
from millstream_runtime.engine.execution.forward import Forward
from millstream_runtime.engine.execution.kernel_choice import (
    ATTENTION_PARTS,
    PARTS_OF_LAYERS,
    SAMPLER,
    backend_of,
)
from millstream_runtime.engine.execution.shard import step_of_prompts
from millstream_runtime.engine.execution.shard_config import ShardConfig
from millstream_runtime.engine.kernel_backends import Backend, KernelChoice
from millstream_runtime.engine.kv.kv_cache import KVCache
from millstream_runtime.engine.request import SamplingParams
from millstream_runtime.engine.sampling.sampler import SamplingRow
from millstream_runtime.engine.sampling.triton_sampler import choose_tokens, describe_rows
from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.logs import log
from millstream_runtime.models.layers.decoder import Decoder

FOLDER_VARIABLE, DEFAULT_FOLDER = "MILLSTREAM_KERNELS_DIR", "/opt/kernels"

Choices = tuple[KernelChoice, ...]


class CompiledKernels:
    """What the launches of this process use; one per process."""

    def __init__(self) -> None:
        self._lookup: Lookup | None = None

    def counts(self) -> dict[str, int]:
        """Launches of a variant for the first time by what was found: found, missing, damaged; and compiled."""
        if self._lookup is None:
            return {}
        found = {one.value: count for one, count in self._lookup.counts.items()}
        return found | {"compiled": len(self._lookup.compiled)}

    def prepare(self, capability: int, folder: Path) -> str | None:
        """Decide where this process has its kernels from. Returns why it can have none; None: it can."""
        if compiled_for(capability) is None:
            return f"no kernel was compiled ahead for sm_{capability}"
        if self._lookup is not None:
            return None
        try:
            self._lookup = install(folder, _warn)
        except PrebuiltError as error:
            if not ptxas_is_there():
                return f"{error}, and there is no ptxas to compile them"
            _warn(f"{error}; kernels are compiled when they are first started")
            self._lookup = install_compiling(_warn)
        except CudaError as error:
            return str(error)
        return None


PROCESS = CompiledKernels()


def load_and_start(
    choices: Choices,
    load: Callable[[Choices], tuple[Decoder, Choices]],
    cache: KVCache,
    config: RuntimeConfig,
    shard_config: ShardConfig,
    kernels: CompiledKernels = PROCESS,
) -> tuple[Decoder, Choices]:
    """Load a model for a GPU and start each kernel that its steps need.

    Args:
        load: reads the weights for the layers that were chosen; returns the choices as the weights left them.
        cache: a pool of one block, which is written.

    Returns:
        The model, and `choices` with torch and the reason where kernels cannot start.

    Raises:
        RuntimeFailure: UnsupportedByRuntime, where the image lacks a kernel that it should have for this GPU; or what
            `load` raises.
    """
    major, minor = torch.cuda.get_device_capability(shard_config.device)
    capability = 10 * major + minor
    reason = kernels.prepare(capability, Path(os.environ.get(FOLDER_VARIABLE) or DEFAULT_FOLDER))
    if reason is not None:
        choices = _with_torch(choices, {choice.part for choice in choices}, reason)
        return load(choices)
    loaded: list[tuple[Decoder, Choices]] = []

    def load_and_compute() -> None:
        loaded.append(load(choices))
        _compute_steps(loaded[0][0], cache, config, shard_config, Backend.TORCH)

    reason = _reason_against(load_and_compute, capability)
    if reason is not None:
        _warn(f"{reason}; the weights are read again, for torch")
        loaded.clear()  # its memory, before there are two
        loaded.append(load(_with_torch(choices, PARTS_OF_LAYERS, reason)))
    model, choices = loaded[0]
    backend = backend_of(ATTENTION_PARTS[0], choices)
    if backend is Backend.TRITON:
        reason = _reason_against(lambda: _compute_steps(model, cache, config, shard_config, backend), capability)
        choices = _with_torch(choices, ATTENTION_PARTS, reason)
    if backend_of(SAMPLER, choices) is Backend.TRITON:
        reason = _reason_against(lambda: _draw_token(model, shard_config), capability)
        choices = _with_torch(choices, (SAMPLER,), reason)
    return model, choices


def _with_torch(choices: Choices, parts: Collection[str], reason: str | None) -> Choices:
    """`choices` with torch for those of `parts` that kernels were chosen for. None as the reason: as they are."""
    if reason is None:
        return choices
    return tuple(
        KernelChoice(one.part, Backend.TORCH, reason) if one.part in parts and one.backend is Backend.TRITON else one
        for one in choices
    )


@torch.inference_mode()
def _compute_steps(
    model: Decoder, cache: KVCache, config: RuntimeConfig, shard_config: ShardConfig, backend: Backend
) -> None:
    """A step for each size of tile that products have: one token, a few rows, many, and as many as ever come.

    The output head has tiles too: its rows are those that a token is sampled from.
    """
    forward = Forward(model, cache, shard_config.policy, backend=backend)
    most = config.max_num_batched_tokens
    for num_tokens in sorted({min(most, one) for one in (1, FEW_ROWS + 1, SPLIT_ROWS + 1, most)}):
        step = step_of_prompts(config, num_tokens, shard_config.model_config.max_model_len, forward.num_groups)
        forward.logits(forward.residual(step), [*range(min(num_tokens, SPLIT_ROWS))])


@torch.inference_mode()
def _draw_token(model: Decoder, shard_config: ShardConfig) -> None:
    logits = torch.zeros(1, model.config.vocab_size, device=shard_config.device)
    tokens = choose_tokens(logits, [SamplingRow(SamplingParams(1, temperature=1.0), seed=0, position=0)])
    for one in (logits, logits.to(shard_config.dtype)):
        describe_rows(one, tokens, 1)


def _reason_against(start: Callable[[], None], capability: int) -> str | None:
    """Start kernels. Returns why they cannot start; None: all started."""
    try:
        start()
    except MissingKernelError as error:
        code = compiled_for(capability)
        table = {variant_key(one, code) for one in VARIANTS if code in one.capabilities} if code else set()
        if error.key not in table:
            return str(error)
        raise RuntimeFailure(
            FailureReason.UNSUPPORTED_BY_RUNTIME,
            f"The image lacks a compiled kernel: {error}. Build the image anew, with `make images`.",
        ) from None
    except (PrebuiltError, CudaError, UnsupportedKernelError, OutOfResources, KernelArgumentError) as error:
        return str(error)
    return None


def _warn(problem: str) -> None:
    log.warning("kernel_problem", problem=problem)
