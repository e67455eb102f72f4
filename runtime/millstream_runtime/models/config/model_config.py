"""config.json -> ModelConfig: what all families share of a model's shape, read without importing it.

`transformers` 5 writes `rope_parameters` and `dtype`; older folders have `rope_theta`, `rope_scaling` and
`torch_dtype`. Both are read. Nothing here executes code from the folder. What only one family has is read in that
family's file; `registry.load_model_config` puts both together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from millstream_runtime.context_limit import extended_context_tokens
from millstream_runtime.kv_layout import longest_window
from millstream_runtime.layer_windows import WindowError, Windows, layer_windows
from millstream_runtime.model_families import windows_of_architecture
from millstream_runtime.models.config.fields import Fields
from millstream_runtime.models.config.rope_config import RopeConfig, read_rope
from millstream_runtime.quantization_config.scheme import QuantizationScheme, read_scheme
from millstream_runtime.tokenizing.folder.folder_text import end_token_ids

LAYERS_LIMIT = 1024


OTHER_NAMES_OF_ACTIVATIONS = {"swish": "silu"}  # one function, as in transformers


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of one model. Lengths in tokens. A family with more to say subclasses it in its own file."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    checkpoint_dtype: str  # what the folder says its weights are; the loader trusts the files instead
    max_position_embeddings: int
    eos_token_ids: frozenset[int]
    max_model_len: int  # prompt and answer together; starts as max_position_embeddings, the engine may lower it
    extended_context_tokens: int | None = None  # what rope scaling allows beyond max_position_embeddings
    quantization: QuantizationScheme | None = None  # of linear layers; None: 16 or 32 bit
    windows: Windows = ()

    @property
    def longest_context_tokens(self) -> int:
        """The largest `max_model_len` that may be asked for."""
        return self.extended_context_tokens or self.max_position_embeddings

    def window(self, layer: int) -> int | None:
        """How many tokens, itself included, a token of this layer sees; None is all."""
        return self.windows[layer] if self.windows else None

    @property
    def longest_window(self) -> int | None:
        """Tokens that some later token may still read; None where a layer reads all. Older KV blocks may be freed."""
        return longest_window(self.windows)

    @property
    def has_plain_attention(self) -> bool:
        """Whether every layer attends to all tokens before, by the softmax of scaled products and nothing else."""
        return all(window is None or window >= self.max_model_len for window in self.windows)

    @property
    def has_experts(self) -> bool:
        """Whether some layers are mixtures of experts."""
        return False

    @property
    def kv_shape(self) -> tuple[int, int]:
        """What the KV pool keeps of one token in one layer: `(rows, elements)`; here all keys, then all values."""
        return 2 * self.num_kv_heads, self.head_dim

    @property
    def rotary_head_dim(self) -> int:
        """Size of what the rotary embedding takes for a head."""
        return self.head_dim

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of keys and values that one token keeps in all layers."""
        rows, elements = self.kv_shape
        return self.num_layers * rows * elements * dtype_bytes

    @property
    def rope_switch_tokens(self) -> int | None:
        """Beyond this length a sequence turns by other angles, from its first token on (longrope); None: never."""
        switch = self.rope.original_max_position_embeddings
        return switch if self.rope.type == "longrope" and self.max_model_len > switch else None

    def rotary_offset(self, num_known_tokens: int) -> int:
        """What to add to a position for its row in the rotary table, in a sequence of that many known tokens."""
        switch = self.rope_switch_tokens
        return self.max_model_len if switch is not None and num_known_tokens > switch else 0

    def must_recompute(self, num_known_tokens: int) -> bool:
        """Whether the token that made a sequence this long put its cached keys at wrong angles (longrope)."""
        return self.rope_switch_tokens is not None and num_known_tokens == self.rope_switch_tokens + 1

    def tokens_at_same_angles(self, num_known_tokens: int) -> int:
        """How many tokens behind the known ones have keys at the same angles as these (longrope)."""
        switch = self.rope_switch_tokens
        end = switch if switch is not None and num_known_tokens <= switch else self.max_model_len
        return end - num_known_tokens


def common_fields(
    fields: Fields,
    *,
    head_dim: int | None = None,
    activation: tuple[str, str] = ("hidden_act", "silu"),
    rope: RopeConfig | None = None,
) -> dict[str, Any]:
    """The arguments of ModelConfig that every family's config.json has; a family adds or replaces the rest.

    Args:
        fields: with the class defaults of the family.
        head_dim: where the file does not say and it is not hidden_size / num_attention_heads.
        activation: field and the one value that this family's MLP computes.
        rope: already read, by a family with its own rules.

    Raises:
        RuntimeFailure: CheckpointInvalid or UnsupportedByRuntime, naming the field.
    """
    _refuse_unsupported(fields, *activation)
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    head_dim = fields.integer("head_dim", head_dim or hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise fields.invalid("num_key_value_heads", f"{num_kv_heads}; it must divide num_attention_heads ({num_heads})")
    if head_dim % 2:
        raise fields.invalid("head_dim", f"{head_dim}; rotary embedding needs an even number")
    max_position_embeddings = fields.integer("max_position_embeddings")
    num_layers = fields.integer("num_hidden_layers", maximum=LAYERS_LIMIT)
    return {
        "architecture": architecture_of(fields),
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": fields.number("rms_norm_eps"),
        "rope": rope or read_rope(fields, head_dim),
        "tie_word_embeddings": fields.flag("tie_word_embeddings"),
        "attention_bias": fields.flag("attention_bias"),
        "mlp_bias": fields.flag("mlp_bias"),
        "checkpoint_dtype": str(fields.get("dtype") or fields.get("torch_dtype") or "float32"),
        "max_position_embeddings": max_position_embeddings,
        "extended_context_tokens": extended_context_tokens(fields.values, max_position_embeddings),
        "eos_token_ids": end_token_ids(fields.path, fields.values),
        "max_model_len": max_position_embeddings,
        "quantization": _quantization(fields),
        "windows": _windows(fields, num_layers),
    }


def architecture_of(fields: Fields) -> str:
    """The first of `architectures`."""
    names = fields.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise fields.invalid("architectures", f'{names!r}; it must be a list such as ["LlamaForCausalLM"]')
    return str(names[0])


def _windows(fields: Fields, num_layers: int) -> Windows:
    """By the rule of the family."""
    try:
        return layer_windows(fields.values, num_layers, windows_of_architecture(architecture_of(fields)))
    except WindowError as error:
        raise fields.invalid(error.field, error.what) from None


def _quantization(fields: Fields) -> QuantizationScheme | None:
    """Of `quantization_config`, or of `compression_config`, as it was called before."""
    for name in ("quantization_config", "compression_config"):
        values = fields.get(name)
        if values is None or values == {}:
            continue
        if not isinstance(values, dict):
            raise fields.invalid(name, f"{values!r:.80}; it must be an object, or absent")
        return read_scheme(values, f"{fields.path}")
    return None


def _refuse_unsupported(fields: Fields, activation_field: str, activation: str) -> None:
    said = fields.get(activation_field, activation)
    if OTHER_NAMES_OF_ACTIVATIONS.get(str(said), said) != activation:
        raise fields.unsupported(activation_field, fields.get(activation_field), activation)
    if fields.get("use_bidirectional_attention"):
        raise fields.unsupported("use_bidirectional_attention", True, "causal attention")
