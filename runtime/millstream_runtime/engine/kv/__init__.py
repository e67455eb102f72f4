"""The KV pool: its tensors and its size."""
