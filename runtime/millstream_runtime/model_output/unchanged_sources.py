"""Whether the models that a run reads for hours are those that it began with.

A resumed run is refused by `job.json` of its work folder; a folder that is replaced while the run reads it is found
here, before anything is made of the old and the new weights together.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from millstream_runtime.errors import FailureReason, RuntimeFailure


class UnchangedSources:
    """`folders` as they are now. `digest`: of one; files that cannot be read are an OSError, here and later."""

    def __init__(self, folders: tuple[Path, ...], digest: Callable[[Path], object]) -> None:
        self._folders, self._digest = folders, digest
        self._seen = [digest(folder) for folder in folders]

    def require(self) -> None:
        """Raises RuntimeFailure: CheckpointInvalid, one of them has changed."""
        for folder, seen in zip(self._folders, self._seen, strict=True):
            if self._digest(folder) != seen:
                raise RuntimeFailure(
                    FailureReason.CHECKPOINT_INVALID,
                    f"{folder} was changed while this run read it, so the result would be of both: nothing is made. "
                    "Give --discard-other-work to begin again with what is there now.",
                )
