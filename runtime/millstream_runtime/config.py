"""RuntimeConfig: the contract between the operator and the runtime, and nothing else.

    LLMDeployment -> Plan -> BootConfig -> boot.json (an immutable ConfigMap) -\\
    LLMDeployment ---------> LiveConfig -> live.json (a ConfigMap, watched) ----+-> RuntimeConfig -> engine
    a person ------------------------------------------------------> flags ----/   (config_flags.py)

Both ends import this file, so it imports neither torch nor anything that does. It has two halves. What a process
reads once is `BootConfig`: a change of it is a rollout. What may change while it runs is `LiveConfig`: no restart.
A config is immutable, checked when it is made, and its boot half is hashed: `/ready` carries the hash, so that the
operator can tell that an answer through the Service came from the configuration it rendered and not from an older pod.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from millstream_runtime.allowed_origins import check_origins
from millstream_runtime.draft_tree import DraftTree
from millstream_runtime.errors import InvalidConfigError
from millstream_runtime.model_families import RUNNABLE

MAX_MODEL_LEN_LIMIT_TOKENS = 1 << 20
MAX_NUM_SEQS_LIMIT = 4096
TENSOR_PARALLEL_SIZE_LIMIT = 8  # ranks of one pod: the GPUs that one node connects
MAX_DURATION_SECONDS = 86_400
MAX_TARGET_ITL_MILLISECONDS = 60_000
DEFAULT_HEARTBEAT_INTERVAL_SECONDS, DEFAULT_CPU_TARGET_ITL_MILLISECONDS = 30, 50
DEFAULT_BLOCK_SIZE_TOKENS = 16
MAX_PROBE_KEYS = 4
MAX_DRAFT_TOKENS_LIMIT = 16
DEFAULT_NGRAM_DRAFT_TOKENS, DEFAULT_MODEL_DRAFT_TOKENS = 4, 5
# Fields of BootConfig that came later: absent from boot.json and the hash at their defaults: upgrades restart nothing.
LATER_FIELDS = frozenset(
    {
        "target_itl_milliseconds",
        "enable_hybrid_kv_cache_manager",
        "kv_cache_dtype",
        "speculation_method",
        "max_draft_tokens",
        "draft_model",
        "speculation_acceptance",
        "draft_tree",
        "quantization",
        "planned_model_len",
    }
)
# Absent from live.json at their defaults.
OPTIONAL_LIVE_FIELDS = frozenset(
    {"probe_key_digests", "target_itl_milliseconds", "speculation_governor", "allowed_origins"}
)
_SHA256_HEX = re.compile("[0-9a-f]{64}")


class Device(StrEnum):
    """Where the model runs. `AUTO` takes CUDA when torch sees a device, else the CPU."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class DType(StrEnum):
    """Arithmetic of the model. `AUTO`: the checkpoint's own, but float32 on a CPU with AVX-512 unless it multiplies
    bfloat16 numbers and the checkpoint holds these.

    A CPU holds weights, keys and values in that type, and computes in float32 otherwise. `AUTO` of a boot file is
    float32 there: so plans of all releases before this one were counted.
    """

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class WeightFormat(StrEnum):
    """How the weights of layers are stored; the API's words."""

    NONE = "None"  # in 16 or 32 bits
    AWQ = "AWQ"
    GPTQ = "GPTQ"
    FP8 = "FP8"
    INT8 = "INT8"
    NF4 = "NF4"
    GGUF = "GGUF"


class KVCacheDType(StrEnum):
    """How keys and values are stored (`kv_formats`). `AUTO`: as the model computes."""

    AUTO = "auto"
    FP8 = "fp8"
    INT8 = "int8"

    @property
    def method(self) -> str:
        """The same in the words of the API."""
        return "None" if self is KVCacheDType.AUTO else self.value.upper()


