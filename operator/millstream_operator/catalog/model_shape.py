"""ModelShape: what the planner must know about a model. Nothing about how it computes.

Made from any Hugging Face config.json by `catalog/read_shape.py`, without torch and without the weights.
Parameter counts are those of the checkpoint's tensors; a test holds them within 1 % of `transformers`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from millstream_operator.catalog.checkpoint_quantization import CheckpointQuantization

VOCABULARY_PADDING = 64  # rows of the embedding are padded to a multiple, so that ranks get whole tiles


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Counts by part. What a rank of a tensor-parallel group holds of each differs."""

    embedding: int
    attention: int
    mlp: int  # dense MLPs, and experts that every token passes (shared experts)
    experts: int  # routed experts, all of them
    routers: int
    norms: int
    head: int  # 0 where it is tied to the embedding

    @property
    def total(self) -> int:
        return self.embedding + self.attention + self.mlp + self.experts + self.routers + self.norms + self.head

    @property
    def linear(self) -> int:
        """What quantisation applies to: the projections inside the layers."""
        return self.attention + self.mlp + self.experts


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftHead:
    """What makes a shape that of a draft head, which reads the hidden states of one target.

    Attributes:
        kind: a word of `millstream_runtime.draft_heads`.
        vocab_size: of the target.
        target_hidden_size: of the hidden states that it reads.
        states: how many of them the runtime keeps per token.
        state_layers: the layers of the target before which it reads them; None: by the target's depth.
        drafts_per_pass: tokens that one pass over its weights drafts.
        uses_target_head: whether each draft also reads the target's output head.
        has_keys: whether it attends, and so keeps keys and values.
    """

    kind: str
    vocab_size: int
    target_hidden_size: int
    states: int = 1
    state_layers: tuple[int, ...] | None = None
    drafts_per_pass: int = 1
    uses_target_head: bool = False
    has_keys: bool = True


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """One model. Sizes in elements, lengths in tokens."""

    family: str  # Hugging Face's model_type: llama, qwen2, deepseek_v3, …
    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_sizes: tuple[int, ...]  # every MLP width that tensor parallelism would cut
    vocab_size: int
    max_position_embeddings: int
    parameters: Parameters
    kv_projection_parameters: int = 0  # of `attention`: makes keys and values, so it is copied with replicated heads
    replicated_attention_parameters: int = 0  # of `attention`: whole on every rank (MLA's down projections)
    latent_kv_elements: int | None = None  # MLA: latent rank + RoPE dims of one layer; None for ordinary heads
    num_experts: int = 0
    num_experts_per_token: int = 0
    weight_bytes: int = 2  # of one weight in the files: 2 for 16 bit, 4 for float32
    quantization: CheckpointQuantization | None = None
    # Not part of `repr`, which is hashed: what older versions did not know.
    unquantized_parameters: int = field(
        default=0, repr=False
    )  # of `parameters.linear`: a quantised one keeps in 16 bit
    latent_up_parameters: int = field(default=0, repr=False)  # of `attention`: MLA's `kv_b_proj`
    # Quantised in the checkpoint, and not where it is computed with: the runtime dequantises `kv_b_proj` once.
    dequantized_parameters: int = field(default=0, repr=False)
    extra_parameters: int = field(default=0, repr=False)  # that a checkpoint may hold besides: heads that draft tokens
    # What rope scaling allows beyond `max_position_embeddings`, to those who ask for it.
    extended_context_tokens: int | None = field(default=None, repr=False)
    dtype: str = field(default="BF16", repr=False)  # in which a GPU computes with weights that are not quantised
    # How many layers have which sliding window, in tokens (None: they attend to all); () where no layer has one.
    windowed_layers: tuple[tuple[int | None, int], ...] = field(default=(), repr=False)
    # `intermediate_size` of the file: the runtime counts a step on a CPU by it, also if no layer is so wide. 0: one is.
    named_intermediate_size: int = field(default=0, repr=False)
    draft_head: DraftHead | None = field(default=None, repr=False)  # None: the shape of a whole model
    is_gguf: bool = field(default=False, repr=False)  # the weights are in GGUF files, quantised or not
    gguf_left_out: str = field(default="", repr=False)  # a GGUF file of the source whose *.safetensors are served

    @property
    def longest_context_tokens(self) -> int:
        """The largest `engine.maxModelLen` that the runtime accepts."""
        return self.extended_context_tokens or self.max_position_embeddings

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer, those of one window together; () where no layer has one."""
        return tuple(tokens for tokens, layers in self.windowed_layers for _ in range(layers))

    @property
    def compute_bytes(self) -> int:
        """Of one value in `dtype`: what the runtime keeps in GPU memory of weights, keys, values and activations."""
        return 4 if self.dtype == "FP32" else 2

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that one token multiplies with: all but the other experts and the embedding's other rows."""
        p = self.parameters
        share = self.num_experts_per_token / self.num_experts if self.num_experts else 0.0
        head = p.head or p.embedding
        return p.attention + p.mlp + p.routers + p.norms + head + round(p.experts * share)

    @cached_property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // VOCABULARY_PADDING) * VOCABULARY_PADDING

    def kv_heads_per_rank(self, tensor_parallel_size: int) -> int:
        """Whole heads: with more ranks than heads each head lives on several ranks."""
        return max(1, self.num_kv_heads // tensor_parallel_size)

    def kv_elements_per_token(self, tensor_parallel_size: int = 1, num_layers: int | None = None) -> int:
        """Elements of keys and values (or latents) that one rank keeps for one token.

        MLA's latent belongs to all heads, so every rank keeps the whole of it. Layers with a sliding window are
        counted in full, as they are where all layers share a block table; `sizing/kv_pool.py` knows the other layout.
        """
        layers = self.num_layers if num_layers is None else num_layers
        if self.latent_kv_elements is not None:
            return layers * self.latent_kv_elements
        return 2 * layers * self.kv_heads_per_rank(tensor_parallel_size) * self.head_size
