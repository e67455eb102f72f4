"""How a model is made to fit and to be fast: parallelism, quantization, speculation. Absent: the planner chooses."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from millstream_operator.api.base import ApiModel, DNSSubdomain
from millstream_operator.api.model import MODEL_PATH_PATTERN, ModelSource, ObjectKey

# A number of a decimal fraction, or of thousandths: 1.02, 0.05, 20m.
DECIMAL_PATTERN = r"^(0|[1-9][0-9]{0,5})(\.[0-9]{1,6}|m)?$"
Decimal = Annotated[str, StringConstraints(pattern=DECIMAL_PATTERN, min_length=1, max_length=16)]


class Parallelism(ApiModel):
    """GPUs of one replica. Their number is tensor × pipeline."""

    tensor: int | None = Field(
        None, ge=1, le=64, description="GPUs that share each layer. Default: the fewest that hold model and KV cache."
    )
    pipeline: int | None = Field(
        None, ge=1, le=16, description="Groups of GPUs that share the layers. Default: 1, unless tensor cannot do it."
    )


class QuantizationMethod(StrEnum):
    AUTO = "Auto"
    NONE = "None"
    AWQ = "AWQ"
    GPTQ = "GPTQ"
    FP8 = "FP8"
    INT8 = "INT8"
    NF4 = "NF4"
    RTN = "RTN"
    GGUF = "GGUF"


class KVCacheMethod(StrEnum):
    AUTO = "Auto"
    NONE = "None"
    FP8 = "FP8"
    INT8 = "INT8"


def decimal(text: str) -> float:
    """Return the number of a `Decimal`: `20m` is 0.02."""
    return int(text[:-1]) / 1000 if text.endswith("m") else float(text)


class DatasetClaim(ApiModel):
    """A file in a volume of the namespace, mounted to be read."""

    claim_name: DNSSubdomain = Field(description="Name of the PersistentVolumeClaim.")
    path: Annotated[str, StringConstraints(pattern=MODEL_PATH_PATTERN, min_length=1, max_length=512)] = Field(
        description="File in the volume, for example data/held_out.jsonl."
    )


class Dataset(ApiModel):
    """Documents as JSON lines: exactly one source. It is read once per name: give changed documents another name."""

    config_map_ref: ObjectKey | None = Field(None, description="Key of a ConfigMap that holds the lines.")
    persistent_volume_claim: DatasetClaim | None = Field(None, description="A file in a volume of the namespace.")


class GateMode(StrEnum):
    ENFORCE = "Enforce"
    OBSERVE = "Observe"


class QualityGate(ApiModel):
    """The model must be as good as its base on held-out documents before a pod of it starts."""

    mode: GateMode | None = Field(
        None, description="Enforce: a model that fails does not serve. Observe: it serves, and the status says so. "
        "Default: Enforce."
    )  # fmt: skip
    dataset: Dataset = Field(description="Held-out documents, none of which is in calibration.")
    base: ModelSource | None = Field(
        None,
        description="The model to compare with, where model.source is quantized or changed already. With calibration "
        "the base is model.source.",
    )
    max_mean_kl: Decimal | None = Field(
        None,
        alias="maxMeanKL",
        description="Limit of the mean KL divergence of each slice, in nats per token: 20m is 0.02. Default: 50m; 20m "
        "for slices named code or math.",
    )
    max_p99_kl: Decimal | None = Field(
        None,
        alias="maxP99KL",
        description="Limit of the 99th percentile of the KL divergence of each slice, in nats: 500m is 0.5. Default: "
        "1; 500m for slices named code or math.",
    )
    min_top1_agreement_percent: int | None = Field(
        None,
        ge=0,
        le=100,
        description="Least share of tokens, in percent, for which both models prefer the same one. Default: 95; 98 for "
        "slices named code or math.",
    )
    max_flip_percent: int | None = Field(
        None,
        ge=0,
        le=100,
        description="Limit of the share of tokens, in percent, that exactly one of the models gets right. Default: 3; "
        "2 for slices named code or math.",
    )
    max_perplexity_ratio: Decimal | None = Field(
        None,
        description='Limit of the perplexity divided by that of the base, in quotes: "1.02" admits 2 % more. Default: '
        "1.03; 1.02 for slices named code or math.",
    )


class Quantization(ApiModel):
    method: QuantizationMethod | None = Field(
        None,
        description="Format of the weights. Auto: as in the checkpoint. FP8, with neither calibration nor qualityGate: "
        "a source of 16 bits is rounded while it is loaded. Default: Auto.",
    )
    kv_cache: KVCacheMethod | None = Field(
        None, description="Format of keys and values. Auto: that of the model's arithmetic. Default: Auto."
    )
    calibration: Dataset | None = Field(
        None,
        description="Documents like those that the model will serve. The weights of model.source are quantized with "
        "them in the cluster, into model.cache, by method RTN, AWQ, GPTQ, INT8, FP8, NF4 or GGUF. Default: weights are "
        "served as they are in the source.",
    )
    quality_gate: QualityGate | None = Field(
        None,
        description="What the model must pass before a new revision of it serves. It judges what calibration makes, or "
        "model.source by base. Default: none.",
    )


class SpeculationMethod(StrEnum):
    AUTO = "Auto"
    DISABLED = "Disabled"
    N_GRAM = "NGram"
    DRAFT_MODEL = "DraftModel"
    EAGLE = "EAGLE"
    MEDUSA = "Medusa"


# Whose drafts come from a head over the target's own hidden states, not from a model.
HEAD_METHODS = frozenset({SpeculationMethod.EAGLE, SpeculationMethod.MEDUSA})


class DraftModel(ApiModel):
    """The small model, or the head, that proposes tokens. It shares the target's GPUs and vocabulary."""

    source: ModelSource = Field(
        description="Where the weights of the draft model, or of the draft head, come from: exactly one source."
    )
    quantization_method: QuantizationMethod | None = Field(
        None, description="Format of the draft's weights. Default: as in its checkpoint. Heads have None."
    )


