"""The engine: requests in, tokens out; one synchronous step at a time."""

import os

# GNU OpenMP lets a thread that waits for the next parallel region spin for milliseconds. Alone on the machine that
# is quick; beside any other busy process, spinners take the cores from the very threads they wait for (measured on
# two shared cores: 150 ms a step instead of 8). 30,000 rounds, some tens of microseconds, bridge the gaps within a
# step and no more. libgomp reads this once, when torch is first imported: so it is set before, here.
os.environ.setdefault("GOMP_SPINCOUNT", "30000")
