"""Fixtures: random Llama folders and engines on them."""

from tests.support.eagle_heads import write_head
from tests.support.engines import _two_threads, make_engine, one_thread, write_model

__all__ = ["_two_threads", "make_engine", "one_thread", "write_head", "write_model"]
