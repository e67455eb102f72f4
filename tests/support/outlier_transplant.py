"""Give a checkpoint the outlier channels of large models, without changing what it computes.

    norm.weight[c] *= s          the norm's output of channel c grows by s
    next.weight[:, c] /= s       and the weights that read it shrink by s

Models of billions of parameters have a few channels with activations tens of times the others (Dettmers et al.,
LLM.int8(), 2022), and weights that are small there and matter most. Rounding a group of weights to one step loses just
those; methods that look at activations (AWQ, SmoothQuant) exist for them. Small models have none, so on a small model
such a method cannot be told from plain rounding. This puts them there.
"""

from __future__ import annotations

import torch

# Of each decoder layer in Llama's naming: a norm, and the linear layers that read its output.
READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
SHARE = 0.02  # of the channels of a norm
LEAST, MOST = 8.0, 64.0  # drawn log-uniformly


def transplant_outliers(weights: dict[str, torch.Tensor], seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the weights of a Llama-shaped checkpoint with outlier channels, float32: the same function.

    Args:
        weights: by name; a norm `[hidden]`, a reader `[out, hidden]`.
    """
    changed = {name: weight.float().clone() for name, weight in weights.items()}
    generator = torch.Generator().manual_seed(seed)
    for name in sorted(weights):
        layer, _, norm = name.removesuffix(".weight").rpartition(".")
        if norm in READERS:
            size = len(weights[name])
            channels = torch.randperm(size, generator=generator)[: max(1, round(SHARE * size))]
            exponents = torch.rand(len(channels), generator=generator)
            scales = LEAST * (MOST / LEAST) ** exponents
            changed[name][channels] *= scales
            for reader in READERS[norm]:
                changed[f"{layer}.{reader}.weight"][:, channels] /= scales
    return changed
