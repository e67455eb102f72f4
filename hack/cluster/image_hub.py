"""Is a public image registry in reach? Asked of the engine's default registry, believed only with its own header.

A machine behind a filtering proxy may resolve any name and accept any connection, so neither proves anything.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from email.message import Message
from urllib.parse import urlsplit

from hack.cluster import shell
from hack.cluster.errors import ClusterError

PROBE_SECONDS = 5.0


def is_registry(status: int, headers: Message) -> bool:
    """Whether an answer to `GET /v2/` is that of the distribution API: open (200) or asking for a token (401)."""
    speaks = "registry/2.0" in headers.get("Docker-Distribution-Api-Version", "")
    return speaks and status in (200, 401)


def in_reach() -> bool:
    """Ask the engine's mirrors and its default registry, at most PROBE_SECONDS for all (name lookups included)."""
    try:
        template = '{"index": {{json .IndexServerAddress}}, "mirrors": {{json .RegistryConfig.Mirrors}}}'
        info = json.loads(shell.run(["docker", "info", "--format", template], timeout_seconds=15))
    except (ClusterError, json.JSONDecodeError):
        return False
    addresses = [urlsplit(address) for address in [*(info["mirrors"] or []), info["index"]] if address]
    asker = ThreadPoolExecutor(max_workers=4, thread_name_prefix="registry-probe")
    asked = [asker.submit(_answers, f"{address.scheme}://{address.netloc}/v2/") for address in addresses]
    try:
        return any(question.result(timeout=PROBE_SECONDS) for question in asked)
    except FutureTimeoutError:
        return False
    finally:
        asker.shutdown(wait=False, cancel_futures=True)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=PROBE_SECONDS) as response:  # noqa: S310  # the engine's own address
            return is_registry(response.status, response.headers)
    except urllib.error.HTTPError as error:
        return is_registry(error.code, error.headers)
    except (OSError, ValueError):
        return False
