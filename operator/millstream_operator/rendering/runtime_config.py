"""Plan -> RuntimeConfig: the one place where the words of the API become flags of the runtime.

The operator renders `runtime_config(plan).to_args()` into the pod; `millstream serve FILE` starts the engine with
`runtime_config(plan, model_root=…)` on a laptop. Only where the model lies and where HTTP listens may differ.
"""

from __future__ import annotations

import posixpath
from dataclasses import replace

from millstream_operator.api.spec import AcceleratorType
from millstream_operator.planning.plan import Plan
from millstream_runtime.config import Device, RuntimeConfig

IMAGE_MODEL_ROOT = "/models"
RUNTIME_PORT = 8000

_DEVICES = {AcceleratorType.GPU: Device.CUDA, AcceleratorType.CPU: Device.CPU}


def runtime_config(
    plan: Plan,
    *,
    model_root: str = IMAGE_MODEL_ROOT,
    host: str = "0.0.0.0",  # noqa: S104 - a pod is reached through its Service
    port: int = RUNTIME_PORT,
) -> RuntimeConfig:
    """The runtime's configuration for a plan.

    `model_root` is the folder that a relative `spec.model.source.local.path` starts from.

    Raises:
        InvalidConfigError: never for a plan that `planner.plan` made; the bounds of the API are the runtime's own.
    """
    engine = plan.engine
    config = RuntimeConfig(
        model=posixpath.join(model_root, plan.model_path),
        served_model_name=plan.served_name,
        device=_DEVICES[plan.accelerator],
        tensor_parallel_size=plan.tensor_parallel_size,
        max_model_len=engine.max_model_len_tokens,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_num_seqs=engine.max_num_seqs,
        enable_prefix_caching=engine.prefix_caching,
        heartbeat_interval_seconds=plan.heartbeat_interval_seconds,
        drain_timeout_seconds=plan.drain_timeout_seconds,
        host=host,
        port=port,
    )
    if engine.gpu_memory_utilization_percent is None:
        return config
    return replace(config, gpu_memory_utilization_percent=engine.gpu_memory_utilization_percent)
