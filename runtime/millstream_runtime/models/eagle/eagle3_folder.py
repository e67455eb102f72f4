"""The folder of an EAGLE-3 head (Li et al. 2025, arXiv 2503.01840), in either of its layouts.

published (SafeAILab/EAGLE)            `speculators` (vllm-project)             here
config.json: a Llama's fields          transformer_layer_config: the same       `Eagle3Shape.config`
draft_vocab_size                       draft_vocab_size                         `Eagle3Shape.draft_vocab_size`
midlayer.self_attn.q_proj.weight       layers.0.self_attn.q_proj.weight         model.layers.0.self_attn.q_proj...
fc.weight, norm.weight, lm_head.weight the same                                 the same
d2t, t2d                               the same                                 d2t; t2d follows from it
embed_tokens.weight                    the same                                 not read: the target's own
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from millstream_runtime.draft_head_tensors import D2T, EAGLE3_STATES
from millstream_runtime.draft_heads import EAGLE3_OTHER_HEADS, LAYER_IDS, LAYER_IDS_SECTION, LAYER_SECTION
from millstream_runtime.models.config.fields import Fields
from millstream_runtime.models.config.model_config import ModelConfig
from millstream_runtime.models.eagle.layer_config import read_layer_config
from millstream_runtime.models.loading.head_checkpoint import EAGLE3_HEAD, open_head_checkpoint


@dataclass(frozen=True, slots=True)
class Eagle3Shape:
    """What a head's folder says of it.

    Attributes: `config`, of its layer, with the target's vocabulary; `draft_vocab_size`, tokens that it proposes;
    `has_token_table`, whether `d2t` says which these are; `layer_ids`, the layers of the target before which it reads
    the hidden state, None: by the target's depth; `norm_before_residual`, whether its residual stream begins behind the
    norm of the hidden states; `output_bias`, of attention.
    """

    config: ModelConfig
    draft_vocab_size: int
    has_token_table: bool
    layer_ids: tuple[int, ...] | None
    norm_before_residual: bool
    output_bias: bool
    target_hidden_size: int

    def state_layers(self, num_layers: int) -> tuple[int, ...]:
        """The layers of a target of `num_layers` before which it reads; that number: behind the last."""
        return self.layer_ids or (2, num_layers // 2, num_layers - 3)


def read_eagle3_folder(folder: Path) -> Eagle3Shape:
    """Read config.json and the headers of the weights.

    Raises:
        RuntimeFailure: CheckpointInvalid, or UnsupportedByRuntime where it is another head.
    """
    path = folder / "config.json"
    outer = Fields(path)
    inner = outer.section(LAYER_SECTION) or outer
    for name in EAGLE3_OTHER_HEADS:
        if outer.get(name):
            raise outer.unsupported(name, outer.get(name), "EAGLE-3 heads without it")
    fields, config, output_bias = read_layer_config(path, inner)
    if config.num_layers != 1:
        raise fields.unsupported("num_hidden_layers", config.num_layers, "EAGLE-3 heads of one layer")
    draft_vocab_size = outer.integer("draft_vocab_size", config.vocab_size)
    with open_head_checkpoint(folder, EAGLE3_HEAD) as checkpoint:
        has_table = D2T in checkpoint
    if draft_vocab_size > config.vocab_size or (draft_vocab_size < config.vocab_size and not has_table):
        raise outer.invalid(
            "draft_vocab_size",
            f"{draft_vocab_size}, and vocab_size is {config.vocab_size}; it must be smaller, with a tensor d2t that "
            "says which tokens these are, or the same",
        )
    return Eagle3Shape(
        config=config,
        draft_vocab_size=draft_vocab_size,
        has_token_table=has_table,
        layer_ids=_layer_ids(outer),
        norm_before_residual=outer.flag("norm_before_residual"),
        output_bias=output_bias,
        target_hidden_size=outer.integer("target_hidden_size", config.hidden_size),
    )


def _layer_ids(fields: Fields) -> tuple[int, ...] | None:
    section = fields if fields.get(LAYER_IDS) is not None else fields.section(LAYER_IDS_SECTION) or fields
    found = section.get(LAYER_IDS)
    if found is None:
        return None
    is_list = isinstance(found, list) and len(found) == EAGLE3_STATES
    if not is_list or not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in found):
        raise section.invalid(LAYER_IDS, f"{found!r:.60}; it must be a list of {EAGLE3_STATES} numbers of layers")
    return tuple(found)
