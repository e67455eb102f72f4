"""The environment variables that the operator's default image takes in `podTemplate`: names, and few families of names.

None of them makes the loader, OpenSSL, Python, CUDA or NCCL load code. What such a variable may name, as a library or a
file of settings, lies in the pod: a hub delivers a model's files, and a claim holds any.
"""

from __future__ import annotations

import re
from collections.abc import Collection

PROXIES = ("ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
ACCEPTED = (
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("HF_ENDPOINT", "PLAIN_HTTP_REGISTRIES"),
    *("OTEL_RESOURCE_ATTRIBUTES", "OTEL_SERVICE_NAME", "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "KMP_AFFINITY", "MALLOC_ARENA_MAX"),
    *("NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "NCCL_ALGO", "NCCL_PROTO", "GLOO_SOCKET_IFNAME"),
    *("PYTORCH_CUDA_ALLOC_CONF", "CUDA_DEVICE_ORDER"),
    *("TZ", "LANG"),
    *PROXIES,
    *(name.lower() for name in PROXIES),
)
FAMILIES = ("OTEL_EXPORTER", "NCCL_IB", "NCCL_P2P", "LC", "MILLSTREAM_LOG")
FAMILY_PATTERN = f"^({'|'.join(FAMILIES)})_[A-Z0-9_]+$"
OTHERS_PREFIX = "VLLM_"  # of another server; each has a field here, or no meaning
ACCEPTED_IN_WORDS = ", ".join((*ACCEPTED, *(f"{family}_*" for family in FAMILIES)))


def is_accepted(name: str, added: Collection[str] = ()) -> bool:
    """Whether the default image takes the variable. `added`: names that an administrator adds to the list."""
    return name in ACCEPTED or name in added or re.fullmatch(FAMILY_PATTERN, name) is not None
