"""What is decided for a rank before a byte of weights is read: device, arithmetic, policy, the longest context.

All refusals that need no more than the configuration and the model's config are here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from millstream_runtime.config import CAPABILITIES, Device, DType, KVCacheDType, RuntimeConfig, WeightFormat
from millstream_runtime.engine.device_policy import DevicePolicy
from millstream_runtime.engine.devices import device_policy_for
from millstream_runtime.errors import FailureReason, InvalidConfigError, RuntimeFailure
from millstream_runtime.gguf.gguf_model import gguf_files_left_out, gguf_files_of
from millstream_runtime.models.arithmetic import Arithmetic
from millstream_runtime.models.config.model_config import ModelConfig
from millstream_runtime.models.linear.shares import RankInfo
from millstream_runtime.models.linear.tensor_parallel import SINGLE_PROCESS
from millstream_runtime.models.registry import load_model_config
from millstream_runtime.quantization_config.scheme import rounded_while_loading

_TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_NARROW = ("float16", "bfloat16")  # checkpoints of 16 bits


@dataclass(frozen=True, slots=True)
class ShardConfig:
    """See above."""

    model_config: ModelConfig  # of the whole model, with max_model_len as the configuration limits it
    device: torch.device
    arithmetic: Arithmetic
    policy: DevicePolicy

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return self.arithmetic.dtype


def resolve_shard_config(config: RuntimeConfig, ranks: RankInfo = SINGLE_PROCESS) -> ShardConfig:
    """Return on which device this rank computes, in what arithmetic and by which policy.

    Raises:
        RuntimeFailure: CheckpointInvalid, UnsupportedByRuntime or InvalidConfig, in one sentence.
    """
    model_config = _with_max_model_len(load_model_config(Path(config.model)), config)
    device = _device(config, ranks)
    model_config = _with_asked_format(model_config, config)
    require_format(model_config, device)
    _require_kv_format(config.kv_cache_dtype, device)
    policy = device_policy_for(device, ranks.size)
    return ShardConfig(model_config, device, arithmetic_of(config, model_config, device, policy), policy)


def _with_asked_format(model_config: ModelConfig, config: RuntimeConfig) -> ModelConfig:
    """Return the model as it is loaded: as it is stored, or rounded to the format that is asked for.

    Raises:
        InvalidConfigError: it is stored in another format than the one that is asked for.
    """
    asked, stored = config.quantization, model_config.quantization
    if asked is None or (asked is WeightFormat.NONE if stored is None else stored.may_be(asked.value)):
        return model_config
    if asked is WeightFormat.GGUF and _require_gguf(config.model):
        return model_config  # a file of 16 or 32 bits
    if stored is None and asked.value in CAPABILITIES.rounded_quantization_methods:
        return replace(model_config, quantization=rounded_while_loading())
    weights = "weights of 16 or 32 bits" if stored is None else stored.words
    raise InvalidConfigError(
        f"--quantization is {asked.value} (spec.quantization.method), but {config.model} holds "
        f"{weights}: leave it out to serve them, name another checkpoint, or make one (spec.quantization.calibration, "
        "`millstream quantize`)."
    )


def _require_gguf(folder: str) -> bool:
    """Return whether the model is a GGUF file.

    Raises:
        InvalidConfigError: there is one, and *.safetensors, which are read.
    """
    names = [path.name for path in Path(folder).iterdir() if path.is_file()]
    if left_out := gguf_files_left_out(names):
        raise InvalidConfigError(
            f"--quantization is GGUF (spec.quantization.method), but {folder} holds *.safetensors, too, which are read "
            f"and not {left_out[0]}: put that file into a folder or image of its own, or name it in a repository as "
            "org/name:Q4_K_M, by a word of its name."
        )
    return bool(gguf_files_of(names, folder))


def require_format(model_config: ModelConfig, device: torch.device) -> None:
    """Refuse before any weight is read what `implementations` has no code for."""
    method = model_config.quantization.method if model_config.quantization is not None else "None"
    on_cpu = device.type == "cpu"
    if method not in (CAPABILITIES.cpu_quantization_methods if on_cpu else CAPABILITIES.quantization_methods):
        raise RuntimeFailure(
            FailureReason.UNSUPPORTED_BY_RUNTIME,
            f"This version does not serve {method} weights on {device.type}; take the model's checkpoint of 16 bits"
            + ("." if on_cpu else ", or serve it on a CPU (--device cpu)."),
        )


def _require_kv_format(stored: KVCacheDType, device: torch.device) -> None:
    on_cpu = device.type == "cpu"
    if stored.method not in (CAPABILITIES.cpu_kv_cache_methods if on_cpu else CAPABILITIES.kv_cache_methods):
        raise RuntimeFailure(
            FailureReason.UNSUPPORTED_BY_RUNTIME,
            f"--kv-cache-dtype is '{stored}', which this version does not have on {device.type}; leave it out (auto)"
            + ("." if on_cpu else ", or serve the model on a CPU (--device cpu)."),
        )


def _with_max_model_len(model_config: ModelConfig, config: RuntimeConfig) -> ModelConfig:
    asked, limit = config.max_model_len, model_config.longest_context_tokens
    if asked is None:
        return model_config
    if asked < 2:
        raise InvalidConfigError(
            f"--max-model-len is {asked}; it must be at least 2: a token of the prompt and one of the answer."
        )
    if asked > limit:
        trained = f"the model's max_position_embeddings ({model_config.max_position_embeddings})"
        if model_config.extended_context_tokens is not None:
            trained += f" with its {model_config.rope.type} factor of {model_config.rope.factor:g}"
        raise InvalidConfigError(
            f"--max-model-len is {asked}; {trained} allows at most {limit}: "
            "ask for no more (spec.engine.maxModelLen), or leave it out."
        )
    return replace(model_config, max_model_len=asked)


def _device(config: RuntimeConfig, ranks: RankInfo) -> torch.device:
    if config.device is Device.CUDA and not torch.cuda.is_available():
        raise InvalidConfigError("--device is 'cuda', but torch sees no CUDA device; use 'cpu' or 'auto'.")
    if config.device is Device.CPU or not torch.cuda.is_available():
        return torch.device("cpu")
    if ranks.size == 1:
        return torch.device("cuda", torch.cuda.current_device())
    if torch.cuda.device_count() < ranks.size:
        raise InvalidConfigError(
            f"--tensor-parallel-size is {ranks.size}, but torch sees {torch.cuda.device_count()} CUDA devices."
        )
    torch.cuda.set_device(ranks.rank)
    return torch.device("cuda", ranks.rank)


def arithmetic_of(
    config: RuntimeConfig, model_config: ModelConfig, device: torch.device, policy: DevicePolicy
) -> Arithmetic:
    """Return the numbers of a model, the target's or a draft's by its own checkpoint.

    A GPU has one type for all. A CPU computes in float32, and holds weights in 16 bits where they are asked for: half
    the memory, and half the bytes that a decode reads. Keys and values are held so where products are rounded anyway.
    """
    wanted = _asked_dtype(config, model_config, device, policy)
    if device.type != "cpu":
        return Arithmetic.of(wanted)
    if wanted is torch.float32 or policy.compiled_problem is not None:
        return Arithmetic.of(torch.float32)
    held = _held_dtype(model_config, wanted)
    rounds = held is torch.bfloat16 and policy.bfloat16_product is not None
    return Arithmetic(torch.float32, wanted, held if rounds else torch.float32, rounds_products=rounds)


def draft_arithmetic(config: RuntimeConfig, target: ShardConfig, shape: ModelConfig) -> Arithmetic:
    """Return the numbers of a draft model: the target's on a GPU. On a CPU its weights are held as its own checkpoint
    has them, unless the target's are to be float32."""
    if target.device.type != "cpu":
        return target.arithmetic
    own = config
    if config.dtype not in (DType.AUTO, DType.FLOAT32):
        stored = shape.checkpoint_dtype
        own = replace(config, dtype=DType(stored) if stored in _TORCH_DTYPES else DType.FLOAT32)
    return arithmetic_of(own, shape, target.device, target.policy)


