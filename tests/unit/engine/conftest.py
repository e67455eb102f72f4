"""Fixtures: random Llama folders and engines on them."""

from tests.support.eagle_heads import write_head
from tests.support.engines import _two_threads, make_engine, one_thread, write_model
from tests.support.ways import alone, drafts_catch_up_by_fixed_chunks

__all__ = [
    "_two_threads",
    "alone",
    "drafts_catch_up_by_fixed_chunks",
    "make_engine",
    "one_thread",
    "write_head",
    "write_model",
]
