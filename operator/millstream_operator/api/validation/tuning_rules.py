"""What belongs together where a draft model is tuned in the cluster."""

from __future__ import annotations

from millstream_operator.api.validation.quantization_rules import is_tuned, one_dataset
from millstream_operator.api.validation.rule import Rule

_TUNED = "has(self.speculation) && has(self.speculation.tuning)"
DEFAULT_SEQUENCE_TOKENS, DEFAULT_ANSWER_TOKENS = 1024, 256  # of `millstream tune-draft`

TUNING_RULES: tuple[Rule, ...] = (
    Rule(
        "spec.speculation",
        "!has(self.tuning) || has(self.draftModel)",
        lambda value: value.tuning is None or value.draft_model is not None,
        "tuning trains a draft model: name one as draftModel, or leave tuning out.",
    ),
    Rule(
        "spec",
        f"!({_TUNED}) || has(self.model.cache)",
        lambda spec: not is_tuned(spec) or spec.model.cache is not None,
        "speculation.tuning needs model.cache: the tuned draft is written there. Add model.cache with a size for the "
        "draft three times, and for what is downloaded.",
    ),
    Rule(
        "spec",
        f"!({_TUNED}) || !has(self.model.cache) || !has(self.model.cache.accessMode) || "
        "self.model.cache.accessMode != 'ReadWriteOncePod'",
        lambda spec: (
            not is_tuned(spec) or spec.model.cache is None or spec.model.cache.access_mode != "ReadWriteOncePod"
        ),
        "speculation.tuning writes into model.cache while pods read from it: accessMode must be ReadWriteMany, or "
        "ReadWriteOnce where all pods are on one node.",
    ),
    Rule(
        "spec.speculation.tuning",
        f"(has(self.maxAnswerTokens) ? self.maxAnswerTokens : {DEFAULT_ANSWER_TOKENS}) < "
        f"(has(self.sequenceTokens) ? self.sequenceTokens : {DEFAULT_SEQUENCE_TOKENS})",
        lambda value: (
            (value.max_answer_tokens or DEFAULT_ANSWER_TOKENS) < (value.sequence_tokens or DEFAULT_SEQUENCE_TOKENS)
        ),
        f"maxAnswerTokens ({DEFAULT_ANSWER_TOKENS} where absent) must be less than sequenceTokens "
        f"({DEFAULT_SEQUENCE_TOKENS} where absent), which counts the prompt, too.",
    ),
    one_dataset("spec.speculation.tuning.dataset"),
    one_dataset("spec.speculation.tuning.generalDataset"),
)
