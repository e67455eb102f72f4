"""The folder of an EAGLE-1 head, in either of its two layouts: config.json and names of tensors.

    published (SafeAILab/EAGLE)          `speculators` (vllm-project)          here
    config.json: a Llama's fields        transformer_layer_config: the same    `EagleShape.config`
    fc.weight, fc.bias                   fusion_fc.weight, fusion_fc.bias      fc.weight, fc.bias
    layers.0.self_attn.q_proj.weight     transformer.self_attn.q_proj.weight   model.layers.0.self_attn.q_proj.weight
    embed_tokens.weight                  -                                     not read: the target's own

Safetensors only, as for every model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from millstream_runtime.draft_head_tensors import eagle1_name, names_here
from millstream_runtime.draft_heads import EAGLE1_OTHER_HEADS, LAYER_SECTION
from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.models.config.fields import Fields
from millstream_runtime.models.config.model_config import ModelConfig, common_fields
from millstream_runtime.models.loading.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class EagleShape:
    """What a head's folder says of it. `config`: of its layers, with the target's vocabulary."""

    config: ModelConfig
    fusion_bias: bool
    output_bias: bool  # of attention; `config.attention_bias` is that of queries, keys and values

    def state_layers(self, num_layers: int) -> tuple[int, ...]:
        """It reads a target of `num_layers` behind the last."""
        return (num_layers,)


def read_eagle_folder(folder: Path) -> EagleShape:
    """Read config.json and the headers of the weights.

    Raises:
        RuntimeFailure: CheckpointInvalid, or UnsupportedByRuntime where it is another head than EAGLE-1's.
    """
    path = folder / "config.json"
    outer = Fields(path)
    _refuse_other_heads(outer)
    inner = outer.section(LAYER_SECTION) or outer
    output_bias = inner.flag("attention_bias")
    biases = {"attention_bias": output_bias or inner.flag("qkv_bias")}
    # `speculators` names no architecture of the layer; the published heads of other families have Llama's layer, too.
    fields = Fields(path, {**inner.values, **biases, "architectures": ["LlamaForCausalLM"]})
    config = ModelConfig(**common_fields(fields))
    if config.quantization is not None:
        raise fields.unsupported("quantization_config", config.quantization.method, "EAGLE heads of 16 and 32 bits")
    with open_eagle_checkpoint(folder) as checkpoint:
        return EagleShape(config, "fc.bias" in checkpoint, output_bias)


def open_eagle_checkpoint(folder: Path) -> Checkpoint:
    """Open the weights by the names of this module. Raises RuntimeFailure: as `Checkpoint`."""
    return Checkpoint(folder, _names)


def refuse_unknown_tensors(folder: Path, names: Iterable[str], expected: Iterable[str], kind: str) -> None:
    """Refuse a tensor that the head has no place for: it would be another head than the one that was trained.

    `kind`: of the head, with its article. Raises RuntimeFailure: CheckpointInvalid.
    """
    unknown = sorted({*names} - {*expected})
    if not unknown:
        return
    raise RuntimeFailure(
        FailureReason.CHECKPOINT_INVALID,
        f"{folder}: tensor {unknown[0]:.200} is no part of {kind} of this config.json"
        + (f", nor are {len(unknown) - 1} others" if len(unknown) > 1 else "")
        + f"; name the folder of {kind}.",
    )


def _names(stored: Iterable[str]) -> dict[str, str]:
    return names_here(stored, eagle1_name)


def _refuse_other_heads(fields: Fields) -> None:
    kind = fields.get("speculators_model_type", "eagle")
    if kind != "eagle":
        raise fields.unsupported("speculators_model_type", kind, "eagle and eagle3")
    for name in EAGLE1_OTHER_HEADS:
        if fields.get(name):
            raise fields.unsupported(name, fields.get(name), "EAGLE-1 heads, which have no such field")
