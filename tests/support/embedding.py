"""The weight of a loaded model's embedding, for tests that damage it."""

from __future__ import annotations

from torch import Tensor

from millstream_runtime.models.layers.decoder import Decoder
from millstream_runtime.models.linear.tables import DenseTable


def embedding_weight(model: Decoder) -> Tensor:
    """`[vocab, hidden]`: of a model whose weights are held as it computes."""
    table = model._embedding.table
    assert isinstance(table, DenseTable)
    return table.weight
