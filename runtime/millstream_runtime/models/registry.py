"""Which file of this package runs which architecture, and the two doors into it: the config, then the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from millstream_runtime.errors import Reason, RuntimeFailure
from millstream_runtime.models.config.fields import Fields
from millstream_runtime.models.config.model_config import ModelConfig, architecture_of
from millstream_runtime.models.families import deepseek, gemma, llama, mistral, mixtral, phi3, qwen2, qwen3, qwen3_moe
from millstream_runtime.models.layers.decoder import Decoder
from millstream_runtime.models.linear.tensor_parallel import SINGLE_PROCESS, Ranks
from millstream_runtime.models.loading.checkpoint import Checkpoint
from millstream_runtime.models.loading.weights import ExpectedWeights, LoadedWeights, Weights

OnRead = Callable[[int, int], None]  # done_bytes, total_bytes


@dataclass(frozen=True, slots=True)
class Family:
    """What a family's file offers. `build` gets the config that `read_config` made, a subclass or not."""

    read_config: Callable[[Fields], ModelConfig]
    build: Callable[[Any, Weights], Decoder]


FAMILIES = {
    "LlamaForCausalLM": Family(llama.read_config, llama.build),
    "MistralForCausalLM": Family(mistral.read_config, mistral.build),
    "Qwen2ForCausalLM": Family(qwen2.read_config, qwen2.build),
    "Qwen3ForCausalLM": Family(qwen3.read_config, qwen3.build),
    "Gemma2ForCausalLM": Family(gemma.read_gemma2, gemma.build),
    "Gemma3ForCausalLM": Family(gemma.read_gemma3, gemma.build),
    "Phi3ForCausalLM": Family(phi3.read_config, phi3.build),
    "MixtralForCausalLM": Family(mixtral.read_config, mixtral.build),
    "Qwen3MoeForCausalLM": Family(qwen3_moe.read_config, qwen3_moe.build),
    "DeepseekV2ForCausalLM": Family(deepseek.read_v2, deepseek.build),
    "DeepseekV3ForCausalLM": Family(deepseek.read_v3, deepseek.build),
}


def load_model_config(folder: Path) -> ModelConfig:
    """Read `config.json` and, where it exists, `generation_config.json`.

    Raises:
        RuntimeFailure: CheckpointInvalid (no folder, unreadable JSON, a field missing or impossible) or
            UnsupportedByRuntime (another architecture, activation, rope type, or a quantised checkpoint).
    """
    if not folder.is_dir():
        raise RuntimeFailure(
            Reason.CHECKPOINT_INVALID,
            f"Model folder {folder} does not exist; name a folder with config.json and *.safetensors.",
        )
    fields = Fields(folder / "config.json")
    architecture = architecture_of(fields)
    if architecture not in FAMILIES:
        raise fields.unsupported("architecture", architecture, ", ".join(FAMILIES))
    return FAMILIES[architecture].read_config(fields)


def expected_weights(config: ModelConfig, dtype: torch.dtype, ranks: Ranks = SINGLE_PROCESS) -> ExpectedWeights:
    """Every tensor that a checkpoint of this configuration must hold, and the bytes that a rank's share will take.

    Raises:
        InvalidConfigError: the model cannot be shared by so many ranks; the message names what does not divide.
    """
    weights = ExpectedWeights(dtype, ranks)
    FAMILIES[config.architecture].build(config, weights)
    return weights


def load_model(
    config: ModelConfig,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    ranks: Ranks = SINGLE_PROCESS,
    on_read: OnRead | None = None,
    copy_budget_bytes: int = 0,
) -> Decoder:
    """Check every tensor of the folder's checkpoint, then load this rank's share; nothing else is read.

    Args:
        copy_budget_bytes: what second copies of linear weights may take, on a device that uses them.
        on_read: told before the first tensor and after each how many of the share's bytes in the files are read.

    Raises:
        RuntimeFailure: CheckpointInvalid, naming file and tensor; InvalidConfig, as `expected_weights`.
    """
    with Checkpoint(folder) as checkpoint:
        wanted = expected_weights(config, dtype, ranks)
        checkpoint.check(wanted.expected.items())
        total_bytes = sum(numel * checkpoint.element_bytes(name) for name, numel in wanted.reads)

        def tell() -> None:
            if on_read is not None:
                on_read(checkpoint.bytes_read, total_bytes)

        tell()
        weights = LoadedWeights(checkpoint, dtype, device, ranks, tell, copy_budget_bytes)
        return FAMILIES[config.architecture].build(config, weights)
