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
from millstream_runtime.models.config.model_config import ModelConfig
from millstream_runtime.models.linear.shares import RankInfo
from millstream_runtime.models.linear.tensor_parallel import SINGLE_PROCESS
from millstream_runtime.models.registry import load_model_config
from millstream_runtime.quantization_config.scheme import rounded_while_loading

_TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class ShardConfig:
    """See above."""

    model_config: ModelConfig  # of the whole model, with max_model_len as the configuration limits it
    device: torch.device
    dtype: torch.dtype
    policy: DevicePolicy


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
    return ShardConfig(model_config, device, _dtype(config, model_config, device), policy)


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


def _dtype(config: RuntimeConfig, model_config: ModelConfig, device: torch.device) -> torch.dtype:
    if config.dtype is not DType.AUTO:
        return _TORCH_DTYPES[config.dtype.value]
    if device.type == "cpu":
        return torch.float32
    return _TORCH_DTYPES.get(model_config.checkpoint_dtype, torch.bfloat16)
