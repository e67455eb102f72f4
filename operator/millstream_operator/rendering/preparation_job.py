"""The Jobs of a model that is quantized in the cluster, or judged before it serves.

    QUANTIZE   millstream quantize /models/<source> --method=awq --out=/models/quantized/awq-0123456789
    JUDGE      millstream quality /models/<base> /models/<candidate> --data=<dataset>

One Job is one attempt. Sources are downloaded by init containers, as for the pods that serve, and pinned to the same
revision. `quantize` goes on where an attempt before it was stopped, and takes a folder that is complete as it is. The
answer is the pod's termination message.
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.model import PersistentVolumeClaimSource
from millstream_operator.api.optimization import Dataset, KVCacheMethod, QualityGate, decimal
from millstream_operator.api.pod_template import ResourceRequirements
from millstream_operator.catalog.inspected_model import InspectedModel
from millstream_operator.planning.made_model import digest, made_method, named_source
from millstream_operator.planning.model_path import BASE_FOLDER, base_path, model_path
from millstream_operator.planning.plan import GPU_RESOURCE, Plan, ResourcePlan
from millstream_operator.planning.sizing.cpu_container import CPU_CORES_LIMIT
from millstream_operator.rendering.container_resources import container_resources
from millstream_operator.rendering.job_pod import job_container, job_pod_spec, overlay_of
from millstream_operator.rendering.model_source import (
    ModelFiles,
    SourceFiles,
    made_files,
    mounted,
    source_files,
    together,
)
from millstream_operator.rendering.names import (
    ATTEMPT_LABEL,
    JUDGE_CONTAINER,
    PREPARATION_LABEL,
    PREPARER,
    QUANTIZE_CONTAINER,
    ROLE_LABEL,
    TUNE_CONTAINER,
    child,
    common_labels,
)
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.pod_template import CONTAINER_SECURITY, container_env
from millstream_operator.rendering.runtime_config import IMAGE_MODEL_ROOT
from millstream_runtime.job_memory.judging import judging_bytes

DEADLINE_SECONDS = 48 * 3600  # GPTQ of a 70B model takes hours on a CPU
TTL_SECONDS = 24 * 3600  # the operator deletes a Job that it has read; this is for the time when there is no operator
DATASETS_FOLDER = "/var/run/millstream"
DATASET_VOLUME = "dataset"
CHECK_DATA_VARIABLE = "MILLSTREAM_CHECK_DATA"
HELD_OUT_VOLUME = "held-out"  # what the gate judges by, in the Job that quantizes
MIB, GIB = 1 << 20, 1 << 30
PROCESS_BYTES = 1 * GIB  # Python, torch and the tokenized documents
CALIBRATION_BYTES = 1 * GIB  # activations that `millstream quantize` keeps in memory; the rest is on disk


class StepKind(StrEnum):
    QUANTIZE = "quantize"
    JUDGE = "judge"
    TUNE = "tune"  # a draft, while the model serves: `tuning_job.py`

    @property
    def container(self) -> str:
        return CONTAINERS[self]


CONTAINERS = {
    StepKind.QUANTIZE: QUANTIZE_CONTAINER,
    StepKind.JUDGE: JUDGE_CONTAINER,
    StepKind.TUNE: TUNE_CONTAINER,
}


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the preparation, named by what its result follows from."""

    kind: StepKind
    key: str


def steps_of(owner: LLMDeployment, path: str, revision: str | None) -> tuple[Step, ...]:
    """Return what must be done before pods load `path`, in order. `revision`: what the source was resolved to."""
    found: list[Step] = []
    if made_method(owner.spec) is not None:
        found.append(Step(StepKind.QUANTIZE, path.rpartition("-")[2]))
    gate = gate_of(owner)
    if gate is not None:
        named = {
            "candidate": path,
            "source": named_source(owner, owner.spec.model.source, revision),
            "base": named_source(owner, gate.base, None) if gate.base is not None else None,
            "gate": gate.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"mode", "base"}),
        }
        if (kv_cache := _quantized_kv_cache(owner)) is not None:  # absent: the names of verdicts on record stay
            named["kvCache"] = kv_cache.value
        found.append(Step(StepKind.JUDGE, digest(named)))
    return tuple(found)


def gate_of(owner: LLMDeployment) -> QualityGate | None:
    return owner.spec.quantization.quality_gate if owner.spec.quantization is not None else None


def _quantized_kv_cache(owner: LLMDeployment) -> KVCacheMethod | None:
    """Return the format of 8-bit keys and values; None where they are stored as the model computes."""
    asked = owner.spec.quantization.kv_cache if owner.spec.quantization is not None else None
    return asked if asked in (KVCacheMethod.FP8, KVCacheMethod.INT8) else None


