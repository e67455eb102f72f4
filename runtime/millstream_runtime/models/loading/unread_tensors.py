"""Refuse a checkpoint with a tensor of the language model that no layer reads: the model would be another one.

What a checkpoint may hold besides is `LEFT_OUT`: it changes no answer. A rotation that is computed in the forward pass
(SpinQuant's R4), or a bias that config.json does not know, changes every one.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.models.config.model_config import ModelConfig
from millstream_runtime.models.loading.checkpoint import HEAD_NAME
from millstream_runtime.models.loading.gguf_checkpoint import BLOCKS, WEIGHT
from millstream_runtime.models.loading.kv_scales import KEY_NAMES, VALUE_NAMES
from millstream_runtime.models.loading.tensor_store import FLOAT_DTYPES, TensorStore

_LAYER = re.compile(r"(?:model\.layers|blk)\.([0-9]{1,5})\.")
_SCALES = "|".join(re.escape(name) for name in sorted({*KEY_NAMES, *VALUE_NAMES}))
# Patterns of whole names, each with why nothing is lost.
LEFT_OUT = {
    # Angles are computed from config.json; the factors of GGUF's Llama 3 are read with the metadata.
    r"(.*\.)?rotary_emb\..*|rope_freqs\.weight|blk\.\d+\.attn_rot_embd(\..*)?": "angles of the rotary embedding",
    r"(.*\.)?(attn|self_attn|attention)\.(bias|masked_bias)": "causal masks, which old checkpoints stored as buffers",
    rf"(.*\.)?(self_attn|attn)\.({_SCALES})": "scales of an FP8 KV cache, which are read for one",
    r"(.*\.)?(self_attn|attn)\.(attn\.)?(q_scale|prob_scale|[kqv]_zero_point)": "numbers of an FP8 attention",
    r"(model\.)?(mtp|medusa_heads?|eagle|draft)(\.|_).*|blk\.\d+\.nextn\..*": "heads that draft tokens",
    r"v_head\..*|value_head\..*": "a head of reinforcement learning, which rates answers",
    r"(model\.)?(vision_tower|vision_model|visual|audio_tower|audio_model|multi_modal_projector|mm_projector"
    r"|audio_projector|image_newline|embed_vision|embed_audio)(\..*)?": "towers of other inputs, and their projectors",
}
# Of a quantized module: activations are computed in the model's own type, or scaled by what they hold.
OF_ACTIVATIONS = re.compile(
    r".*\.(input_scale|input_scale_ub|input_zero_point|output_scale|output_zero_point|activation_scale)"
)
# Nothing is added where all of it is zero: old GPTQ tools wrote a bias for every module.
ZERO_CHANGES_NOTHING = re.compile(r".*\.(bias|weight_zero_point)")
_LEFT_OUT = re.compile("|".join(f"(?:{pattern})" for pattern in LEFT_OUT))


def refuse_unread(checkpoint: TensorStore, expected: Collection[str], config: ModelConfig) -> None:
    """Refuse a tensor that is neither `expected` nor one of those that change no answer.

    Raises:
        RuntimeFailure: CheckpointInvalid, naming file and tensor.
    """
    weights_in_blocks = {f"{name.removesuffix(BLOCKS)}{WEIGHT}" for name in expected if name.endswith(BLOCKS)}
    others_in_files = checkpoint.names - {*expected} - weights_in_blocks
    unread = [name for name in others_in_files if not _may_be_unread(name, checkpoint, config)]
    if not unread:
        return
    name, others = min(unread), len(unread) - 1
    raise RuntimeFailure(
        FailureReason.CHECKPOINT_INVALID,
        f"{checkpoint.path_of(name)}: tensor {name:.200} is read by no layer of a {config.architecture} with this "
        "config.json"
        + (f", nor {'are' if others > 1 else 'is'} {others} other{'s' if others > 1 else ''}" if others else "")
        + ", so the answers would not be the model's: correct config.json if a field is missing, take a folder of "
        "another format, or remove the tensor if it changes nothing.",
    )


def _may_be_unread(name: str, checkpoint: TensorStore, config: ModelConfig) -> bool:
    layer = _LAYER.match(name)
    if layer is not None and int(layer.group(1)) >= config.num_layers:
        return True  # layers that draft tokens (MTP), or that config.json cuts off
    if name == HEAD_NAME and config.tie_word_embeddings:
        return True  # `with_stored_head` has found the embedding in it
    if _LEFT_OUT.fullmatch(name) is not None:
        return True
    if config.quantization is not None and OF_ACTIVATIONS.fullmatch(name) is not None:
        return True
    return ZERO_CHANGES_NOTHING.fullmatch(name) is not None and _is_zero(name, checkpoint)


def _is_zero(name: str, checkpoint: TensorStore) -> bool:
    stored = checkpoint.described(name)
    if stored is None or stored.dtype not in (*FLOAT_DTYPES, "I8", "I32"):
        return False
    done = checkpoint.bytes_read
    is_zero = not bool(checkpoint.read(name).any())
    checkpoint.bytes_read = done  # progress counts what is loaded
    return is_zero
