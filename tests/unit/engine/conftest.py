"""Fixtures: random Llama folders, and engines on them, with drafts and without."""

from tests.support.drafting_engines import (
    drafted,
    drafts_catch_up_by_fixed_chunks,
    eagle_headed,
    eagle_treed,
    medusa_headed,
    medusa_treed,
)
from tests.support.eagle_heads import write_head
from tests.support.engines import _two_threads, make_engine, one_thread, write_model
from tests.support.ways import alone

__all__ = [
    "_two_threads",
    "alone",
    "drafted",
    "drafts_catch_up_by_fixed_chunks",
    "eagle_headed",
    "eagle_treed",
    "make_engine",
    "medusa_headed",
    "medusa_treed",
    "one_thread",
    "write_head",
    "write_model",
]
