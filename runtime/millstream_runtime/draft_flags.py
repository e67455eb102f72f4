"""Which flags ask for drafts: what a refusal says to leave out, so that the model is served without. No torch.

One of them alone cannot go: a draft model without its method is refused, as is a method without its model.
"""

from __future__ import annotations

from dataclasses import fields

from millstream_runtime.config import RuntimeConfig

_FIELDS = ("speculation_method", "draft_model", "max_draft_tokens", "draft_tree", "speculation_acceptance")


def draft_flags(config: RuntimeConfig) -> str:
    """Return those that are given, as `--speculation-method and --draft-model`."""
    defaults = {field.name: field.default for field in fields(RuntimeConfig)}
    given = [f"--{name.replace('_', '-')}" for name in _FIELDS if getattr(config, name) != defaults[name]]
    return " and ".join(filter(None, (", ".join(given[:-1]), given[-1]))) if given else ""
