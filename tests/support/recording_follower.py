"""A rank beyond 0 on a CPU whose graphs are tapes: `python -m tests.support.recording_follower LINK LIFELINE`.

`REFUSED_AFTER` in the environment: recordings after which it refuses more.
"""

from __future__ import annotations

import os

import torch

from millstream_runtime.distributed.follower import run
from tests.support.tape_recorder import TapeRecorder

MODULE = "tests.support.recording_follower"
REFUSED_AFTER = "MILLSTREAM_TEST_REFUSED_AFTER"


def recorder(device: torch.device) -> TapeRecorder:
    """The recorder of a device."""
    asked = os.environ.get(REFUSED_AFTER)
    return TapeRecorder(None if asked is None else int(asked))


if __name__ == "__main__":
    run(recorder)