def preparation_job(
    owner: LLMDeployment,
    step: Step,
    plan: Plan,
    source: InspectedModel | None,
    defaults: PodDefaults,
    attempt: int = 1,
) -> dict[str, Any]:
    """Return one attempt at a step. `source`: what was inspected of `spec.model.source`."""
    return step_job(owner, PREPARER, step, _pod_spec(owner, step, plan, source, defaults), defaults, attempt)


def step_job(
    owner: LLMDeployment, role: str, step: Step, pod_spec: dict[str, Any], defaults: PodDefaults, attempt: int
) -> dict[str, Any]:
    """Return the Job that runs a pod of this spec once, named by its content."""
    labels = {ROLE_LABEL: role, PREPARATION_LABEL: step.key, ATTEMPT_LABEL: str(attempt)}
    template = {
        "metadata": {"labels": {**defaults.labels, **common_labels(owner.name), **labels}},
        "spec": pod_spec,
    }
    job = child(owner, "batch/v1", "Job", name=f"{owner.name}-{digest(template)}")
    job["metadata"]["labels"] |= labels
    return job | {
        "spec": {
            "backoffLimit": 0,  # the operator tries again, with the reason in the status meanwhile
            "activeDeadlineSeconds": DEADLINE_SECONDS,
            "ttlSecondsAfterFinished": TTL_SECONDS,
            "template": template,
        }
    }


def _pod_spec(
    owner: LLMDeployment, step: Step, plan: Plan, source: InspectedModel | None, defaults: PodDefaults
) -> dict[str, Any]:
    quantizes = step.kind is StepKind.QUANTIZE
    args, files = _quantize(owner, plan, source) if quantizes else _judge(owner, plan, source)
    resources = container_resources(_resources(plan, source, step.kind), given_resources(owner))
    gate, checked = gate_of(owner), None
    if quantizes and gate is not None:  # before hours of quantizing, not after them
        checked, held_out = dataset_file(gate.dataset, HELD_OUT_VOLUME)
        files = together(files, held_out)
    container = job_container(owner, step.kind.container, plan.runtime_image, args, resources, files.mounts)
    if checked is not None:
        # No flag: a model whose cache is lost is made again by the image that its plan names, which may be older.
        container["env"] = [*container["env"], {"name": CHECK_DATA_VARIABLE, "value": checked}]
    return job_pod_spec(owner, defaults, container, files, near_replicas=owner.spec.model.cache is not None)


def _quantize(owner: LLMDeployment, plan: Plan, source: InspectedModel | None) -> tuple[list[str], ModelFiles]:
    assert owner.spec.quantization is not None  # noqa: S101 - the step says so
    assert owner.spec.quantization.calibration is not None  # noqa: S101
    dataset, data = dataset_file(owner.spec.quantization.calibration)
    path, files = _source(owner, plan, source)
    args = [
        "quantize",
        path,
        f"--method={(made_method(owner.spec) or '').lower()}",
        f"--calibration={dataset}",
        f"--out={in_models(plan.model_path)}",
        "--keep-made",
        "--discard-other-work",
        "--no-quality",
        "--device=cpu",
    ]
    return args, together(together(files, made_files(owner, read_only=False)), data)


def _judge(owner: LLMDeployment, plan: Plan, source: InspectedModel | None) -> tuple[list[str], ModelFiles]:
    gate = gate_of(owner)
    assert gate is not None  # noqa: S101 - the step says so
    dataset, data = dataset_file(gate.dataset)
    path, files = _source(owner, plan, source)
    base, candidate = path, in_models(plan.model_path)
    if gate.base is not None:
        base = base_path(owner.spec, gate.base)
        wanted = SourceFiles(gate.base, base, None, None, BASE_FOLDER)
        base = in_models(base)
        files = together(files, source_files(owner, plan.runtime_image, wanted, download_container(owner)))
    else:
        files = together(files, made_files(owner))
    # Worst answers side by side are generated token by token, and the record keeps figures alone.
    flags = [f"--data={dataset}", *_limits(gate), "--worst=0", "--device=cpu"]
    if (kv_cache := _quantized_kv_cache(owner)) is not None:
        flags.append(f"--candidate-kv-cache-dtype={kv_cache.value.lower()}")
    return ["quality", base, candidate, *flags], together(files, data)


def _limits(gate: QualityGate) -> list[str]:
    """The limits of the spec's own; an absent one is that of `millstream quality`."""
    fractions = {
        "max-mean-kl": gate.max_mean_kl,
        "max-p99-kl": gate.max_p99_kl,
        "max-perplexity-ratio": gate.max_perplexity_ratio,
    }
    percents = {
        "min-top1-agreement-percent": gate.min_top1_agreement_percent,
        "max-flip-percent": gate.max_flip_percent,
    }
    return [f"--{name}={decimal(value):.12g}" for name, value in fractions.items() if value is not None] + [
        f"--{name}={value}" for name, value in percents.items() if value is not None
    ]


