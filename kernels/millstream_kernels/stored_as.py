"""How a paged pool keeps keys and values: what is stored, and what it is multiplied by."""

from __future__ import annotations

from enum import IntEnum

import torch


class StoredAs(IntEnum):
    """How the pool keeps a number."""

    NUMBERS = 0  # in the model's type
    INT8 = 1  # code * scale of its token and head
    E4M3 = 2  # code * scale of its head

    @classmethod
    def of(cls, dtype: torch.dtype) -> StoredAs:
        """By the type of what is stored: int8; uint8, the bits of float8_e4m3fn; or the model's."""
        return {torch.int8: cls.INT8, torch.uint8: cls.E4M3}.get(dtype, cls.NUMBERS)
