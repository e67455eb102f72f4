"""From safetensors to layers: each tensor is checked before it is used."""
