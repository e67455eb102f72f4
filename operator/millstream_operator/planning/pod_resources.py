"""Requests and limits of a replica's runtime container. Pure arithmetic, in bytes and in whole cores.

                     request                                     limit
    cpu (GPU)        1 per rank                                  4 per rank, and 4 for the server
    cpu (CPU)        250m                                        16
    memory (GPU)     server, shm, per rank: process, staging     request and page cache, at least twice the request
    memory (CPU)     process, weights, step, at least 1Gi        4Gi
    ephemeral disk   logs and download                           logs, /tmp and download

Every container has a limit of each, because a namespace whose ResourceQuota counts limits refuses a pod without. The
CPU limits are far above what is used: a container that reaches its limit is throttled, and the rank that waits delays
all others. Memory limits leave room for the page cache, because weights are read from mapped files.
"""

from __future__ import annotations

from dataclasses import dataclass

from millstream_operator.api.model import ModelSource
from millstream_operator.api.spec import LLMDeploymentSpec
from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.planning.choices.kv_layout import planned_cpu_memory
from millstream_operator.planning.choices.rounded_weights import as_loaded
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.plan import GPU_RESOURCE, PlanReason, ResourcePlan
from millstream_operator.planning.requires import draft_source, usable_draft_shape
from millstream_operator.planning.sizing.cpu_container import CPU_CORES_LIMIT, CPU_MEMORY_LIMIT, memory_limit_bytes

MIB, GIB = 1 << 20, 1 << 30

SERVER_BYTES = 1 * GIB  # the HTTP process: Python, tokenizer, requests
RANK_BYTES = 3 * GIB  # one rank: Python, torch, the host side of the CUDA context, pinned buffers
STAGING_LIMIT_BYTES = 2 * GIB  # of one rank: what it has read and not yet copied to its GPU
PAGE_CACHE_LIMIT_BYTES = 8 * GIB  # per rank, in the limit alone
# NCCL moves what GPUs cannot read from each other through /dev/shm, of which a container has 64 MiB by default: too
# little for two of its ranks. Its pages count against the memory limit, so the limit and the request include it.
SHARED_MEMORY_BYTES_PER_RANK = 512 * MIB
GPU_CORES_PER_RANK, SERVER_CORES = 4, 4  # of the limit
CPU_REQUEST_BYTES = 1 * GIB

TMP_BYTES = 2 * GIB  # sizeLimit of /tmp: caches of compiled kernels
LOG_BYTES = 256 * MIB  # the kubelet rotates a container's log: 50 MiB by default
SPARE_DOWNLOAD_BYTES = 1 * GIB  # besides the weights: tokenizer, configuration, file system overhead
# A download of unknown size: a limit that holds the largest published models, and a request that fits most nodes.
UNKNOWN_DOWNLOAD_LIMIT_BYTES, UNKNOWN_DOWNLOAD_REQUEST_BYTES = 1024 * GIB, 20 * GIB


@dataclass(frozen=True, slots=True)
class Download:
    """What a pod downloads to its node's disk. `limit_bytes` is the size limit of the volume."""

    request_bytes: int = 0
    limit_bytes: int = 0


NO_DOWNLOAD = Download()


def replica_resources(spec: LLMDeploymentSpec, facts: Facts, gpus: int, tensor: int) -> tuple[ResourcePlan, PlanReason]:
    """Return the resources of the runtime container of a replica over `gpus` GPUs (0: on a CPU), and why."""
    download = _replica_download(spec, facts)
    if gpus:
        return _on_gpus(gpus, tensor, facts.checkpoint_bytes or _unquantized_bytes(facts.shape), download)
    return _on_a_cpu(_used_on_cpu(spec, facts), memory_limit_bytes(spec), download)


def download_of(source: ModelSource, checkpoint_bytes: int | None) -> Download:
    """Return what a pod downloads for itself of one source: nothing where the files are there."""
    if source.hugging_face is None and source.image is None:
        return NO_DOWNLOAD
    if not checkpoint_bytes:
        return Download(UNKNOWN_DOWNLOAD_REQUEST_BYTES, UNKNOWN_DOWNLOAD_LIMIT_BYTES)
    copies = 2 if source.image is not None else 1  # a layer lies there packed and unpacked
    total_bytes = copies * checkpoint_bytes + SPARE_DOWNLOAD_BYTES
    return Download(total_bytes, total_bytes)


