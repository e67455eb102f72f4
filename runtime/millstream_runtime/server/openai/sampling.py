"""Sampling parameters: from the request, else from generation_config.json, else the API's defaults."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from millstream_runtime.engine.request import SamplingParams
from millstream_runtime.logs import log
from millstream_runtime.server.http.api_errors import ApiError
from millstream_runtime.server.openai.requests import ChatCompletionRequest, CompletionRequest, GenerationRequest
from millstream_runtime.tokenizing.folder.files import read_json

Value = TypeVar("Value")
COMPLETION_DEFAULT_TOKENS = 16  # OpenAI's, for /v1/completions
# What is applied of generation_config.json: the least and the highest value, and the one where it is absent.
RANGES: dict[str, tuple[float, float, float]] = {
    "temperature": (0.0, 2.0, 1.0),
    "top_p": (0.0, 1.0, 1.0),
    "top_k": (0, 1 << 20, 0),
    "min_p": (0.0, 1.0, 0.0),
    "repetition_penalty": (0.01, 10.0, 1.0),
    "max_new_tokens": (1, 1 << 20, 0),
}
# What is not applied, with the value at which it changes no answer.
NEUTRAL_VALUES: dict[str, object] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "typical_p", "guidance_scale"), 1),
    **dict.fromkeys(("length_penalty", "encoder_repetition_penalty"), 1),
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "diversity_penalty", "penalty_alpha"), 0),
    **dict.fromkeys(("early_stopping", "renormalize_logits", "remove_invalid_values", "token_healing"), False),
    **{name: [] for name in ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "stop_strings")},
}
# Read elsewhere, or about the memory, the speed and the form of what `transformers` returns.
NO_EFFECT = {
    *(
        "do_sample",
        "eos_token_id",
        "bos_token_id",
        "pad_token_id",
        "transformers_version",
        "low_memory",
        "is_assistant",
    ),
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size", "compile_config"),
    *("disable_compile", "continuous_batching_config", "output_attentions", "output_hidden_states", "output_scores"),
    *("output_logits", "return_dict_in_generate", "use_mtp", "speculation_type", "num_assistant_tokens"),
    *("num_assistant_tokens_schedule", "assistant_confidence_threshold", "prompt_lookup_num_tokens"),
    *("max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind", "target_lookbehind"),
}
MOST_NAMED = 20  # of a line of the log
GREEDY_BELOW_TEMPERATURE = 1e-5  # dividing logits by less than this overflows; the top token wins anyway


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The values of a request that sets none."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None

    @staticmethod
    def from_folder(folder: Path) -> SamplingDefaults:
        """From generation_config.json; values out of range are left to the API's defaults, and the log names them.

        An explicit `do_sample: false` means greedy, as in `transformers`.

        Raises:
            RuntimeFailure: the file is not JSON.
        """
        settings = read_json(folder / "generation_config.json")
        if ignored := ignored_settings(settings):
            log.warning("generation_config_not_applied", values=", ".join(ignored))
        numbers = {name: _number(settings, name, low, high, default) for name, (low, high, default) in RANGES.items()}
        return SamplingDefaults(
            temperature=0.0 if settings.get("do_sample") is False else numbers["temperature"],
            top_p=numbers["top_p"],
            top_k=int(numbers["top_k"]),
            min_p=numbers["min_p"],
            repetition_penalty=numbers["repetition_penalty"],
            max_tokens=int(numbers["max_new_tokens"]) or None,
        )


def ignored_settings(settings: Mapping[str, Any]) -> list[str]:
    """What generation_config.json sets and the server does not apply, each with its value; never what changes nothing.

    A value that is null is not set, as in `transformers`.
    """
    ignored = []
    for name, value in sorted(settings.items()):
        if value is None or name in NO_EFFECT or name.startswith("_"):
            continue
        if name in RANGES:
            is_applied = _is_number(value, *RANGES[name][:2])
        else:
            is_applied = name in NEUTRAL_VALUES and value == NEUTRAL_VALUES[name]
        if not is_applied:
            ignored.append(f"{ascii(name)[1:-1]:.40}: {json.dumps(value):.40}")
    return ignored[:MOST_NAMED]


def sampling_params(
    request: ChatCompletionRequest | CompletionRequest,
    defaults: SamplingDefaults,
    *,
    prompt_tokens: int,
    max_model_len: int,
) -> SamplingParams:
    """Validated parameters for one prompt: the request's, else the model's, else the API's.

    Raises:
        ApiError: prompt and answer do not fit the context together, or min_tokens is above the limit.
    """
    max_tokens = _max_tokens(request, defaults, prompt_tokens, max_model_len)
    temperature = _first(request.temperature, defaults.temperature)
    top_p = _first(request.top_p, defaults.top_p)
    greedy = temperature < GREEDY_BELOW_TEMPERATURE or top_p == 0.0  # the smallest nucleus is the top token
    # Log-probabilities decide which of several candidates are best.
    rank_logprobs = 0 if request.num_candidates > request.n else None
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0 if greedy else temperature,
        top_k=0 if greedy else max(0, _first(request.top_k, defaults.top_k)),
        top_p=1.0 if greedy else top_p,
        min_p=0.0 if greedy else _first(request.min_p, defaults.min_p),
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty),
        logit_bias=tuple(sorted(request.logit_bias.items())),
        seed=request.seed,
        stop_token_ids=frozenset(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        min_tokens=request.min_tokens,
        logprobs=_first(request.num_logprobs, rank_logprobs),
        prompt_logprobs=request.num_prompt_logprobs,
    )


def _max_tokens(
    request: ChatCompletionRequest | CompletionRequest,
    defaults: SamplingDefaults,
    prompt_tokens: int,
    max_model_len: int,
) -> int:
    """A limit of the request must fit the context; a default limit is reduced to what fits."""
    available, limit = max_model_len - prompt_tokens, request.token_limit
    is_chat = isinstance(request, ChatCompletionRequest)
    if available < 1 or (limit is not None and limit > available):
        raise context_length_exceeded("messages" if is_chat else "prompt", str(prompt_tokens), limit, max_model_len)
    if limit is None:
        default = _first(defaults.max_tokens, available if is_chat else COMPLETION_DEFAULT_TOKENS)
        # OpenAI's default of sixteen tokens counts as requested: sixteen or an error, never fewer.
        if not is_chat and defaults.max_tokens is None and default > available:
            raise context_length_exceeded("prompt", str(prompt_tokens), default, max_model_len)
        limit = min(default, available)
    max_tokens = max(1, limit)  # the engine needs one to score a prompt; `Generation` drops it
    if request.min_tokens > max_tokens:
        raise ApiError(
            400,
            f"'min_tokens' is {request.min_tokens}, more than the {max_tokens} tokens that the answer may have.",
            param="min_tokens",
            code="invalid_value",
        )
    return max_tokens


def require_in_vocabulary(request: GenerationRequest, vocabulary_size: int) -> None:
    """Raises ApiError: a stop or biased token is outside the vocabulary, or the stop tokens are all of it."""
    named = {"stop_token_ids": request.stop_token_ids, "logit_bias": request.logit_bias}
    for param, token_ids in named.items():
        if any(token_id >= vocabulary_size for token_id in token_ids):
            raise outside_vocabulary(param, vocabulary_size)
    if request.min_tokens > 0 and len(set(request.stop_token_ids)) == vocabulary_size:
        raise ApiError(
            400,
            f"'stop_token_ids' names all {vocabulary_size} tokens, and none of these may come up before "
            f"'min_tokens' ({request.min_tokens}); leave out at least one.",
            param="stop_token_ids",
            code="invalid_value",
        )


def outside_vocabulary(param: str, vocabulary_size: int) -> ApiError:
    """400 for a token id outside the vocabulary."""
    message = f"'{param}' has a token id outside the vocabulary of {vocabulary_size} tokens."
    return ApiError(400, message, param=param, code="invalid_value")


def context_length_exceeded(param: str, prompt_tokens: str, token_limit: int | None, max_model_len: int) -> ApiError:
    """OpenAI's code for a prompt that is too long; `prompt_tokens` is a count, or "at least" one."""
    wanted = f" and {token_limit} for the answer" if token_limit else ""
    cure = (
        "Shorten the prompt or lower the token limit" if token_limit else "Shorten the prompt: an answer needs a token"
    )
    message = (
        f"This model's maximum context length is {max_model_len} tokens, prompt and answer together; the request has "
        f"{prompt_tokens} in '{param}'{wanted}. {cure}."
    )
    return ApiError(400, message, param=param, code="context_length_exceeded")


def _first(given: Value | None, default: Value) -> Value:
    return given if given is not None else default


def _number(settings: Mapping[str, Any], name: str, low: float, high: float, default: float) -> float:
    value = settings.get(name)
    return value if value is not None and _is_number(value, low, high) else default


def _is_number(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
