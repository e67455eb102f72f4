"""A model with fewer layers, to be trained on: those that are left know most of what all of them knew.

A pass of a small draft model takes nearly as long as it has layers, whatever their width: each is some forty small
operations. Evenly spaced layers, the first and the last among them, are the best start (Sajjad et al. 2020,
arXiv 2004.03844; Fan et al. 2019, arXiv 1909.11556).
"""

from __future__ import annotations

from torch import nn
from transformers import LlamaForCausalLM


def drop_layers(model: LlamaForCausalLM, num_layers: int) -> LlamaForCausalLM:
    """Keep `num_layers` of the layers, in place; a model that has no more than these stays as it is."""
    layers = list(model.model.layers)
    if num_layers >= len(layers):
        return model
    kept = kept_layers(len(layers), num_layers)
    model.model.layers = nn.ModuleList(layers[index] for index in kept)
    for place, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = place
    model.config.num_hidden_layers = num_layers
    return model


def kept_layers(num_layers: int, num_kept: int) -> list[int]:
    """Return which layers stay, evenly spaced from the first to the last; the first alone where only one does."""
    if num_kept == 1:
        return [0]
    return [round(place * (num_layers - 1) / (num_kept - 1)) for place in range(num_kept)]
