"""Every reason that a condition can carry. Stable: machines and runbooks depend on them (docs/reasons.md)."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    # Healthy.
    READY = "Ready"
    PLANNED = "Planned"
    SCHEDULED = "Scheduled"
    WARMED_UP = "WarmedUp"
    ANSWERING = "Answering"
    AVAILABLE = "Available"
    DRAFT_TUNED = "DraftTuned"

    # In progress.
    INSPECTING = "Inspecting"
    QUANTIZING = "Quantizing"
    JUDGING_QUALITY = "JudgingQuality"
    TUNING_DRAFT = "TuningDraft"
    STARTING = "Starting"
    ROLLING_OUT = "RollingOut"
    SCALING = "Scaling"
    WARMING_UP = "WarmingUp"
    ASKING_MODEL = "AskingModel"
    NO_REPLICA_AVAILABLE = "NoReplicaAvailable"
    SCALED_TO_ZERO = "ScaledToZero"
    TERMINATING = "Terminating"

    # The spec, or the cluster's refusal of it.
    INVALID_SPEC = "InvalidSpec"
    UNKNOWN_FIELDS = "UnknownFields"
    INFEASIBLE = "Infeasible"
    BUDGET_EXCEEDED = "BudgetExceeded"
    NAME_CONFLICT = "NameConflict"
    ROLLOUT_PAUSED = "RolloutPaused"
    APPLY_REFUSED = "ApplyRefused"
    ADMISSION_DENIED = "AdmissionDenied"
    ADMISSION_UNAVAILABLE = "AdmissionUnavailable"
    QUOTA_EXCEEDED = "QuotaExceeded"

    # The model that a new revision would serve.
    PREPARATION_FAILED = "PreparationFailed"
    QUALITY_GATE_FAILED = "QualityGateFailed"
    DRAFT_NOT_BETTER = "DraftNotBetter"

    # The pods.
    UNSCHEDULABLE = "Unschedulable"
    INSUFFICIENT_GPU = "InsufficientGPU"
    VOLUME_PENDING = "VolumePending"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    CONTAINER_CONFIG_INVALID = "ContainerConfigInvalid"
    DOWNLOAD_UNAUTHORIZED = "DownloadUnauthorized"
    DOWNLOAD_FAILED = "DownloadFailed"
    DISK_FULL = "DiskFull"
    CHECKPOINT_INVALID = "CheckpointInvalid"
    INVALID_CONFIG = "InvalidConfig"
    API_KEYS_INVALID = "APIKeysInvalid"
    OUT_OF_MEMORY = "OutOfMemory"
    NCCL_FAILED = "NCCLFailed"
    PORT_IN_USE = "PortInUse"
    UNSUPPORTED_BY_RUNTIME = "UnsupportedByRuntime"
    WARMUP_STALLED = "WarmupStalled"
    RUNTIME_CRASHED = "RuntimeCrashed"
    CONTAINER_CRASHED = "ContainerCrashed"
    EVICTED = "Evicted"
    NODE_LOST = "NodeLost"
    PROGRESS_DEADLINE_EXCEEDED = "ProgressDeadlineExceeded"
    ROLLED_BACK = "RolledBack"
    CANARY_FAILED = "CanaryFailed"

    # What a rollout waits for (of RolloutBlocked).
    NO_ROOM = "NoRoom"
    WAITING_FOR_NODE = "WaitingForNode"
    GPUS_TAKEN = "GPUsTaken"

    # What a stage of a shift of traffic lacks (of InsufficientEvidence).
    WAITING_FOR_EVIDENCE = "WaitingForEvidence"
    PROCEEDED_WITHOUT_EVIDENCE = "ProceededWithoutEvidence"

    # The companions of the model (of Autoscaled and Monitored).
    AUTOSCALING = "Autoscaling"
    AUTOSCALER_STARTING = "AutoscalerStarting"
    AUTOSCALER_UNAVAILABLE = "AutoscalerUnavailable"
    AUTOSCALER_FAILING = "AutoscalerFailing"
    METRICS_UNAVAILABLE = "MetricsUnavailable"
    MONITORED = "Monitored"
    MONITORING_UNAVAILABLE = "MonitoringUnavailable"

    # Another's autoscaler scales what the operator scales.
    AUTOSCALER_CONFLICT = "AutoscalerConflict"

    # A Service that is not ours selects the pods.
    SELECTED_BY_OTHERS = "SelectedByOthers"

    # Of Unauthenticated.
    EXPOSED_WITHOUT_AUTHENTICATION = "ExposedWithoutAuthentication"

    # A new plan would differ.
    NEW_FACTS = "NewFacts"
    NEW_DEFAULTS = "NewDefaults"

    # The status itself.
    STATUS_REFUSED = "StatusRefused"

    # Another release manages the object (of an Event).
    MANAGED_BY_ANOTHER = "ManagedByAnother"

    # The spec asks for more, or for less, than it says elsewhere.
    LOAD_NEEDS_MORE_REPLICAS = "LoadNeedsMoreReplicas"

    # A pod measured less than its plan promised.
    KV_CACHE_BELOW_PLAN = "KVCacheBelowPlan"

    # The Service.
    SERVICE_UNREACHABLE = "ServiceUnreachable"
    WRONG_ANSWER = "WrongAnswer"


# No retry mends these: a person has to change the spec, the model or the cluster.
NEEDS_A_PERSON = frozenset(
    {
        Reason.INVALID_SPEC,
        Reason.INFEASIBLE,
        Reason.BUDGET_EXCEEDED,
        Reason.NAME_CONFLICT,
        Reason.ROLLOUT_PAUSED,
        Reason.APPLY_REFUSED,
        Reason.ADMISSION_DENIED,
        Reason.CONTAINER_CONFIG_INVALID,
        Reason.DOWNLOAD_UNAUTHORIZED,
        Reason.CHECKPOINT_INVALID,
        Reason.INVALID_CONFIG,
        Reason.QUALITY_GATE_FAILED,
        Reason.API_KEYS_INVALID,
        Reason.UNSUPPORTED_BY_RUNTIME,
        Reason.PROGRESS_DEADLINE_EXCEEDED,
        Reason.ROLLED_BACK,
    }
)

# Their messages come from Kubernetes and hold counts of nodes, ports and back-offs that change by themselves.
MESSAGE_HAS_VARYING_NUMBERS = frozenset(
    {
        Reason.UNSCHEDULABLE,
        Reason.INSUFFICIENT_GPU,
        Reason.NO_ROOM,
        Reason.VOLUME_PENDING,
        Reason.IMAGE_PULL_FAILED,
        Reason.DOWNLOAD_FAILED,
        Reason.DISK_FULL,
        Reason.ADMISSION_DENIED,
        Reason.ADMISSION_UNAVAILABLE,
        Reason.QUOTA_EXCEEDED,
        Reason.APPLY_REFUSED,
        Reason.SERVICE_UNREACHABLE,
        Reason.AUTOSCALER_FAILING,
        Reason.METRICS_UNAVAILABLE,
    }
)
