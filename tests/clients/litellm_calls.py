"""Run by the environment of the clients: calls through litellm, and what came back as one line of JSON."""

from __future__ import annotations

import json
import sys

import litellm  # type: ignore[import-not-found,unused-ignore]

URL, MESSAGES = sys.argv[1], [{"role": "user", "content": "What is a Kubernetes pod?"}]
SETTINGS = {"api_base": URL, "api_key": "unused", "max_tokens": 8, "temperature": 0}

whole = litellm.completion(model="openai/demo-chat", messages=MESSAGES, **SETTINGS)
chunks = list(
    litellm.completion(
        model="hosted_vllm/demo-chat",
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
        **SETTINGS,
    )
)
text = litellm.text_completion(model="text-completion-openai/demo-chat", prompt="A pod is", logprobs=1, **SETTINGS)
try:
    litellm.completion(model="openai/demo-chat", messages=MESSAGES, **SETTINGS | {"temperature": 9})
    refused = ""
except litellm.BadRequestError as error:
    refused = str(error)
found = {
    "whole": whole.choices[0].message.content,
    "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
    "usage": [chunk.usage.completion_tokens for chunk in chunks if getattr(chunk, "usage", None)],
    "text": text.choices[0].text,
    "tokens": text.choices[0].logprobs.tokens,
    "refused": refused,
}
sys.stdout.write("\n" + json.dumps(found) + "\n")
