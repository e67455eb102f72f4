"""Plan -> BootConfig, spec -> LiveConfig: the one place where API fields become those of the runtime.

The operator renders both halves into ConfigMaps (`config_maps.py`); `millstream serve FILE` starts the engine with
`boot_config(plan, model_root=…)` on a laptop. Only the model root and the HTTP address may differ.
"""

from __future__ import annotations

import posixpath
from dataclasses import replace

from millstream_operator.api import duration
from millstream_operator.api.spec import Accelerator, AcceleratorType, LLMDeploymentSpec, LogLevel, Runtime, Warmup
from millstream_operator.planning.plan import Plan
from millstream_operator.rendering.api_keys import api_keys_path
from millstream_runtime import config
from millstream_runtime.config import (
    CAPABILITIES,
    AcceptanceRule,
    BootConfig,
    Device,
    DType,
    GovernorMode,
    KVCacheDType,
    LiveConfig,
    SpeculationMethod,
    WeightFormat,
)

IMAGE_MODEL_ROOT = "/models"
RUNTIME_PORT = 8000
DEFAULT_HEARTBEAT_INTERVAL = "30s"

_DEVICES = {AcceleratorType.GPU: Device.CUDA, AcceleratorType.CPU: Device.CPU}
# AUTO, which stands in every boot.json of earlier plans: as the runtime chooses it on a GPU, and float32 on a CPU.
_CPU_DTYPES = {"BF16": DType.BFLOAT16, "FP16": DType.FLOAT16}
_KV_CACHE_DTYPES = {stored.method: stored for stored in KVCacheDType}


def boot_config(
    plan: Plan,
    *,
    model_root: str = IMAGE_MODEL_ROOT,
    host: str = "0.0.0.0",  # noqa: S104 - a pod is reached through its Service
    port: int = RUNTIME_PORT,
) -> BootConfig:
    """Return the configuration that the runtime reads once, when it starts.

    `model_root` is the folder that a relative `spec.model.source.local.path` starts from.

    Raises:
        InvalidConfigError: never for a plan that the planner made; the bounds of the API are the runtime's own.
    """
    engine, method = plan.engine, _speculation_method(plan)
    boot = BootConfig(
        model=posixpath.join(model_root, plan.model_path),
        served_model_name=plan.served_name,
        device=_DEVICES[plan.accelerator],
        dtype=_dtype(plan),
        quantization=_weight_format(plan),
        tensor_parallel_size=plan.tensor_parallel_size,
        max_model_len=engine.max_model_len_tokens,
        planned_model_len=plan.planned_model_len_tokens,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_num_seqs=engine.max_num_seqs,
        enable_prefix_caching=engine.prefix_caching,
        enable_hybrid_kv_cache_manager=engine.hybrid_kv_cache_manager,
        kv_cache_dtype=_KV_CACHE_DTYPES[plan.kv_cache],
        speculation_method=method,
        max_draft_tokens=plan.speculation.max_draft_tokens if method is not SpeculationMethod.DISABLED else None,
        draft_model=_draft_model(plan, model_root) if method.has_weights else None,
        speculation_acceptance=_acceptance(plan, method),
        drain_timeout_seconds=plan.drain_timeout_seconds,
        api_keys_file=api_keys_path(plan.api_keys),
        host=host,
        port=port,
    )
    if engine.gpu_memory_utilization_percent is None:
        return boot
    return replace(boot, gpu_memory_utilization_percent=engine.gpu_memory_utilization_percent)


def _dtype(plan: Plan) -> DType:
    if plan.engine.dtype is not None:
        return DType(plan.engine.dtype)
    on_cpu = plan.accelerator is AcceleratorType.CPU
    return _CPU_DTYPES.get(plan.dtype or "", DType.AUTO) if on_cpu else DType.AUTO


def _weight_format(plan: Plan) -> WeightFormat | None:
    """None for a method that no checkpoint is stored by (RTN): such a plan is shown and not applied."""
    return next((one for one in WeightFormat if one == plan.asked_quantization), None)


def _speculation_method(plan: Plan) -> SpeculationMethod:
    """None that this runtime lacks on the plan's device: such a plan is shown and not applied."""
    on_cpu = plan.accelerator is AcceleratorType.CPU
    usable = CAPABILITIES.cpu_speculation_methods if on_cpu else CAPABILITIES.speculation_methods
    method = SpeculationMethod(plan.speculation.method if plan.speculation.method in usable else "Disabled")
    if method.has_weights and plan.draft is None:
        return SpeculationMethod.DISABLED  # the draft was not inspected: such a plan is shown and not applied
    return method


def _acceptance(plan: Plan, method: SpeculationMethod) -> AcceptanceRule:
    """Identity where the spec says nothing: then boot.json does not name it."""
    return AcceptanceRule(plan.speculation.acceptance if method is SpeculationMethod.DRAFT_MODEL else "Identity")


def _draft_model(plan: Plan, model_root: str) -> str | None:
    return posixpath.join(model_root, plan.draft.path) if plan.draft is not None else None


def live_config(spec: LLMDeploymentSpec, probe_key_digests: tuple[str, ...] = ()) -> LiveConfig:
    """Return the configuration that the runtime applies while it serves.

    `probe_key_digests`: of the keys with which the operator's probe may ask, where a request needs a key.
    """
    warmup, runtime = spec.warmup or Warmup(), spec.runtime or Runtime()
    return LiveConfig(
        heartbeat_interval_seconds=duration.seconds(warmup.heartbeat_interval or DEFAULT_HEARTBEAT_INTERVAL),
        log_level=config.LogLevel((runtime.log_level or LogLevel.INFO).lower()),
        probe_key_digests=probe_key_digests,
        target_itl_milliseconds=_target_itl(spec),
        speculation_governor=_governor(spec),
        allowed_origins=tuple((spec.service.allowed_origins if spec.service is not None else None) or ()),
    )


def _governor(spec: LLMDeploymentSpec) -> GovernorMode:
    """Enforce where the spec says nothing: then live.json does not name it."""
    governor = spec.speculation.governor if spec.speculation is not None else None
    return GovernorMode((governor.mode if governor is not None else None) or GovernorMode.ENFORCE)


def _target_itl(spec: LLMDeploymentSpec) -> int | None:
    """Milliseconds that a step with prompts may last; None: the runtime's own default.

    Where the TTFT alone is promised, a step may last as long as a first token may take: prompts that keep the promise
    then enter whole. That is never less than a CPU's default. A GPU has no bound by default, and needs none here.
    """
    if spec.objectives is None:
        return None
    if spec.objectives.itl is not None:
        return min(duration.milliseconds(spec.objectives.itl.p95), config.MAX_TARGET_ITL_MILLISECONDS)
    if spec.objectives.ttft is None or (spec.accelerator or Accelerator()).type is not AcceleratorType.CPU:
        return None
    longest = min(duration.milliseconds(spec.objectives.ttft.p95), config.MAX_TARGET_ITL_MILLISECONDS)
    return longest if longest > config.DEFAULT_CPU_TARGET_ITL_MILLISECONDS else None
