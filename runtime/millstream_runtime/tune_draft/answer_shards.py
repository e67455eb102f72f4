"""The answers of a part's prompts on disk, some prompts per file: a run that was killed repeats at most one file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from millstream_runtime.model_output.resumable_folder import ResumableFolder
from millstream_runtime.tune_draft.documents import Prompt
from millstream_runtime.tune_draft.target_answers import TargetModel, kinds_of
from millstream_runtime.tune_draft.target_sequence import TargetSequence, read_sequences, write_sequences

PROMPTS = 16  # of a file


class AnswerShards:
    """`part`: names the files. `target`: loads the model when the first answer is missing."""

    def __init__(
        self,
        work: ResumableFolder,
        part: str,
        prompts: Sequence[Prompt],
        target: Callable[[], TargetModel],
        temperature: float,
        seed: int,
    ) -> None:
        self._work, self._part, self._target = work, part, target
        self._prompts, self._temperature, self._seed = prompts, temperature, seed
        self.count = -(-len(prompts) // PROMPTS)

    def make(self, number: int) -> list[TargetSequence]:
        """Make a file, counted from 0; return its sequences."""
        prompts = self._of(number)
        seeds = [self._seed + number * PROMPTS + index for index in range(len(prompts))]
        found = self._target().answers(prompts, seeds)
        self._work.write(self._path(number), lambda path: write_sequences(path, found))
        return self._read(self._path(number), number)

    def read(self, number: int) -> list[TargetSequence] | None:
        """Return the sequences of a file; None where it is to be made."""
        return self._work.read(self._path(number), lambda path: self._read(path, number))

    def _read(self, path: Path, number: int) -> list[TargetSequence]:
        prompts = self._of(number)
        return read_sequences(
            path, [(one.slice, one.is_general) for one in prompts for _ in kinds_of(one, self._temperature)]
        )

    def _of(self, number: int) -> Sequence[Prompt]:
        return self._prompts[number * PROMPTS : (number + 1) * PROMPTS]

    def _path(self, number: int) -> Path:
        return self._work.path / f"{self._part}-{number:05}.safetensors"