def weights_reason(config: RuntimeConfig, shard_config: ShardConfig) -> str:
    """Why weights are held on a CPU as they are, in words for the log and `/ready`."""
    held, problem = shard_config.arithmetic.weights, shard_config.policy.compiled_problem
    policy = shard_config.policy
    wanted = _asked_dtype(config, shard_config.model_config, shard_config.device, policy)
    if config.dtype is not DType.AUTO:
        asked = f"--dtype is {config.dtype.value}"
    elif config.auto_dtype is not None:
        asked = "the boot file is of a plan that counts them so"
    elif _has_avx512() and wanted is torch.float32 and shard_config.model_config.checkpoint_dtype in _NARROW:
        asked = "--dtype is auto, and float32 products use AVX-512 here, which those of 16-bit weights do not yet"
        asked += f" ({policy.bfloat16_problem})" if policy.bfloat16_problem else ""
    else:
        asked = f"--dtype is auto, and the checkpoint is {shard_config.model_config.checkpoint_dtype}"
    name = str(held).removeprefix("torch.")
    if wanted is not held:
        return f"weights are held in {name}: {asked}, but {problem}"
    if shard_config.arithmetic.rounds_products:
        return (
            "weights are held in bfloat16, products of layers take and give bfloat16 (oneDNN), and activations and "
            f"logits are float32: {asked}"
        )
    if shard_config.arithmetic.is_mixed:
        by = f"; {policy.bfloat16_problem}" if held is torch.bfloat16 and policy.bfloat16_problem else ""
        return f"weights are held in {name}, and products and activations are float32: {asked}{by}{_cost_of_holding()}"
    return f"weights and products are {name}: {asked}"


def _held_dtype(model_config: ModelConfig, wanted: torch.dtype) -> torch.dtype:
    """Of most weights: a checkpoint of 16 bits keeps its own."""
    stored = _TORCH_DTYPES.get(model_config.checkpoint_dtype, torch.float32)
    return wanted if stored is torch.float32 else stored


def _asked_dtype(
    config: RuntimeConfig, model_config: ModelConfig, device: torch.device, policy: DevicePolicy
) -> torch.dtype:
    """What weights are to be held in."""
    on_cpu = device.type == "cpu"
    asked = config.auto_dtype if config.dtype is DType.AUTO and on_cpu and config.auto_dtype else config.dtype
    if asked is not DType.AUTO:
        return _TORCH_DTYPES[asked.value]
    has_product = model_config.checkpoint_dtype == "bfloat16" and policy.bfloat16_product is not None
    if on_cpu and _has_avx512() and not has_product:
        return torch.float32
    return _TORCH_DTYPES.get(model_config.checkpoint_dtype, torch.float32 if on_cpu else torch.bfloat16)


def _cost_of_holding() -> str:
    """What weights of 16 bits cost without oneDNN's product of them, in words."""
    if not _has_avx512():
        return ""
    return "; prompts and large batches take up to twice as long as by --dtype float32, which takes twice the memory"


def _has_avx512() -> bool:
    """Whether oneDNN multiplies in float32 by vectors of 512 bits: steps of many rows are then up to twice as fast as
    with the compiled product of 16-bit weights, whose vectors have 256. oneDNN's product of bfloat16 weights is twice
    as fast again, where the CPU has instructions for it."""
    return bool(torch.backends.cpu.get_cpu_capability() == "AVX512")
