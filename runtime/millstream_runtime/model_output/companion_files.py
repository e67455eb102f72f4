"""Files next to the weights that a loader or a reader of the model needs: copied from the model it was made from."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

from millstream_runtime.model_output.resumable_folder import ResumableFolder

COPIED = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "LICENSE",
    "LICENSE.md", "LICENSE.txt", "NOTICE", "USE_POLICY.md",
)  # fmt: skip
MAX_COPIED_BYTES = 256 << 20


def copy_companions(source: Path, work: ResumableFolder) -> None:
    """Copy those that `source` has. Raises RuntimeFailure: DiskFull."""
    for name in COPIED:
        file = source / name
        if file.is_file() and file.stat().st_size <= MAX_COPIED_BYTES:
            work.write(work.model / name, partial(shutil.copyfile, file))
