"""Whether a draft model or a draft head suits its target, by their shapes. Pure.

The runtime compares the tokens themselves when it starts. What the shapes say already is refused before a pod exists.
"""

from __future__ import annotations

from collections.abc import Collection

from millstream_operator.api.spec import LLMDeploymentSpec
from millstream_operator.catalog.model_shape import DraftHead, ModelShape
from millstream_operator.planning.requires import head_method
from millstream_operator.planning.sizing.cpu_memory import cpu_weights_bytes
from millstream_operator.planning.sizing.weights import rank_weights, weight_format

# Embeddings are padded to different sizes in one family: 151,936 and 152,064 rows for the same tokens.
PADDED_SHARE_PERCENT = 1
SMALLER_MODEL = "name a smaller model with the target's tokenizer, or leave speculation out"


def vocabulary_problem(target: ModelShape, draft: ModelShape) -> str | None:
    """Return why the draft's tokens cannot be the target's; None where they may be."""
    apart = abs(draft.vocab_size - target.vocab_size)
    if apart * 100 <= PADDED_SHARE_PERCENT * target.vocab_size:
        return None
    return f"the draft's vocabulary of {draft.vocab_size} tokens is not the target's of {target.vocab_size}"


def gpu_draft_problem(
    spec: LLMDeploymentSpec, target: ModelShape, draft: ModelShape, online_methods: Collection[str]
) -> str | None:
    """Return why a replica on GPUs cannot have the draft: its format, or weights larger than the target's; else None.

    `online_methods`: those in which the runtime stores 16-bit weights by itself. What else the shapes say of a draft is
    compared with each GPU (`evaluation.py`).
    """
    named = spec.speculation.draft_model if spec.speculation is not None else None
    if named is not None and named.quantization_method in online_methods and draft.quantization is None:
        return None
    if (why := _format_problem(spec, draft)) is not None:
        return why
    if draft.draft_head is not None or (why := _size_problem(_gpu_bytes(target), _gpu_bytes(draft))) is None:
        return None
    return f"{why}: {SMALLER_MODEL}"


def _gpu_bytes(shape: ModelShape) -> int:
    method = shape.quantization.method if shape.quantization is not None else "None"
    return rank_weights(shape, weight_format(shape, method)).total_bytes


def cpu_draft_problem(spec: LLMDeploymentSpec, target: ModelShape, draft: ModelShape) -> str | None:
    """Return why a replica on a CPU cannot draft with `draft`, and what to do; None where it may."""
    if (why := _format_problem(spec, draft)) is not None:
        return why
    cpu_bytes = cpu_weights_bytes(target), cpu_weights_bytes(draft)
    if (method := head_method(spec)) is not None:
        if (why := head_problem(method, target, draft)) is not None:
            return why
        why, fix = _size_problem(*cpu_bytes), "name a smaller head, or leave speculation out"
    else:
        why, fix = vocabulary_problem(target, draft) or _size_problem(*cpu_bytes), SMALLER_MODEL
    return None if why is None else f"{why}: {fix}"


def head_problem(method: str, target: ModelShape, draft: ModelShape) -> str | None:
    """Return why the head cannot draft for the target, and what to do; None where it can."""
    head = draft.draft_head
    if head is None:
        return f"speculation.method is {method}, but speculation.draftModel is a model: name a head of this model"
    sizes = (
        ("hidden_size", draft.hidden_size, target.hidden_size),
        ("target_hidden_size", head.target_hidden_size, target.hidden_size),
        ("vocab_size", head.vocab_size, target.vocab_size),
    )
    for name, of_head, of_target in sizes:
        if of_head != of_target:
            return (
                f"the {name} of the {head.kind} head (speculation.draftModel) is {of_head}, and the model's is "
                f"{of_target}: name a head that was trained with this model, or leave speculation out"
            )
    return _layers_problem(head, target)


def _layers_problem(head: DraftHead, target: ModelShape) -> str | None:
    if head.states == 1:
        return None
    depth = target.num_layers
    layers = head.state_layers or (2, depth // 2, depth - 3)
    if all(0 <= layer <= depth for layer in layers):
        return None
    return (
        f"the {head.kind} head (speculation.draftModel) reads hidden states before the layers "
        f"{', '.join(map(str, layers))}, and the model has {depth}: name a head that was trained with this model"
    )


def _format_problem(spec: LLMDeploymentSpec, draft: ModelShape) -> str | None:
    named = spec.speculation.draft_model if spec.speculation is not None else None
    asked = (named.quantization_method if named is not None else None) or "Auto"
    stored = draft.quantization.words if draft.quantization is not None else "None"
    if asked in ("Auto", stored) or (draft.quantization is not None and draft.quantization.may_be(asked)):
        return None
    if asked == "GGUF" and draft.is_gguf:
        return None  # of 16 or 32 bits
    if draft.draft_head is not None:
        return f"speculation.draftModel.quantizationMethod is {asked}, but draft heads have {stored}: leave it out"
    return (
        f"speculation.draftModel.quantizationMethod is {asked}, but the draft is stored as {stored}: leave it out, or "
        f"name a draft that is stored as {asked}"
    )


def _size_problem(target_bytes: int, draft_bytes: int) -> str | None:
    """By the bytes of both as they are loaded: a draft, or a head, that is no smaller costs more than it saves."""
    if draft_bytes <= target_bytes:
        return None
    return (
        f"the weights of speculation.draftModel take {_size(draft_bytes)}, more than the target's {_size(target_bytes)}"
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"
