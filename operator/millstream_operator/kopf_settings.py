"""Settings for kopf: watches that never give up, and no writes of its own."""

from __future__ import annotations

import random
from collections.abc import Iterator

import kopf

from millstream_operator.kopf_storage import NoDiffBase, NoProgress
from millstream_operator.kube.client import LIST_PAGE
from millstream_operator.kube.kinds import WATCHED, label_selector

WATCH_TIMEOUT_SECONDS = 290
# The API server sends a bookmark every minute; kopf reconnects a stream that is silent for longer.
WATCH_SILENCE_SECONDS = 70.0
CONNECT_TIMEOUT_SECONDS = 10
# kopf keeps a task with the whole object until no event came for this long. A start has thousands of them.
IDLE_OBJECT_SECONDS = 0.2


class EndlessBackoffs:
    """Seconds between kopf's own retries: growing, then steady, without end.

    kopf's default list ends after a minute without an API server, and the process with it. Each request iterates from
    the start.
    """

    def __iter__(self) -> Iterator[float]:
        yield from (0.5, 1.0, 2.0, 4.0)
        while True:
            yield 5.0 * random.uniform(0.8, 1.2)  # noqa: S311 - jitter


def kopf_settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True  # no watching of CRDs and namespaces, so no rights on them
    settings.persistence.diffbase_storage = NoDiffBase()
    settings.persistence.progress_storage = NoProgress()
    settings.queueing.idle_timeout = IDLE_OBJECT_SECONDS
    settings.networking.error_backoffs = EndlessBackoffs()
    settings.networking.request_timeout = 60.0
    settings.networking.connect_timeout = CONNECT_TIMEOUT_SECONDS
    settings.watching.chunk_size = LIST_PAGE  # otherwise a start holds the listings of all kinds in memory at once
    settings.watching.server_timeout = WATCH_TIMEOUT_SECONDS
    settings.watching.client_timeout = WATCH_TIMEOUT_SECONDS + 10
    settings.watching.inactivity_timeout = WATCH_SILENCE_SECONDS
    settings.watching.connect_timeout = CONNECT_TIMEOUT_SECONDS
    for kind in WATCHED:
        if (selector := label_selector(kind)) is not None:
            settings.watching.label_selectors[kind.group, kind.version, kind.plural] = selector
    return settings


def login(settings: kopf.OperatorSettings) -> kopf.ConnectionInfo:
    """Log in with the pod's service account, else with the user's kubeconfig."""
    found = kopf.login_with_service_account(settings=settings) or kopf.login_with_kubeconfig(settings=settings)
    if found is None:
        raise kopf.LoginError("no service account and no kubeconfig: run in a pod, or set KUBECONFIG")
    return found
