"""The engine: requests in, tokens out; one synchronous step at a time."""

import os

# GNU OpenMP lets a thread that waits for the next parallel region spin for milliseconds. Alone on the machine that
# is quick; next to any other busy process, spinners take the cores from the threads that they wait for (measured on
# two shared cores: 150 ms a step instead of 8). 30,000 rounds, some tens of microseconds, bridge the gaps within a
# step and no more. libgomp reads this once, when torch is first imported: so it is set before, here.
os.environ.setdefault("GOMP_SPINCOUNT", "30000")

# What oneDNN keeps of the code that it writes, one piece for each shape of product: in pieces, and torch keeps as many
# once more. Its default of 1,024 is most of a GiB (see `models.two_layouts`); these are a fifth of that, and as many
# as decodes of up to 16 requests and some twenty sizes of prompt chunk need in a model with five shapes of weight.
for _cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_cache, "192")
