"""The folder of an EAGLE-1 head, in either of its two layouts: config.json and names of tensors.

published (SafeAILab/EAGLE)          `speculators` (vllm-project)          here
config.json: a Llama's fields        transformer_layer_config: the same    `EagleShape.config`
fc.weight, fc.bias                   fusion_fc.weight, fusion_fc.bias      fc.weight, fc.bias
layers.0.self_attn.q_proj.weight     transformer.self_attn.q_proj.weight   model.layers.0.self_attn.q_proj.weight
embed_tokens.weight                  -                                     not read: the target's own
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from millstream_runtime.draft_heads import EAGLE1_OTHER_HEADS, LAYER_SECTION
from millstream_runtime.models.config.fields import Fields
from millstream_runtime.models.config.model_config import ModelConfig
from millstream_runtime.models.eagle.layer_config import read_layer_config
from millstream_runtime.models.loading.head_checkpoint import EAGLE1_HEAD, open_head_checkpoint


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
    layer = read_layer_config(path, outer.section(LAYER_SECTION) or outer)
    with open_head_checkpoint(folder, EAGLE1_HEAD) as checkpoint:
        return EagleShape(layer.config, "fc.bias" in checkpoint, layer.output_bias)


def _refuse_other_heads(fields: Fields) -> None:
    kind = fields.get("speculators_model_type", "eagle")
    if kind != "eagle":
        raise fields.unsupported("speculators_model_type", kind, "eagle and eagle3")
    for name in EAGLE1_OTHER_HEADS:
        if fields.get(name):
            raise fields.unsupported(name, fields.get(name), "EAGLE-1 heads, which have no such field")
