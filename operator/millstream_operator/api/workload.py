"""What a deployment is for: its tier, the requests it expects, what it promises, what it may cost."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from millstream_operator.api.base import ApiModel
from millstream_operator.api.duration import LATENCY_PATTERN
from millstream_runtime.config import MAX_MODEL_LEN_LIMIT_TOKENS

Latency = Annotated[str, StringConstraints(pattern=LATENCY_PATTERN, min_length=2, max_length=18)]


class Tier(StrEnum):
    STARTUP = "Startup"
    MID = "Mid"
    ENTERPRISE = "Enterprise"


class Profile(StrEnum):
    CHAT = "Chat"
    RAG = "RAG"
    CODE = "Code"
    MATH = "Math"
    CREATIVE = "Creative"
    BATCH = "Batch"
    EDGE = "Edge"


class Workload(ApiModel):
    """The requests to expect. Numbers are means; they size replicas and predictions, and refuse no request."""

    profile: Profile | None = Field(
        None,
        description="Chat, RAG, Code, Math, Creative, Batch or Edge: sets defaults for batching, speculation and "
        "quantization. Default: none of them; the batch is by tier.",
    )
    input_tokens: int | None = Field(
        None,
        ge=1,
        le=MAX_MODEL_LEN_LIMIT_TOKENS,
        description="Tokens of a usual prompt. Default: by profile, else 1000.",
    )
    output_tokens: int | None = Field(
        None,
        ge=1,
        le=MAX_MODEL_LEN_LIMIT_TOKENS,
        description="Tokens of a usual answer. Default: by profile, else 250.",
    )
    requests_per_minute: int | None = Field(
        None, ge=1, le=10_000_000, description="Requests a minute to serve, all replicas together. Default: unknown."
    )
    concurrency: int | None = Field(
        None, ge=1, le=1_000_000, description="Requests at the same time, all replicas together. Default: unknown."
    )


class LatencyObjective(ApiModel):
    p95: Latency = Field(description="What 95 of 100 requests must stay below: ttft is some 200ms, itl some 40ms.")


class Objectives(ApiModel):
    """What is promised to users. A plan that is not predicted to keep it is not made."""

    ttft: LatencyObjective | None = Field(None, description="Time to the first token.")
    itl: LatencyObjective | None = Field(None, description="Time from one token to the next.")


class BudgetEnforcement(StrEnum):
    ENFORCE = "Enforce"
    OBSERVE = "Observe"


class Budget(ApiModel):
    """What the GPUs may cost, at the catalogue's prices."""

    max_monthly_usd: int = Field(
        ge=1, le=1_000_000_000, alias="maxMonthlyUSD", description="US dollars a month, for all replicas."
    )
    enforcement: BudgetEnforcement | None = Field(
        None, description="Enforce refuses a plan that costs more; Observe says so and goes on. Default: Enforce."
    )
