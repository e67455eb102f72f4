"""Sampling parameters: what the request says, else the model's generation_config.json, else the API's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream_runtime.engine.request import SamplingParams
from millstream_runtime.server.api_errors import ApiError
from millstream_runtime.server.requests import GenerationRequest
from millstream_runtime.tokenizer import read_json

GREEDY_BELOW_TEMPERATURE = 1e-5  # dividing logits by less than this overflows; the top token wins anyway


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request gets when it says nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    @staticmethod
    def from_folder(folder: Path) -> SamplingDefaults:
        """From generation_config.json; values out of range are left to the API's defaults.

        `do_sample: false`, written out, is `transformers`' way to say greedy.

        Raises:
            RuntimeFailure: the file is not JSON.
        """
        settings = read_json(folder / "generation_config.json")
        greedy = settings.get("do_sample") is False
        return SamplingDefaults(
            temperature=0.0 if greedy else _number(settings, "temperature", 0.0, 2.0, 1.0),
            top_p=_number(settings, "top_p", 0.0, 1.0, 1.0),
            top_k=int(_number(settings, "top_k", 0, 1 << 20, 0)),
        )


def sampling_params(
    request: GenerationRequest,
    defaults: SamplingDefaults,
    *,
    token_limit: int | None,
    prompt_tokens: int,
    max_model_len: int,
) -> SamplingParams:
    """Checked parameters for one prompt.

    Raises:
        ApiError: prompt and answer do not fit the context together, or min_tokens is above the limit.
    """
    room = max_model_len - prompt_tokens
    if room < 1 or (token_limit is not None and token_limit > room):
        param = "messages" if "messages" in type(request).model_fields else "prompt"
        raise context_length_exceeded(param, str(prompt_tokens), token_limit, max_model_len)
    max_tokens = token_limit if token_limit is not None else room
    if request.min_tokens > max_tokens:
        raise ApiError(
            400,
            f"'min_tokens' is {request.min_tokens}, more than the {max_tokens} tokens that the answer may have.",
            param="min_tokens",
            code="invalid_value",
        )
    temperature = request.temperature if request.temperature is not None else defaults.temperature
    top_p = request.top_p if request.top_p is not None else defaults.top_p
    top_k = request.top_k if request.top_k is not None else defaults.top_k
    greedy = temperature < GREEDY_BELOW_TEMPERATURE or top_p == 0.0  # the smallest nucleus is the top token
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0 if greedy else temperature,
        top_k=0 if greedy else max(0, top_k),
        top_p=1.0 if greedy else top_p,
        seed=request.seed,
        stop_token_ids=frozenset(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        min_tokens=request.min_tokens,
    )


def context_length_exceeded(param: str, prompt_tokens: str, token_limit: int | None, max_model_len: int) -> ApiError:
    """OpenAI's code for a prompt that is too long; `prompt_tokens` is a count, or "at least" one."""
    wanted = f" and {token_limit} for the answer" if token_limit is not None else ""
    message = (
        f"This model's maximum context length is {max_model_len} tokens, prompt and answer together; the request has "
        f"{prompt_tokens} in '{param}'{wanted}. Shorten the prompt or lower the token limit."
    )
    return ApiError(400, message, param=param, code="context_length_exceeded")


def _number(settings: Mapping[str, Any], name: str, low: float, high: float, default: float) -> float:
    value = settings.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        return default
    return value
