"""How a model is made to fit and to be fast: parallelism, quantization, speculation. Absent: the planner chooses."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from millstream_operator.api.base import ApiModel
from millstream_operator.api.model import ModelSource


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


class Quantization(ApiModel):
    method: QuantizationMethod | None = Field(
        None,
        description="Format of the weights. Auto: as in the checkpoint, or what source and GPU allow. Default: Auto.",
    )
    kv_cache: KVCacheMethod | None = Field(None, description="Format of keys and values. Auto: 16 bit. Default: Auto.")


class SpeculationMethod(StrEnum):
    AUTO = "Auto"
    DISABLED = "Disabled"
    N_GRAM = "NGram"
    DRAFT_MODEL = "DraftModel"
    EAGLE = "EAGLE"
    MEDUSA = "Medusa"


class DraftModel(ApiModel):
    """The small model that proposes tokens. It shares the target's GPUs and vocabulary."""

    source: ModelSource = Field(description="Where the draft's weights come from: exactly one source.")
    quantization_method: QuantizationMethod | None = Field(
        None, description="Format of the draft's weights. Default: as in its checkpoint."
    )


class Speculation(ApiModel):
    method: SpeculationMethod | None = Field(
        None, description="Who proposes tokens. Auto: by tier, workload and what the runtime can do. Default: Auto."
    )
    draft_model: DraftModel | None = Field(None, description="The draft, for methods DraftModel, EAGLE and Medusa.")
    max_draft_tokens: int | None = Field(
        None,
        ge=1,
        le=16,
        description="Tokens proposed at a time, at most. Default: 5 with a draft model, 4 by n-grams.",
    )
