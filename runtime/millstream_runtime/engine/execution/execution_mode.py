"""How an engine executes steps on its device: eagerly or by graphs, one after another or overlapped.

    CPU                          eager, one after another
    CUDA                         graphs unless --enforce-eager or a layer waits for the device; overlapped

Whether a layer waits is known once the model is loaded: experts by torch ask how many rows each expert has, those by
our kernels do not.

The choice changes no token. Tests pass their own, and so run on a CPU what otherwise only a GPU would.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from millstream_runtime.config import RuntimeConfig
from millstream_runtime.engine.execution.graphs.recorders import CudaRecorder, Recorder
from millstream_runtime.engine.kernel_backends import Backend
from millstream_runtime.logs import log
from millstream_runtime.models.layers.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Execution:
    """`recorder`: None is eager. `overlapped`: step N + 1 is launched before the tokens of step N are read.
    `backend`: of the kernels; None: as `kernel_choice` says for the device."""

    recorder: Recorder | None = None
    overlapped: bool = False
    backend: Backend | None = None


def choose(config: RuntimeConfig, device: torch.device) -> Execution:
    """Return how a configuration is executed on a device, by one rank or several."""
    if device.type != "cuda":
        return Execution()
    if config.enforce_eager:
        log.info("graphs_off", reason="--enforce-eager")
        return Execution(overlapped=True)
    return Execution(CudaRecorder(device), overlapped=True)


def after_loading(execution: Execution, model: Decoder) -> Execution:
    """The execution that was chosen, without graphs where no graph can hold the model's pass.

    The shares of all ranks have the same shapes and kernels, so rank 0's model speaks for all.
    """
    if execution.recorder is None or not model.waits_for_device:
        return execution
    log.info("graphs_off", reason="its experts wait for the device once a layer")
    return replace(execution, recorder=None)
