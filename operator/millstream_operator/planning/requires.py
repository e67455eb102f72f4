"""What a plan needs and the runtime (or the operator) does not have: `quantization=AWQ`, `tensorParallelSize=4`, …

A plan with requirements is shown and never applied: a field must not be accepted and then ignored.
"""

from __future__ import annotations

from collections.abc import Sequence

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.model import ModelSource
from millstream_operator.api.optimization import HEAD_METHODS, AcceptanceRule, DraftTuning, SpeculationMethod
from millstream_operator.api.spec import Accelerator, AcceleratorType, Engine, LLMDeploymentSpec, Switch
from millstream_operator.api.workload import Workload
from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.planning.choices.cpu_dtype import draft_as_held, missing_dtype
from millstream_operator.planning.choices.kv_layout import TABLE_PER_GROUP
from millstream_operator.planning.choices.quantization import NEEDS_QUANTIZED_CHECKPOINT
from millstream_operator.planning.choices.rounded_weights import is_judged
from millstream_operator.planning.facts import Facts
from millstream_runtime.config import Capabilities

INVENTORY = "inventory"
_MEANINGS = {
    "modelFamily": "models of family {}",
    "source": "a model from {}",
    "quantization": "{} weights",
    "dtype": "weights in {} on a CPU (leave engine.dtype out)",
    "kvCache": "a KV cache in {}",
    "kvLayout": "a KV cache with a {} for layers with a sliding window",
    "speculation": "speculation by {}",
    "draftHead": "the {} head that drafts (name its source as speculation.draftModel)",
    "headAcceptance": "acceptance {} of the drafts of a head (leave speculation.acceptance out, or name a draft model)",
    "gpuAcceptance": "acceptance {} on a GPU (leave speculation.acceptance out, or set accelerator.type to CPU)",
    "headTuning": "tuning of {} heads (leave speculation.tuning out, or name a draft model)",
    "tensorParallelSize": "{} GPUs that share a layer",
    "pipelineParallelSize": "{} groups of GPUs that share the layers",
    "checkpointFormat": "reading {} of this checkpoint",
    "quantizedCheckpoint": "a quantized checkpoint (name one as model.source, or set quantization.calibration)",
    INVENTORY: "knowing the cluster's GPUs, without which objectives, budget and load cannot be kept",
    "cpuPrediction": "predictions for a CPU, without which objectives cannot be kept",
    "modelShape": "knowing the model's config.json, without which objectives, budget and load cannot be kept",
    "configMapRef": "reading model.configMapRef",
}
# Where a value says more than its name.
_HEADS_ON_A_GPU = (
    "speculation by {} on a GPU (set speculation.method to DraftModel or NGram, or accelerator.type to CPU)"
)
# The runtime loads these formats, and makes none of them while it loads; FP8 it makes where no gate has to judge it.
_MADE_WHILE_LOADING = (
    "making {0} weights of a 16-bit model (name a checkpoint in {0} as model.source, or set quantization.calibration)"
)
_MEANINGS_OF_VALUES = {f"speculation={method}": _HEADS_ON_A_GPU for method in HEAD_METHODS} | {
    f"quantization={method}": _MADE_WHILE_LOADING for method in ("FP8", "INT8", "NF4")
}
_MEANINGS_OF_VALUES["quantization=RTN"] = (
    "{} weights, which no checkpoint names (leave quantization.method out to serve it as it is stored, or set "
    "quantization.calibration)"
)


def source_kind(source: ModelSource) -> str:
    """Return the name of the source in the API."""
    kinds = {
        "local": source.local,
        "huggingFace": source.hugging_face,
        "image": source.image,
        "persistentVolumeClaim": source.persistent_volume_claim,
    }
    return next(kind for kind, given in kinds.items() if given is not None)


def draft_source(spec: LLMDeploymentSpec) -> ModelSource | None:
    """Return the source of the draft model; None where the spec names none."""
    speculation = spec.speculation
    return speculation.draft_model.source if speculation is not None and speculation.draft_model is not None else None


