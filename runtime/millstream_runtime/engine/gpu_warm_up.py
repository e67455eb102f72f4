"""The steps that a GPU runs before the first request, after those of every device.

sampler   requests with filters, penalties, a bias and log-probabilities, alike and beside one another
longest   a prompt that fills a step
mixed     the same beside decodes

Without them the first request that asks for such a thing, or the first long prompt, would pay for kernels that are
loaded, libraries that choose algorithms, and memory that the allocator has to ask for.
"""

from __future__ import annotations

from millstream_runtime.engine.device_policy import WarmUpSteps
from millstream_runtime.engine.request import SamplingParams

GREEDY = SamplingParams(1, temperature=0.0, ignore_eos=True)
FILTERED = SamplingParams(2, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=1, ignore_eos=True)
SAMPLERS = (
    SamplingParams(2, temperature=0.0, ignore_eos=True),
    SamplingParams(2, temperature=1.0, seed=1, ignore_eos=True),
    SamplingParams(2, temperature=0.8, top_p=0.9, seed=1, ignore_eos=True),  # a sorted vocabulary on torch
    FILTERED,
    SamplingParams(
        2,
        temperature=0.8,
        seed=1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        repetition_penalty=1.1,
        logit_bias=((0, 0.5),),
        min_tokens=2,
        logprobs=2,
        prompt_logprobs=2,
        ignore_eos=True,
    ),
)
DECODES = 4  # beside the long prompt
DECODED_TOKENS = 4


def run(steps: WarmUpSteps) -> None:
    """Run all of them, each to its end."""
    steps.answer(1, [FILTERED, FILTERED])
    steps.answer(1, SAMPLERS)
    steps.answer(steps.longest_step_tokens, [GREEDY])
    with steps.decodes([DECODED_TOKENS] * min(DECODES, steps.max_requests(DECODED_TOKENS + 1))):
        steps.step()  # their prompts
        steps.answer(steps.longest_step_tokens, [GREEDY])
