"""What an inspection of a draft head leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from millstream_operator.catalog.inspected_model import read_inspected_head
from millstream_operator.catalog.model_shape import ModelShape
from millstream_runtime.sources.inspection.inspect import inspect_folder

DEMO_HEAD = Path(__file__).resolve().parents[2] / "models/demo-eagle"
MEDUSA = {"medusa_num_heads": 3, "hidden_size": 256, "vocab_size": 2048}


def head_answer(kind: str = "EAGLE-1", revision: str | None = None, **changes: Any) -> dict[str, Any]:
    """The answer about demo-eagle, or about another head with its sizes. `changes`: of the head, or of its config."""
    answer = inspect_folder(DEMO_HEAD)
    head = answer["draft_head"]
    head["kind"] = kind
    if kind == "Medusa":
        head["config"] = dict(MEDUSA)
    for name, value in changes.items():
        (head if name in head else head["config"])[name] = value
    return answer | {"revision": revision}


def head_message(kind: str = "EAGLE-1", revision: str | None = None, **changes: Any) -> str:
    """The same as a termination message."""
    return json.dumps(head_answer(kind, revision, **changes))


def head_shape(kind: str = "EAGLE-1", **changes: Any) -> ModelShape:
    """The shape that the planner reads from it."""
    return read_inspected_head(head_answer(kind, **changes), "Medusa" if kind == "Medusa" else "EAGLE").shape
