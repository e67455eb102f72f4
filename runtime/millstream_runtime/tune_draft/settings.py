"""What `millstream tune-draft` was asked for. No torch: the command line reads it before anything heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

REPORT_NAME = "tuning.json"


@dataclass(frozen=True, slots=True)
class TuneSettings:
    """`steps` and `minutes` None: as many steps as show each sequence SEQUENCE_PASSES times."""

    target: Path
    draft: Path
    data: Path
    out: Path
    general: Path | None  # documents of other work, on which the draft must not get worse
    held_out: Path | None
    steps: int | None
    minutes: int | None
    temperature: float  # of the sampled answers; 0: greedy ones alone
    answer_tokens: int  # of one answer, at most
    sequence_tokens: int  # of prompt and answer, at most
    max_documents: int  # of `data`, and of `general`, to train on
    rows: int  # sequences of a step
    learning_rate: float | None  # None: by the draft's hidden size
    draft_tokens: int  # of a check, for the figures
    seed: int
    device: str  # auto | cpu | cuda
    keep_made: bool = False
    discard_other_work: bool = False
    only_better: bool = False  # no folder of a draft that is not better

    def keeps_what_is_there(self) -> bool:
        """Whether `out` has a draft that was tuned, which `keep_made` leaves as it is. The folder appears whole."""
        return self.keep_made and (self.out / REPORT_NAME).is_file()
