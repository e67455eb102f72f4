"""CORS: which web pages may read answers in a browser. Off until an origin is allowed.

The browser asks first (a preflight, `OPTIONS`), without the key of the page: Starlette's middleware answers that here,
outside of the check of keys. Every other request goes on to that check, and whatever comes back of it, an error or a
stream, carries the header by which the browser shows it to the page. Cookies play no part (`allow_credentials`): a key
is in `Authorization`, which a page has to know.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from millstream_runtime.allowed_origins import as_sent

PREFLIGHT_SECONDS = 600  # for which a browser asks no second time
EXPOSED_HEADERS = ("x-request-id", "retry-after", "x-millstream-reason")  # beyond those that a page may always read


class CrossOrigin:
    """Outside of everything else. `allow` may be called while requests run: it holds for those that follow."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._entry = app

    def allow(self, origins: Sequence[str]) -> None:
        """Answer the pages of these origins; none: no answer has a header of CORS, and no preflight is answered."""
        self._entry = self._app
        if origins:
            self._entry = CORSMiddleware(
                self._app,
                allow_origins=[as_sent(origin) for origin in origins],
                allow_methods=["GET", "HEAD", "POST"],
                allow_headers=["*"],  # SDKs add headers of their own, such as x-stainless-lang
                expose_headers=EXPOSED_HEADERS,
                max_age=PREFLIGHT_SECONDS,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._entry(scope, receive, send)
