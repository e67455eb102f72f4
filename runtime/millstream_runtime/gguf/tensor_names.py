"""Names of tensors: llama.cpp's to those of a Hugging Face checkpoint.

token_embd.weight       model.embed_tokens.weight
blk.7.attn_q.weight     model.layers.7.self_attn.q_proj.weight
"""

from __future__ import annotations

import re

_FIXED = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LINEAR = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS = {
    "attn_norm": "input_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
}
# Gemma has four norms a layer: the one before the MLP is called as Llama's, which is after attention.
_GEMMA_NORMS = _NORMS | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OF_LAYER = re.compile(r"blk\.([0-9]{1,4})\.([a-z_]+)\.(weight|bias)")


def hugging_face_name(name: str, *, is_gemma: bool) -> str | None:
    """The name of a tensor as checkpoints of Hugging Face have it; None for one that no model here reads."""
    if name in _FIXED:
        return _FIXED[name]
    match = _OF_LAYER.fullmatch(name)
    if match is None:
        return None
    layer, part, suffix = match.groups()
    module = (LINEAR | (_GEMMA_NORMS if is_gemma else _NORMS)).get(part)
    return None if module is None else f"model.layers.{int(layer)}.{module}.{suffix}"


def llama_cpp_name(name: str) -> str:
    """The inverse, for models other than Gemma. Raises ValueError: llama.cpp has no name for it."""
    for theirs, ours in _FIXED.items():
        if ours == name:
            return theirs
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    module, _, suffix = rest.rpartition(".")
    for theirs, ours in (LINEAR | _NORMS).items():
        if ours == module and layer.isdecimal():
            return f"blk.{layer}.{theirs}.{suffix}"
    raise ValueError(f"llama.cpp has no name for {name}")
