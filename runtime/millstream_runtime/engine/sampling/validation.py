"""What a request must hold for a model: refused before a step, where it would give no token."""

from __future__ import annotations

import math

from millstream_runtime.engine.request import Request, SamplingParams
from millstream_runtime.models.config.model_config import ModelConfig


def check_request(request: Request, model: ModelConfig) -> None:
    """Check the prompt and what is sampled.

    Raises:
        ValueError: an empty or too long prompt, an id outside the vocabulary, or as `check_sampling`.
    """
    prompt, limit = request.prompt_token_ids, model.max_model_len
    if not 0 < len(prompt) < limit:
        raise ValueError(f"the prompt has {len(prompt)} tokens; it must have 1 to {limit - 1} (max_model_len {limit})")
    if not 0 <= min(prompt) <= max(prompt) < model.vocab_size:
        raise ValueError(f"a prompt token is outside the vocabulary of {model.vocab_size}")
    check_sampling(request.sampling, model.vocab_size, model.eos_token_ids)


def check_sampling(params: SamplingParams, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
    """Check what can be sampled at all.

    A bias of minus infinity bans a token. Until `min_tokens`, the stop ids and `eos_token_ids` are suppressed.

    Raises:
        ValueError: an id outside the vocabulary, a bias that is no number, no token asked for, or none left.
    """
    named = {*params.stop_token_ids, *(token_id for token_id, _ in params.logit_bias)}
    if named and not 0 <= min(named) <= max(named) < vocab_size:
        raise ValueError(f"a stop or biased token is outside the vocabulary of {vocab_size}")
    if params.max_tokens < 1:
        raise ValueError(f"max_tokens is {params.max_tokens}; it must be at least 1")
    for token_id, bias in params.logit_bias:
        if math.isnan(bias) or bias == math.inf:
            raise ValueError(f"the logit_bias of token {token_id} is {bias}; it must be a number or minus infinity")
    banned = {token_id for token_id, bias in params.logit_bias if bias == -math.inf}
    if len(banned) == vocab_size:
        raise ValueError(f"logit_bias bans all {vocab_size} tokens of the vocabulary; leave at least one")
    if params.min_tokens > 0:
        ends = params.stop_token_ids | (frozenset() if params.ignore_eos else eos_token_ids)
        if len(banned | {one for one in ends if 0 <= one < vocab_size}) == vocab_size:
            raise ValueError(
                f"until min_tokens ({params.min_tokens}) no stop token may come up, and stop_token_ids and logit_bias "
                f"leave no other of the {vocab_size} tokens; leave at least one, or set min_tokens to 0"
            )