class SpeculationMethod(StrEnum):
    """Who proposes the tokens that steps check; the API's words."""

    DISABLED = "Disabled"
    N_GRAM = "NGram"
    DRAFT_MODEL = "DraftModel"
    EAGLE = "EAGLE"
    MEDUSA = "Medusa"

    @property
    def has_weights(self) -> bool:
        """Whether a folder of weights proposes them."""
        return self in (SpeculationMethod.DRAFT_MODEL, SpeculationMethod.EAGLE, SpeculationMethod.MEDUSA)


class AcceptanceRule(StrEnum):
    """By which rule proposed tokens stand; the API's words."""

    IDENTITY = "Identity"  # those that the target draws: the tokens are those without speculation
    DISTRIBUTION = "Distribution"  # by rejection sampling: the tokens of unseeded requests have the same distribution


class GovernorMode(StrEnum):
    """Whether measured gains decide how many of the proposed tokens a step checks; the API's words."""

    ENFORCE = "Enforce"
    OBSERVE = "Observe"  # all are checked; what would be chosen is reported
    DISABLED = "Disabled"


class LogLevel(StrEnum):
    """How much a runtime logs; each level holds those below it."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a runtime can run, in the words of the LLMDeployment API and of Hugging Face's `model_type`.

    The planner compares a plan with it: what a spec insists on and the runtime lacks is refused by name, and what
    the planner may choose freely it chooses from here. A feature that works adds its word in the same commit.
    """

    model_families: frozenset[str]
    sources: frozenset[str]
    quantization_methods: frozenset[str]  # of weights, on a GPU; the empty method is "None"
    cpu_quantization_methods: frozenset[str]  # of weights, on a CPU
    online_quantization_methods: frozenset[str]  # those that 16-bit weights are brought into while loading, unasked
    kv_cache_methods: frozenset[str]  # of keys and values, on a GPU
    speculation_methods: frozenset[str]
    max_tensor_parallel_size: int
    max_pipeline_parallel_size: int
    # Of the KV cache where a model mixes windows: one block table for all layers, or one per group of layers.
    kv_layouts: frozenset[str] = frozenset({"OneTable"})
    cpu_kv_cache_methods: frozenset[str] = frozenset({"None"})  # of keys and values, on a CPU
    cpu_speculation_methods: frozenset[str] = frozenset({"Disabled"})  # `speculation_methods` are a GPU's
    rounded_quantization_methods: frozenset[str] = frozenset()  # the same of a model, where `quantization` asks for it
    cpu_weight_dtypes: frozenset[str] = frozenset({"FP32"})  # in which a CPU holds weights that no format quantizes