def head_method(spec: LLMDeploymentSpec) -> str | None:
    """Return the method whose draft head `speculation.draftModel` is; None where it is a model, or there is none."""
    method = spec.speculation.method if spec.speculation is not None else None
    return method.value if method in HEAD_METHODS else None


def tuning_of(spec: LLMDeploymentSpec) -> DraftTuning | None:
    """Return how the cluster tunes the draft model; None where it is served as it is."""
    return spec.speculation.tuning if spec.speculation is not None else None


def usable_draft(spec: LLMDeploymentSpec, runtime: Capabilities) -> ModelSource | None:
    """Return the source of the draft model where the runtime drafts with it on the spec's device; else None.

    A spec whose draft the runtime cannot use is refused, so nothing of it may reach the cluster.
    """
    method = spec.speculation.method if spec.speculation is not None else None
    named = method if method not in (None, SpeculationMethod.AUTO) else SpeculationMethod.DRAFT_MODEL
    return draft_source(spec) if named in _speculation_methods(spec, runtime) else None


def usable_draft_shape(spec: LLMDeploymentSpec, facts: Facts) -> ModelShape | None:
    """Return the shape of the draft model as the pods hold it; None where there is none, or it is not known."""
    if facts.draft_shape is None or usable_draft(spec, facts.runtime) is None:
        return None
    return draft_as_held(spec, facts.shape, facts.draft_shape, facts.runtime)


def _speculation_methods(spec: LLMDeploymentSpec, runtime: Capabilities) -> frozenset[str]:
    on_cpu = (spec.accelerator or Accelerator()).type is AcceleratorType.CPU
    return runtime.cpu_speculation_methods if on_cpu else runtime.speculation_methods


def requirements(
    deployment: LLMDeployment,
    runtime: Capabilities,
    *,
    method: str,
    kv_cache: str,
    speculation: str,
    tensor: int,
    pipeline: int,
    shape: ModelShape | None,
    draft: ModelShape | None = None,
) -> tuple[str, ...]:
    """Return everything that is missing, each a word or `word=value`, in a fixed order.

    `draft`: of the draft model that the pods load, where it is known.
    """
    sources = [source for source in (deployment.spec.model.source, draft_source(deployment.spec)) if source is not None]
    found = [f"source={kind}" for kind in dict.fromkeys(map(source_kind, sources)) if kind not in runtime.sources]
    if shape is not None and shape.family not in runtime.model_families:
        found.append(f"modelFamily={shape.family}")
    on_cpu = (deployment.spec.accelerator or Accelerator()).type is AcceleratorType.CPU
    found += _missing_for_weights(method, shape, runtime, on_cpu=on_cpu, is_judged=is_judged(deployment.spec))
    if kv_cache not in (runtime.cpu_kv_cache_methods if on_cpu else runtime.kv_cache_methods):
        found.append(f"kvCache={kv_cache}")
    if (deployment.spec.engine or Engine()).hybrid_kv_cache_manager is Switch.ENABLED and (
        TABLE_PER_GROUP not in runtime.kv_layouts
    ):
        found.append(f"kvLayout={TABLE_PER_GROUP}")
    if (dtype := missing_dtype(deployment.spec, runtime)) is not None:
        found.append(f"dtype={dtype}")
    found += missing_for_speculation(deployment.spec, runtime, speculation)
    found += _missing_for_draft(draft, runtime, on_cpu=on_cpu) if draft is not None else ()
    if tensor > runtime.max_tensor_parallel_size:
        found.append(f"tensorParallelSize={tensor}")
    if pipeline > runtime.max_pipeline_parallel_size:
        found.append(f"pipelineParallelSize={pipeline}")
    return tuple(dict.fromkeys(found))


