"""Whether a model whose config.json ties the output head to the embedding has a head of its own in its files.

A fine-tune that trained the head (`modules_to_save` of a merged LoRA) often keeps `tie_word_embeddings: true` of its
base. `transformers` 5 compares the two tensors and keeps the stored head where they differ; so does this.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from millstream_runtime.errors import RuntimeFailure
from millstream_runtime.logs import log
from millstream_runtime.models.config.model_config import ModelConfig
from millstream_runtime.models.loading.checkpoint import EMBEDDING_NAME, HEAD_NAME, Checkpoint
from millstream_runtime.models.loading.tensor_store import FLOAT_DTYPES, TensorStore

ROWS_AT_ONCE = 4096


def with_stored_head(config: ModelConfig, folder: Path) -> ModelConfig:
    """Return `config`, not tied where the folder's *.safetensors hold another head than the embedding.

    Files that cannot be read leave it as it is: loading names them.
    """
    if not config.tie_word_embeddings or not any(folder.glob("*.safetensors")):
        return config
    try:
        with Checkpoint(folder) as checkpoint:
            if not has_own_head(checkpoint):
                return config
    except RuntimeFailure:
        return config
    log.warning(
        "head_not_tied",
        file=str(folder / "config.json"),
        about=f"tie_word_embeddings is true, and {HEAD_NAME} of the checkpoint differs from the embedding: the stored "
        "head is used; write tie_word_embeddings false",
    )
    return replace(config, tie_word_embeddings=False)


def has_own_head(checkpoint: TensorStore) -> bool:
    """Whether the checkpoint stores a head with other numbers than the embedding's. Reads both until they differ."""
    head, embedding = checkpoint.described(HEAD_NAME), checkpoint.described(EMBEDDING_NAME)
    if head is None or embedding is None:
        return False
    if head.shape != embedding.shape or len(head.shape) != 2 or not {head.dtype, embedding.dtype} <= {*FLOAT_DTYPES}:
        return True
    rows, columns = head.shape
    for first in range(0, rows, ROWS_AT_ONCE):
        kept = [(range(first, min(first + ROWS_AT_ONCE, rows)),), (range(columns),)]
        both = (checkpoint.read_cut(name, kept) for name in (HEAD_NAME, EMBEDDING_NAME))
        if not torch.equal(*(part.to(torch.promote_types(part.dtype, torch.float32)) for part in both)):
            return True
    return False
