"""The report of a draft that is not better, kept in the work folder in the place of the draft and of all that made it.

A run of the same job finds it and answers as the run before it did: one whose answer was lost is not tuned again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millstream_runtime.model_output.resumable_folder import JOB_NAME, ResumableFolder, writing
from millstream_runtime.tune_draft.tuning_report import summary

REFUSED_NAME = "not-better.json"


class RefusedDraft:
    """`work`: a folder that is open."""

    def __init__(self, work: ResumableFolder) -> None:
        self._work, self._path = work, work.path / REFUSED_NAME

    def report(self) -> dict[str, Any] | None:
        """Return the report; None where no run of this job was refused."""
        return self._work.read(self._path, _read)

    def keep(self, report: Mapping[str, Any]) -> None:
        """Write the report, then remove the draft, the answers and the checkpoints.

        Raises:
            RuntimeFailure: DiskFull, it cannot be written.
        """
        self._work.write_text(self._path, json.dumps(report, ensure_ascii=False) + "\n")
        with writing(self._work.path):
            self._work.discard(REFUSED_NAME, JOB_NAME)


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    summary(found)  # raises what a reader of a damaged file raises
    return found
