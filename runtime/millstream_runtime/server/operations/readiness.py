"""The body of `/ready`, which the operator's `boot_report.py` and people read. Pure.

Unknown values are left out: `progress` and `eta_seconds` are there while the weights load, `kernels` once they are
chosen, `linears` where weights are quantized, `memory`, `threads` and `step_times` once they are measured,
`api_keys_problem` while some key of the file cannot be used, `kv_cache_dtype` where keys and values are quantized,
`speculation` where drafts are proposed, `prompt_pace` once prompts have shared a step whose time is bounded, `text`
once the tokenizer is loaded: what was chosen from which file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millstream_runtime.boot import BootSnapshot, Phase
from millstream_runtime.boot_eta import eta_seconds
from millstream_runtime.config import KVCacheDType, RuntimeConfig, SpeculationMethod
from millstream_runtime.distributed.topology import Topology
from millstream_runtime.engine.kernel_backends import KernelChoice, LinearChoice
from millstream_runtime.engine.kv.pool_size import MemoryUse
from millstream_runtime.engine.request import PromptPace, SpeculationStats
from millstream_runtime.engine.step_times import TimedStep
from millstream_runtime.engine_process.messages import StepThreads
from millstream_runtime.server.operations.pace_gauges import pace_json
from millstream_runtime.server.operations.topology_view import topology_json
from millstream_runtime.tokenizing.folder.choices import TextChoices


def ready_body(
    config: RuntimeConfig,
    boot: BootSnapshot,
    *,
    topology: Topology | None,
    memory: MemoryUse | None,
    kernels: Sequence[KernelChoice] = (),
    linears: Sequence[LinearChoice] = (),
    threads: Sequence[StepThreads] = (),
    step_times: Sequence[TimedStep] = (),
    speculation: SpeculationStats | None = None,
    prompt_pace: PromptPace | None = None,
    now_seconds: float,
    api_keys_problem: str = "",
    text: TextChoices | None = None,
) -> dict[str, Any]:
    """Build the body; `now_seconds` is of the monotonic clock."""
    body: dict[str, Any] = {
        "ready": boot.phase is Phase.READY,
        "phase": boot.phase.value,
        "model": config.served_model_name,
        "config_hash": config.config_hash(),
        "message": boot.message,
        "topology": topology_json(topology),
        "boot_seconds": {phase.value: round(seconds, 3) for phase, seconds in boot.seconds.items()},
        "boot_bytes": {phase.value: num_bytes for phase, num_bytes in boot.num_bytes.items()},
    }
    if boot.weights is not None and (rate := boot.weights.bytes_per_second) is not None:
        body["weights_bytes_per_second"] = round(rate)
    if boot.weights is not None and boot.phase is Phase.LOADING_WEIGHTS:
        body["progress"] = {"done_bytes": boot.weights.done_bytes, "total_bytes": boot.weights.total_bytes}
    if (eta := eta_seconds(boot, now_seconds)) is not None:
        body["eta_seconds"] = round(eta, 1)
    if memory is not None:
        body["memory"] = memory.measured()
    if config.kv_cache_dtype is not KVCacheDType.AUTO:
        body["kv_cache_dtype"] = config.kv_cache_dtype.value
    if config.speculation_method is not SpeculationMethod.DISABLED:
        named = {"method": config.speculation_method.value, "maxDraftTokens": config.draft_tokens}
        body["speculation"] = named | (_measured(speculation) if speculation is not None else {})
    body |= {"prompt_pace": pace_json(prompt_pace)} if prompt_pace is not None else {}
    if kernels:
        body["kernels"] = {one.part: {"backend": one.backend.value, "reason": one.reason} for one in kernels}
    if linears:
        body["linears"] = [_linear(one) for one in linears]
    if threads:
        body["threads"] = [{"most_tokens": one.most_tokens, "threads": one.threads} for one in threads]
    if api_keys_problem:
        body["api_keys_problem"] = api_keys_problem
    body |= {"text": text.measured()} if text is not None else {}
    if step_times:
        body["step_times"] = [one.measured() for one in step_times]
    return body


def _linear(choice: LinearChoice) -> dict[str, Any]:
    found: dict[str, Any] = {"computed_by": choice.computed_by, "layers": choice.layers, "reason": choice.reason}
    return found | ({"rounded_while_loading": True} if choice.rounded_while_loading else {})


def _measured(stats: SpeculationStats) -> dict[str, Any]:
    """Totals since the engine started, which the operator reads, and what the governor chose last."""
    found: dict[str, Any] = {
        "checks": stats.num_checks,
        "draftTokens": stats.num_draft_tokens,
        "acceptedTokens": stats.num_accepted_tokens,
        "skipped": {reason: count for reason, count in stats.skipped.items() if count},
    }
    if (governor := stats.governor) is not None:
        found |= {"governor": governor.mode, "draftLength": round(governor.chosen_length, 2)}
    return found