def shared_memory_bytes(tensor: int) -> int:
    """Return the size of /dev/shm for the ranks of one replica; 0 for a single rank."""
    return tensor * SHARED_MEMORY_BYTES_PER_RANK if tensor > 1 else 0


def _replica_download(spec: LLMDeploymentSpec, facts: Facts) -> Download:
    """The model and its draft; nothing where a cache keeps them."""
    if spec.model.cache is not None:
        return NO_DOWNLOAD
    model, draft = download_of(spec.model.source, facts.checkpoint_bytes), NO_DOWNLOAD
    if (source := draft_source(spec)) is not None:
        draft = download_of(source, facts.draft_checkpoint_bytes)
    return Download(model.request_bytes + draft.request_bytes, model.limit_bytes + draft.limit_bytes)


def _on_gpus(
    gpus: int, tensor: int, checkpoint_bytes: int | None, download: Download
) -> tuple[ResourcePlan, PlanReason]:
    """One rank per GPU. `checkpoint_bytes` None: not known."""
    staged_bytes = min(-(-checkpoint_bytes // gpus) if checkpoint_bytes else STAGING_LIMIT_BYTES, STAGING_LIMIT_BYTES)
    request_bytes = SERVER_BYTES + gpus * (RANK_BYTES + staged_bytes) + shared_memory_bytes(tensor)
    cache_bytes = min(checkpoint_bytes or gpus * PAGE_CACHE_LIMIT_BYTES, gpus * PAGE_CACHE_LIMIT_BYTES)
    requests = {"cpu": str(gpus), "memory": _rounded(request_bytes)}
    limits = {
        GPU_RESOURCE: str(gpus),
        "cpu": str(SERVER_CORES + GPU_CORES_PER_RANK * gpus),
        "memory": _rounded(max(2 * request_bytes, request_bytes + cache_bytes)),
    }
    why = "The GPUs, and enough memory to stage the weights on their way to them."
    return _with_disk(requests, limits, download), PlanReason("resources", why)


def _on_a_cpu(used_bytes: int | None, limit_bytes: int, download: Download) -> tuple[ResourcePlan, PlanReason]:
    """Requests are small, so that a rollout's extra pod fits next to the old one."""
    request_bytes = min(max(CPU_REQUEST_BYTES, used_bytes or 0), limit_bytes)
    requests = {"cpu": "250m", "memory": _rounded(request_bytes)}
    limits = {"cpu": str(CPU_CORES_LIMIT), "memory": CPU_MEMORY_LIMIT}
    why = "For a small model: the KV cache takes its share of the memory limit."
    return _with_disk(requests, limits, download), PlanReason("resources", why)


def _with_disk(requests: dict[str, str], limits: dict[str, str], download: Download) -> ResourcePlan:
    return ResourcePlan(
        requests | {"ephemeral-storage": _rounded(LOG_BYTES + download.request_bytes)},
        limits | {"ephemeral-storage": _rounded(LOG_BYTES + TMP_BYTES + download.limit_bytes)},
    )


def _unquantized_bytes(shape: ModelShape | None) -> int | None:
    return shape.parameters.total * shape.weight_bytes if shape is not None else None


def _used_on_cpu(spec: LLMDeploymentSpec, facts: Facts) -> int | None:
    """Return the bytes of the process, all weights and the largest step; None where the model is not known."""
    if facts.shape is None:
        return None
    shape, draft = as_loaded(spec, facts.shape, facts.runtime), usable_draft_shape(spec, facts)
    ledger = planned_cpu_memory(spec, shape, facts, draft).ledger
    weights_bytes = ledger.weights_bytes + ledger.embeddings_bytes + ledger.draft_weights_bytes
    return ledger.context_bytes + ledger.activations_bytes + weights_bytes


def _rounded(amount_bytes: int) -> str:
    """Rounded up to 256 MiB."""
    return f"{-(-amount_bytes // (256 * MIB)) * 256}Mi"
