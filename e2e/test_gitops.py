"""kstatus, which decides for Flux, Helm 4 and kpt whether something is deployed, reads every state right.

It needs no cluster: the library is built from its pinned module and asked about what the operator wrote on a fake one.
`test_status.py` asks it about live objects too.
"""

from __future__ import annotations

import asyncio

from e2e.kstatus import verdicts
from tests.support.status_corpus import STATES, document


def test_kstatus_reads_every_state_right() -> None:
    async def documents() -> list[dict[str, object]]:
        return [await document(state) for state in STATES.values()]

    found = verdicts(asyncio.run(documents()))
    assert dict(zip(STATES, found, strict=True)) == {name: state.kstatus for name, state in STATES.items()}