def _source(owner: LLMDeployment, plan: Plan, source: InspectedModel | None) -> tuple[str, ModelFiles]:
    """Return the folder of `spec.model.source` in the pod, and how it gets there."""
    path = model_path(owner.spec, plan.model_revision)
    size_bytes = source.checkpoint_bytes if source is not None else None
    wanted = SourceFiles(owner.spec.model.source, path, plan.model_revision, size_bytes)
    return in_models(path), source_files(owner, plan.runtime_image, wanted, download_container(owner))


def download_container(owner: LLMDeployment) -> dict[str, Any]:
    """Return what the container of a download has in common with that of the runtime."""
    return {"env": container_env(overlay_of(owner)), "securityContext": dict(CONTAINER_SECURITY)}


def in_models(path: str) -> str:
    """Return the path in a pod of a folder below the model root."""
    return posixpath.join(IMAGE_MODEL_ROOT, path)


def dataset_file(dataset: Dataset, volume_name: str = DATASET_VOLUME) -> tuple[str, ModelFiles]:
    """Return the file in the pod, and how it gets there. `volume_name`: of the volume and its folder.

    A missing ConfigMap is optional for the kubelet: it would keep the pod waiting without a message, while the command
    names the file, whose path names ConfigMap and key.
    """
    root = f"{DATASETS_FOLDER}/{volume_name}"
    if (claim := dataset.persistent_volume_claim) is not None:
        folder = f"{root}/{claim.claim_name}"
        files = mounted(PersistentVolumeClaimSource(claim_name=claim.claim_name), volume_name, folder)
        return f"{folder}/{claim.path.strip('/')}", files
    reference = dataset.config_map_ref
    assert reference is not None  # noqa: S101 - a rule of the API
    path = f"{reference.name}/{reference.key}"
    items = [{"key": reference.key, "path": path}]
    volume = {"name": volume_name, "configMap": {"name": reference.name, "items": items, "optional": True}}
    mount = {"name": volume_name, "mountPath": root, "readOnly": True}
    return f"{root}/{path}", ModelFiles([volume], [mount])


def given_resources(owner: LLMDeployment) -> ResourceRequirements | None:
    """Return what spec.podTemplate says of the runtime's resources."""
    overlay = overlay_of(owner)
    return overlay.resources if overlay is not None else None


def _resources(plan: Plan, source: InspectedModel | None, kind: StepKind) -> ResourcePlan:
    """Of one pod: memory for one layer in float32, with its statistics or with both models' output heads.

    The disk is that of the runtime's own container. Without an inspection the plan's memory has to do.
    """
    planned = plan.resources
    if source is None:
        return without_gpus(planned)
    shape, parameters = source.shape, source.shape.parameters
    tables_bytes = 4 * (parameters.embedding + parameters.head)
    layer_bytes = (4 * parameters.total - tables_bytes) // shape.num_layers
    widest = max((shape.hidden_size, *shape.intermediate_sizes))
    if kind is StepKind.JUDGE:
        needed_bytes = PROCESS_BYTES + judging_bytes(
            hidden_size=shape.hidden_size,
            intermediate_size=widest,
            layer_bytes=layer_bytes,
            head_bytes=4 * (parameters.head or parameters.embedding),
            embedding_bytes=4 * parameters.embedding,
        )
    else:
        hessians_bytes = 4 * (widest**2 + 3 * shape.hidden_size**2)
        needed_bytes = PROCESS_BYTES + CALIBRATION_BYTES + tables_bytes + 2 * (layer_bytes + hessians_bytes)
    return memory_resources(planned, needed_bytes)


def memory_resources(planned: ResourcePlan, needed_bytes: int) -> ResourcePlan:
    """Return the planned resources without GPUs, and with memory for so much, twice as the limit."""
    memory = f"{-(-needed_bytes // (256 * MIB)) * 256}Mi"
    double = f"{-(-2 * needed_bytes // (256 * MIB)) * 256}Mi"
    plain = without_gpus(planned)
    return ResourcePlan({**plain.requests, "memory": memory}, {**plain.limits, "memory": double})


def without_gpus(planned: ResourcePlan) -> ResourcePlan:
    """Return the resources of a Job, which computes on CPUs: not those that the plan has per GPU.

    Which GPUs are free changes while the Job runs, and another Job would begin in its place.
    """
    if GPU_RESOURCE not in planned.limits:
        return planned
    limits = {name: value for name, value in planned.limits.items() if name != GPU_RESOURCE}
    return ResourcePlan({**planned.requests, "cpu": "1"}, {**limits, "cpu": str(CPU_CORES_LIMIT)})
