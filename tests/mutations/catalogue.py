"""All mutations."""

from __future__ import annotations

from tests.mutations import (
    author_mistakes,
    command_line_mistakes,
    deployment_files,
    gateway_mistakes,
    kernel_traps,
    operator_mistakes,
    runtime_mistakes,
    text_folder_mistakes,
    token_kernel_traps,
)
from tests.mutations.promises import PROMISES

MUTATIONS = [
    *PROMISES,
    *operator_mistakes.MISTAKES,
    *author_mistakes.MISTAKES,
    *runtime_mistakes.MISTAKES,
    *text_folder_mistakes.MISTAKES,
    *command_line_mistakes.MISTAKES,
    *deployment_files.MISTAKES,
    *gateway_mistakes.MISTAKES,
    *kernel_traps.TRAPS,
    *token_kernel_traps.TRAPS,
]
