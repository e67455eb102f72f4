"""An edit of the spec as a JSON merge patch (RFC 7386), and the command that applies it."""

from __future__ import annotations

import json
import shlex
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.planning.fixes.change import spec_of

MAX_PATCH_CHARACTERS = 4096


def merge_patch(before: LLMDeployment, after: LLMDeployment) -> str | None:
    """The patch from one spec to another as JSON; None where they are equal, or where it is too long to be stored."""
    changed = _difference(spec_of(before), spec_of(after))
    text = json.dumps({"spec": changed}, separators=(",", ":"), ensure_ascii=False)
    return text if changed and len(text) <= MAX_PATCH_CHARACTERS else None


def kubectl_patch(name: str, namespace: str | None, patch: str) -> str:
    """The command that applies a patch: one line for a shell."""
    place = f" -n {namespace}" if namespace else ""
    return f"kubectl patch llmd {name}{place} --type merge -p {shlex.quote(patch)}"


def _difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What a merge patch has to say. Lists are replaced whole; what is gone is null."""
    found: dict[str, Any] = {name: None for name in before if name not in after}
    for name, value in after.items():
        old = before.get(name)
        if isinstance(old, dict) and isinstance(value, dict):
            if inner := _difference(old, value):
                found[name] = inner
        elif name not in before or old != value:
            found[name] = value
    return found
