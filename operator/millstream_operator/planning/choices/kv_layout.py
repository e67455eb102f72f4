"""Whether groups of layers have block tables of their own, and what that means for a replica on a CPU."""

from __future__ import annotations

from millstream_operator.api.optimization import KVCacheMethod
from millstream_operator.api.spec import Accelerator, AcceleratorType, Engine, LLMDeploymentSpec, Runtime, Switch
from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.planning.choices.speculation import choose_speculation
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.resolved_spec import batching
from millstream_operator.planning.sizing.cpu_memory import CpuMemory, cpu_memory
from millstream_runtime.config import Capabilities

TABLE_PER_GROUP = "TablePerGroup"


def is_grouped(spec: LLMDeploymentSpec, runtime: Capabilities, *, has_draft: bool = False) -> bool | None:
    """Return what the runtime will do with a model that mixes windows; None: what saves memory (`kv_layout`).

    A runtime does so by itself on a CPU alone, and not beside a draft model, whose pool has a block for each of theirs.
    Of an image that the spec names this is not known, so its replicas are planned as if they kept every block: such a
    plan holds for either.
    """
    asked = (spec.engine or Engine()).hybrid_kv_cache_manager
    if TABLE_PER_GROUP not in runtime.kv_layouts or asked is Switch.DISABLED:
        return False
    if asked is Switch.ENABLED:
        return True
    on_cpu = (spec.accelerator or Accelerator()).type is AcceleratorType.CPU
    return None if on_cpu and not has_draft and (spec.runtime or Runtime()).image is None else False


def hybrid_flag(spec: LLMDeploymentSpec, runtime: Capabilities) -> bool | None:
    """Return what is rendered: what the spec asks for, and nothing where it asks for nothing or there is no choice."""
    asked = (spec.engine or Engine()).hybrid_kv_cache_manager
    if asked is Switch.DISABLED and TABLE_PER_GROUP not in runtime.kv_layouts:
        return None
    return asked is Switch.ENABLED if asked is not None else None


def planned_cpu_memory(
    spec: LLMDeploymentSpec, shape: ModelShape, facts: Facts, draft: ModelShape | None = None
) -> CpuMemory:
    """Return the ledger and the KV pool of one replica on a CPU, with the engine limits that it gets.

    `shape`: the model as it is loaded; `draft`: the draft model that the replica loads.
    """
    max_num_batched_tokens, max_num_seqs, _, _ = batching(spec, on_cpu=True)
    asked = spec.quantization.kv_cache if spec.quantization is not None else None
    return cpu_memory(
        spec,
        shape,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        is_grouped=is_grouped(spec, facts.runtime, has_draft=draft is not None),
        kv_cache="None" if asked in (None, KVCacheMethod.AUTO) else asked.value,
        draft=draft,
        draft_tokens=choose_speculation(spec, facts.choosable).plan.max_draft_tokens,
    )
