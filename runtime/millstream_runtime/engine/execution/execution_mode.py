"""How an engine executes steps on its device: eagerly or by graphs, one after another or overlapped.

    CPU                          eager, one after another
    CUDA                         graphs unless --enforce-eager or the model waits for the device; overlapped

The choice changes no token. Tests pass their own, and so run on a CPU what otherwise only a GPU would.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from millstream_runtime.config import RuntimeConfig
from millstream_runtime.engine.execution.graphs.recorders import CudaRecorder, Recorder
from millstream_runtime.engine.kernel_backends import Backend
from millstream_runtime.logs import log
from millstream_runtime.models.config.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Execution:
    """`recorder`: None is eager. `overlapped`: step N + 1 is launched before the tokens of step N are read.
    `backend`: of the kernels; None: as `kernel_choice` says for the device."""

    recorder: Recorder | None = None
    overlapped: bool = False
    backend: Backend | None = None


def choose(config: RuntimeConfig, model_config: ModelConfig, device: torch.device) -> Execution:
    """Return how a configuration is executed on a device, by one rank or several."""
    if device.type != "cuda":
        return Execution()
    if config.enforce_eager or model_config.waits_for_device:
        reason = "--enforce-eager" if config.enforce_eager else "its experts wait for the device once a layer"
        log.info("graphs_off", reason=reason)
        return Execution(overlapped=True)
    return Execution(CudaRecorder(device), overlapped=True)
