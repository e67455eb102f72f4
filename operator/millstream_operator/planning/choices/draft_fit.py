"""Whether a draft model suits its target, by their shapes. Pure.

The runtime compares the tokens themselves when it starts. What the shapes say already is refused before a pod exists.
"""

from __future__ import annotations

from millstream_operator.api.spec import LLMDeploymentSpec
from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.planning.sizing.cpu_memory import cpu_weights_bytes

# Embeddings are padded to different sizes in one family: 151,936 and 152,064 rows for the same tokens.
PADDED_SHARE_PERCENT = 1


def vocabulary_problem(target: ModelShape, draft: ModelShape) -> str | None:
    """Return why the draft's tokens cannot be the target's; None where they may be."""
    apart = abs(draft.vocab_size - target.vocab_size)
    if apart * 100 <= PADDED_SHARE_PERCENT * target.vocab_size:
        return None
    return f"the draft's vocabulary of {draft.vocab_size} tokens is not the target's of {target.vocab_size}"


def cpu_draft_problem(spec: LLMDeploymentSpec, target: ModelShape, draft: ModelShape) -> str | None:
    """Return why a replica on a CPU cannot draft with `draft`, and what to do; None where it may."""
    if (why := _format_problem(spec, draft)) is not None:
        return why
    why = vocabulary_problem(target, draft) or _size_problem(target, draft)
    if why is None:
        return None
    return f"{why}: name a smaller model with the target's tokenizer, or leave speculation.draftModel out"


def _format_problem(spec: LLMDeploymentSpec, draft: ModelShape) -> str | None:
    named = spec.speculation.draft_model if spec.speculation is not None else None
    asked = (named.quantization_method if named is not None else None) or "Auto"
    stored = draft.quantization.method if draft.quantization is not None else "None"
    if asked in ("Auto", stored):
        return None
    return (
        f"speculation.draftModel.quantizationMethod is {asked}, but the draft is stored as {stored}: leave it out, or "
        f"name a draft that is stored as {asked}"
    )


def _size_problem(target: ModelShape, draft: ModelShape) -> str | None:
    """By the bytes of both as they are loaded: a draft that is no smaller costs more than it saves."""
    draft_bytes, target_bytes = cpu_weights_bytes(draft), cpu_weights_bytes(target)
    if draft_bytes <= target_bytes:
        return None
    return f"the draft's weights take {draft_bytes / 1e9:.2f} GB, more than the target's {target_bytes / 1e9:.2f} GB"
