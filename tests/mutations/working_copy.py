"""A copy of the checkout in which one file at a time is mutated."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.mutations.mutation import REPOSITORY, Mutation

IMPORT_ROOTS = ("operator", "runtime", "kernels", "cli")
BUILT = "kernels/millstream_kernels/cpu/compiled"  # git ignores it; `make venv` made it


class WorkingCopy:
    """The files that git knows or would add, as they are on the disk, in a folder that tests can be run in.

    A worktree of git would have the last commit only, and stay registered when its process is killed.
    """

    def __init__(self, folder: Path) -> None:
        """`folder`: is made."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=True,
        )
        for name in filter(None, listed.stdout.split("\0")):
            if (REPOSITORY / name).is_file():  # one that was deleted is listed until that is committed
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(REPOSITORY / name, folder / name)
        if (REPOSITORY / BUILT).is_dir():
            shutil.copytree(REPOSITORY / BUILT, folder / BUILT)
        (folder / ".tools").symlink_to(REPOSITORY / ".tools")  # helm, and caches

    def environment(self) -> dict[str, str]:
        """What makes Python import the copy: these folders come before those of the editable installation."""
        roots = os.pathsep.join(str(self.folder / root) for root in IMPORT_ROOTS)
        return os.environ | {"PYTHONPATH": roots}

    @contextmanager
    def mutated(self, mutation: Mutation) -> Iterator[None]:
        """The copy with the mutation in it, and afterwards without."""
        path = self.folder / mutation.file
        path.write_text(mutation.mutated(), encoding="utf-8")
        try:
            yield
        finally:
            shutil.copy2(REPOSITORY / mutation.file, path)
