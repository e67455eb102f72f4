"""Limits on everything a client can send, so that no request costs more than its share of memory or time."""

from __future__ import annotations

MAX_BODY_BYTES = 8 << 20  # a context of a million tokens, and its JSON
# Of all bodies that are read, parsed or wait for the tokenizer, without the first LARGE_BODY_BYTES of each. A thousand
# clients that send their bodies slowly would else hold eight gigabytes.
MAX_LARGE_BODIES_BYTES = 256 << 20
LARGE_BODY_BYTES = 64 << 10
LARGE_BODY_SECONDS = 30.0  # one that takes longer to arrive is given up if another one needs its memory
MAX_TOKENS_LIMIT = 1 << 20
MAX_FIELDS = 256  # of a JSON object with a fixed set of fields
MAX_MESSAGES = 4096
MAX_CONTENT_PARTS = 1024
MAX_PROMPTS = 64  # prompts in one /v1/completions request
MAX_TOKENIZE_CHARACTERS = MAX_TOKENS_LIMIT  # a token has at least one; tokenising takes hundreds of bytes per character
MAX_CHOICES = 128  # of one request: prompts times n (or best_of)
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_TEMPLATE_KWARGS = 64  # names of chat_template_kwargs, and what they hold
MAX_TEMPLATE_NAME_CHARACTERS = 64
MAX_TEMPLATE_DEPTH = 8  # lists and objects in each other
MAX_TEMPLATE_VALUES = 1024
MAX_TEMPLATE_CHARACTERS = 64 << 10
MAX_TEMPLATE_NUMBER = 1 << 24  # absolute value: a template that repeats text makes no more of it
MAX_PRIORITY = 100  # absolute value
MAX_CACHE_SALT_CHARACTERS = 256
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_MODEL_NAME_CHARACTERS = 512
MAX_REQUEST_ID_CHARACTERS = 128
MAX_PROBE_PROMPT = 64  # characters or tokens that the key of the operator's probe may send
MAX_PROBE_BODY_BYTES = 8192  # such a prompt and the longest model name, escaped

TOKENIZE_TIMEOUT_SECONDS = 30.0
SHORT_PROMPT_CHARACTERS = 2048  # tokenised in a fraction of a millisecond
SHORT_CHAT_MESSAGES = 64  # however short: a template writes something around each
SHORT_CHAT_THREADS = 4
SHORT_CHAT_SECONDS = 1.0  # one that takes longer starts again where long prompts are rendered
RETRY_AFTER_SECONDS = 1
SSE_KEEP_ALIVE_SECONDS = 15.0  # proxies close an idle stream after a minute, some after thirty seconds

# After SIGTERM the endpoints of a Service still name this pod for a moment: requests of that moment are served, not
# refused. The server refuses requests once none has come for this long; see operations/drain.py.
DRAIN_GRACE_SECONDS = 3.0
FLUSH_TIMEOUT_SECONDS = 10  # for the last bytes of finished responses


def max_waiting_requests(max_num_seqs: int) -> int:
    """Requests that may queue behind a full batch: four more batches, at least 64."""
    return max(64, 4 * max_num_seqs)