class GovernorMode(StrEnum):
    ENFORCE = "Enforce"
    OBSERVE = "Observe"
    DISABLED = "Disabled"


class Governor(ApiModel):
    """What chooses how many drafts a step checks, by the gain that the pod measures. A change restarts nothing."""

    mode: GovernorMode | None = Field(
        None,
        description="Enforce: its choice is used, down to no drafts at all. Observe: it measures and reports, and "
        "maxDraftTokens are checked. Disabled: maxDraftTokens are checked. Default: Enforce.",
    )


class DraftTuning(ApiModel):
    """A Job trains the draft on what the target answers to your prompts, while the draft as it is serves."""

    dataset: Dataset = Field(
        description="Prompts like those that are served. A tenth is held out and judges the draft."
    )
    general_dataset: Dataset | None = Field(
        None,
        description="Other work on which the draft must not get worse: a quarter of the training. Default: only slices "
        "of dataset are protected.",
    )
    steps: int | None = Field(
        None, ge=1, le=5000, description="Steps of training. Default: each sequence is seen three times."
    )
    sequence_tokens: int | None = Field(
        None, ge=32, le=32768, description="Tokens of a prompt with its answer, at most. Default: 1024."
    )
    max_answer_tokens: int | None = Field(
        None, ge=8, le=16384, description="Tokens of an answer, at most; fewer than sequenceTokens. Default: 256."
    )


class AcceptanceRule(StrEnum):
    IDENTITY = "Identity"
    DISTRIBUTION = "Distribution"


class Speculation(ApiModel):
    method: SpeculationMethod | None = Field(
        None, description="Who proposes tokens. Auto: by tier, workload and what the runtime can do. Default: Auto."
    )
    draft_model: DraftModel | None = Field(
        None,
        description="The draft model, or with methods EAGLE and Medusa the draft head that was trained with the model.",
    )
    max_draft_tokens: int | None = Field(
        None,
        ge=1,
        le=16,
        description="Tokens proposed at a time, at most. Default: 5 with a draft model or an EAGLE head, else 4.",
    )
    acceptance: AcceptanceRule | None = Field(
        None,
        description="Which drafts stand. Identity: those that the target draws, so no token changes. Distribution: by "
        "rejection sampling, where a request is sampled without a seed: more drafts stand, and tokens keep their "
        "distribution. Needs a draft model; heads have Identity. Default: Identity.",
    )
    governor: Governor | None = Field(
        None, description="What chooses the number of drafts while the model serves. A change restarts nothing."
    )
    tuning: DraftTuning | None = Field(
        None,
        description="Train draftModel on your own traffic in the cluster, into model.cache. Pods load the tuned draft "
        "once more of its drafts stand on held-out prompts, and not otherwise. Default: the draft stays as it is.",
    )