CAPABILITIES = Capabilities(
    model_families=frozenset(family.model_type for family in RUNNABLE),
    sources=frozenset({"local", "huggingFace", "image", "persistentVolumeClaim"}),
    quantization_methods=frozenset({"None", "AWQ", "GPTQ", "FP8", "INT8", "NF4"}),
    cpu_quantization_methods=frozenset({"None", "AWQ", "GPTQ", "FP8", "INT8", "NF4", "GGUF"}),
    online_quantization_methods=frozenset(),
    kv_cache_methods=frozenset({"None", "FP8", "INT8"}),
    speculation_methods=frozenset({"Disabled", "NGram", "DraftModel"}),
    max_tensor_parallel_size=TENSOR_PARALLEL_SIZE_LIMIT,
    max_pipeline_parallel_size=1,
    kv_layouts=frozenset({"OneTable", "TablePerGroup"}),
    cpu_kv_cache_methods=frozenset({"None", "FP8", "INT8"}),
    cpu_speculation_methods=frozenset(SpeculationMethod),
    rounded_quantization_methods=frozenset({"FP8"}),
    cpu_weight_dtypes=frozenset({"FP32", "BF16", "FP16"}),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveConfig:
    """What a runtime takes over while it serves (`config_files.py` has its file). It is not hashed.

    Raises:
        InvalidConfigError: a value out of its range.
    """

    heartbeat_interval_seconds: int = DEFAULT_HEARTBEAT_INTERVAL_SECONDS  # 0 switches heartbeats off
    log_level: LogLevel | None = None  # None: what the environment says
    probe_key_digests: tuple[str, ...] = ()  # SHA-256, in hex, of the keys of the operator's probe
    target_itl_milliseconds: int | None = None  # as in BootConfig, which holds where this is None
    speculation_governor: GovernorMode = GovernorMode.ENFORCE
    allowed_origins: tuple[str, ...] = ()  # of web pages that may ask from a browser (CORS); see `allowed_origins`

    def __post_init__(self) -> None:
        _in_range("--heartbeat-interval-seconds", self.heartbeat_interval_seconds, 0, MAX_DURATION_SECONDS)
        _require_target_itl(self.target_itl_milliseconds)
        check_origins(self.allowed_origins)
        if len(self.probe_key_digests) > MAX_PROBE_KEYS or not all(map(_SHA256_HEX.fullmatch, self.probe_key_digests)):
            raise InvalidConfigError(
                f"probe_key_digests must be at most {MAX_PROBE_KEYS} SHA-256 digests of 64 hexadecimal digits."
            )

    def as_dict(self) -> dict[str, Any]:
        """Field names to plain JSON values. Without the optional fields that have their defaults."""
        kept = {
            field.name
            for field in fields(self)
            if field.name not in OPTIONAL_LIVE_FIELDS or getattr(self, field.name) != field.default
        }
        found = {field.name: _plain(getattr(self, field.name)) for field in fields(self)}
        found |= {name: [*value] for name, value in found.items() if isinstance(value, tuple)}
        return {name: value for name, value in found.items() if name in kept}


@dataclass(frozen=True, slots=True, kw_only=True)
class BootConfig:
    """What a runtime process reads once. `None` means that the runtime chooses, from the model and the memory.

    Raises:
        InvalidConfigError: a value out of its range; the message names the flag, the value and the range.
    """

    model: str  # folder with config.json, *.safetensors and tokenizer.json
    served_model_name: str
    device: Device = Device.AUTO
    dtype: DType = DType.AUTO
    # The checkpoint must store its weights so, or in 16 bits that are rounded when they are loaded. None: in any way.
    quantization: WeightFormat | None = None
    tensor_parallel_size: int = 1  # processes that share every layer, each with a GPU of its own or a part of the CPUs
    max_model_len: int | None = None  # tokens, prompt and answer together
    # Tokens of one request that a plan has room for, where `max_model_len` is None: with less room the boot ends.
    planned_model_len: int | None = None
    max_num_batched_tokens: int = 2048  # tokens one step may compute
    max_num_seqs: int = 64  # requests one step may hold
    block_size_tokens: int = DEFAULT_BLOCK_SIZE_TOKENS
    gpu_memory_utilization_percent: int = 90
    kv_cache_memory_bytes: int | None = None  # of all ranks; on a CPU None takes a share of the container's memory
    enable_prefix_caching: bool = True  # share KV blocks among requests that begin alike
    enforce_eager: bool = False  # no CUDA graphs; a CPU has none in any case
    target_itl_milliseconds: int | None = None  # how long a step with prompts may make running answers wait
    # Whether windowed layers keep no blocks behind their window where other layers keep all; see `kv_layout`.
    enable_hybrid_kv_cache_manager: bool | None = None
    kv_cache_dtype: KVCacheDType = KVCacheDType.AUTO  # how keys and values are stored
    speculation_method: SpeculationMethod = SpeculationMethod.DISABLED
    max_draft_tokens: int | None = None  # proposed at a time
    draft_model: str | None = None  # folder of the model or the head that proposes tokens
    speculation_acceptance: AcceptanceRule = AcceptanceRule.IDENTITY
    draft_tree: str | None = None  # which tokens heads propose; see `draft_tree`. None: one after another
    api_keys_file: str | None = None  # one key a line; None: everyone may ask
    drain_timeout_seconds: int = 600
    host: str = "0.0.0.0"  # noqa: S104 - a pod is reached through its Service
    port: int = 8000

    def __post_init__(self) -> None:
        _require(bool(self.model), "--model", self.model, "a folder with config.json and safetensors weights")
        _require(
            0 < len(self.served_model_name) <= 253,
            "--served-model-name",
            self.served_model_name,
            "1 to 253 characters",
        )
        _in_range("--tensor-parallel-size", self.tensor_parallel_size, 1, TENSOR_PARALLEL_SIZE_LIMIT)
        if self.max_model_len is not None:
            _in_range("--max-model-len", self.max_model_len, 1, MAX_MODEL_LEN_LIMIT_TOKENS)
        if self.planned_model_len is not None:
            _in_range("--planned-model-len", self.planned_model_len, 1, MAX_MODEL_LEN_LIMIT_TOKENS)
        _in_range("--max-num-batched-tokens", self.max_num_batched_tokens, 16, MAX_MODEL_LEN_LIMIT_TOKENS)
        _in_range("--max-num-seqs", self.max_num_seqs, 1, MAX_NUM_SEQS_LIMIT)
        _require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            "--max-num-batched-tokens",
            self.max_num_batched_tokens,
            f"at least --max-num-seqs ({self.max_num_seqs}), or a full batch could not decode one token each",
        )
        _require(
            self.block_size_tokens in (8, 16, 32, 64, 128),
            "--block-size-tokens",
            self.block_size_tokens,
            "8, 16, 32, 64 or 128",
        )
        _in_range("--gpu-memory-utilization-percent", self.gpu_memory_utilization_percent, 1, 99)
        if self.kv_cache_memory_bytes is not None:
            _in_range("--kv-cache-memory-bytes", self.kv_cache_memory_bytes, 1 << 20, 1 << 50)
        _require_target_itl(self.target_itl_milliseconds)
        self._check_speculation()
        self._check_draft_tree()
        if self.api_keys_file is not None:
            _require(bool(self.api_keys_file), "--api-keys-file", self.api_keys_file, "a file with one key a line")
        _in_range("--drain-timeout-seconds", self.drain_timeout_seconds, 0, MAX_DURATION_SECONDS)
        _in_range("--port", self.port, 0, 65_535)

    def _check_speculation(self) -> None:
        method = self.speculation_method
        if self.max_draft_tokens is not None:
            _in_range("--max-draft-tokens", self.max_draft_tokens, 1, MAX_DRAFT_TOKENS_LIMIT)
            if method is SpeculationMethod.DISABLED:
                raise InvalidConfigError(
                    f"--max-draft-tokens is {self.max_draft_tokens}, but nothing proposes tokens; set "
                    "--speculation-method too."
                )
        if method.has_weights and not self.draft_model:
            named = "draft model" if method is SpeculationMethod.DRAFT_MODEL else "head"
            raise InvalidConfigError(
                f"--speculation-method is {method.value}, but --draft-model is missing; name the {named}'s folder."
            )
        if not method.has_weights and self.draft_model is not None:
            raise InvalidConfigError(
                f"--draft-model is {self.draft_model!r}, but --speculation-method is {method.value}; set it to "
                f"{', '.join(one.value for one in SpeculationMethod if one.has_weights)}, or leave --draft-model out."
            )
        if method is not SpeculationMethod.DRAFT_MODEL and self.speculation_acceptance is AcceptanceRule.DISTRIBUTION:
            raise InvalidConfigError(
                f"--speculation-acceptance is {self.speculation_acceptance.value}, but --speculation-method is "
                f"{method.value}; set it to {SpeculationMethod.DRAFT_MODEL.value}, whose drafts have probabilities, or "
                "leave --speculation-acceptance out."
            )

    def _check_draft_tree(self) -> None:
        if self.draft_tree is None:
            return
        method = self.speculation_method
        if method not in (SpeculationMethod.EAGLE, SpeculationMethod.MEDUSA):
            raise InvalidConfigError(
                f"--draft-tree is {self.draft_tree!r:.200}, but --speculation-method is {method.value}; set it to "
                f"{SpeculationMethod.EAGLE.value} or {SpeculationMethod.MEDUSA.value}, whose heads alone propose "
                "trees, or leave --draft-tree out."
            )
        if self.max_draft_tokens is not None:
            raise InvalidConfigError(
                f"--max-draft-tokens is {self.max_draft_tokens}, but --draft-tree says which tokens are proposed; "
                "leave one of them out."
            )
        try:
            DraftTree.parse(self.draft_tree)
        except ValueError as error:
            raise InvalidConfigError(f"--draft-tree {error}.") from None

    @property
    def tree(self) -> DraftTree | None:
        """`draft_tree`, parsed."""
        return None if self.draft_tree is None else DraftTree.parse(self.draft_tree)

    @property
    def draft_tokens(self) -> int:
        """Tokens proposed at a time, at most; 0 without speculation."""
        if self.speculation_method is SpeculationMethod.DISABLED:
            return 0
        if (tree := self.tree) is not None:
            return len(tree.nodes)
        has_weights = self.speculation_method.has_weights
        return self.max_draft_tokens or (DEFAULT_MODEL_DRAFT_TOKENS if has_weights else DEFAULT_NGRAM_DRAFT_TOKENS)

    def config_hash(self) -> str:
        """Sixteen hex digits of SHA-256 over this half: equal configs have equal hashes on every machine."""
        values = BootConfig.as_dict(self.boot if isinstance(self, RuntimeConfig) else self)
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]

    def as_dict(self) -> dict[str, Any]:
        """Field names to plain JSON values. Without the fields that older versions do not know, at their defaults."""
        found = {field.name: _plain(getattr(self, field.name)) for field in fields(self)}
        defaults = {field.name: field.default for field in fields(self) if field.name in LATER_FIELDS}
        return {name: value for name, value in found.items() if name not in defaults or value != defaults[name]}


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig(BootConfig):
    """The whole configuration of a runtime process: the boot half, and the first values of the live half."""

    heartbeat_interval_seconds: int = DEFAULT_HEARTBEAT_INTERVAL_SECONDS
    log_level: LogLevel | None = None
    probe_key_digests: tuple[str, ...] = ()
    speculation_governor: GovernorMode = GovernorMode.ENFORCE
    allowed_origins: tuple[str, ...] = ()
    # What `dtype: auto` of a boot file means on a CPU, whatever the checkpoint is; None: the checkpoint's own.
    auto_dtype: DType | None = None

    def __post_init__(self) -> None:
        BootConfig.__post_init__(self)
        _ = self.live  # its values are checked when it is made

    @staticmethod
    def of(boot: BootConfig, live: LiveConfig | None = None) -> RuntimeConfig:
        """Both halves in one; without a live half its defaults. A field of both is that of `live`, if it has one."""
        halves = ((boot, BootConfig), (live or LiveConfig(), LiveConfig))
        found = {field.name: getattr(half, field.name) for half, of in halves for field in fields(of)}
        if found["target_itl_milliseconds"] is None:
            found["target_itl_milliseconds"] = boot.target_itl_milliseconds
        return RuntimeConfig(**found)

    @property
    def boot(self) -> BootConfig:
        return BootConfig(**{field.name: getattr(self, field.name) for field in fields(BootConfig)})

    @property
    def live(self) -> LiveConfig:
        return LiveConfig(**{field.name: getattr(self, field.name) for field in fields(LiveConfig)})


def _plain(value: object) -> object:
    return value.value if isinstance(value, StrEnum) else value


def _require_target_itl(milliseconds: int | None) -> None:
    if milliseconds is not None:
        _in_range("--target-itl-milliseconds", milliseconds, 1, MAX_TARGET_ITL_MILLISECONDS)


def _in_range(flag: str, value: int, low: int, high: int) -> None:
    _require(low <= value <= high, flag, value, f"between {low} and {high}")


def _require(holds: bool, flag: str, value: object, allowed: str) -> None:
    if not holds:
        raise InvalidConfigError(f"{flag} is {value!r}; it must be {allowed}.")