def _missing_for_weights(
    method: str, shape: ModelShape | None, runtime: Capabilities, *, on_cpu: bool, is_judged: bool
) -> list[str]:
    """Return what is missing to load weights by the plan's `method`. What is stored decides, however it is called.

    `is_judged`: a quality gate has to judge them, which needs a folder that holds them.
    """
    found: list[str] = []
    stored = shape.quantization if shape is not None else None
    is_stored = stored is not None and stored.may_be(method)
    if stored is not None and is_stored:
        method = stored.method
    if method in NEEDS_QUANTIZED_CHECKPOINT and shape is not None and not is_stored:
        found.append("quantizedCheckpoint")
    if method not in (runtime.cpu_quantization_methods if on_cpu else runtime.quantization_methods) or (
        shape is not None
        and not is_stored
        and method not in ("None", *NEEDS_QUANTIZED_CHECKPOINT)
        and method not in runtime.online_quantization_methods
        and (is_judged or method not in runtime.rounded_quantization_methods)
    ):
        found.append(f"quantization={method}")
    elif stored is not None and stored.problem:
        found.append(f"checkpointFormat={stored.problem}")
    return found


def missing_for_speculation(spec: LLMDeploymentSpec, runtime: Capabilities, method: str) -> list[str]:
    """Return what is missing to speculate by `method`, of the runtime and of the spec; see `requirements`."""
    if method not in _speculation_methods(spec, runtime):
        return [f"speculation={method}"]
    wanted = spec.speculation
    if wanted is None:
        return []
    if method not in HEAD_METHODS:
        on_cpu = (spec.accelerator or Accelerator()).type is AcceleratorType.CPU
        is_drawn = wanted.acceptance is AcceptanceRule.DISTRIBUTION
        return [f"gpuAcceptance={wanted.acceptance}"] if is_drawn and not on_cpu else []
    found = [f"draftHead={method}"] if wanted.draft_model is None else []
    if wanted.acceptance is AcceptanceRule.DISTRIBUTION:
        found.append(f"headAcceptance={wanted.acceptance}")
    return [*found, f"headTuning={method}"] if wanted.tuning is not None else found


def _missing_for_draft(draft: ModelShape, runtime: Capabilities, *, on_cpu: bool) -> list[str]:
    """What the runtime lacks to load a draft model as it is stored. A head was checked when it was inspected."""
    if draft.draft_head is not None:
        return []
    found = [f"modelFamily={draft.family}"] if draft.family not in runtime.model_families else []
    if draft.quantization is None:
        return found
    if draft.quantization.method not in (runtime.cpu_quantization_methods if on_cpu else runtime.quantization_methods):
        found.append(f"quantization={draft.quantization.method}")
    elif draft.quantization.problem:
        found.append(f"checkpointFormat={draft.quantization.problem}")
    return found


def unknown_facts(spec: LLMDeploymentSpec, facts: Facts) -> tuple[str, ...]:
    """Return the facts that the spec's objectives, budget or load need and that are not known."""
    found = []
    if (spec.accelerator or Accelerator()).type is AcceleratorType.CPU:
        # A load needs no fact there: it is not predicted, and the plan says so. The API's rules refuse a budget.
        found += ["cpuPrediction"] if spec.objectives is not None else []
        found += ["configMapRef"] if spec.model.config_map_ref is not None and facts.shape is None else []
        return tuple(found)
    workload = spec.workload or Workload()
    numbers = (workload.input_tokens, workload.output_tokens, workload.requests_per_minute, workload.concurrency)
    if spec.objectives is not None or spec.budget is not None or any(number is not None for number in numbers):
        found.append(INVENTORY if facts.inventory is None else "modelShape")
    if spec.model.config_map_ref is not None and facts.shape is None:
        found.append("configMapRef")
    return tuple(found)


def refusal(requires: Sequence[str]) -> str | None:
    """Return one sentence that names each missing capability; None when the plan can be applied."""
    if not requires:
        return None
    words = []
    for requirement in requires:
        name, _, value = requirement.partition("=")
        meaning = _MEANINGS_OF_VALUES.get(requirement, _MEANINGS[name])
        words.append(f"{meaning.format(value)} ({requirement})")
    return f"This version cannot run the plan: it lacks {'; '.join(words)}."
