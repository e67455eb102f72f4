"""What Argo CD makes of every state: its health check in Lua, run over what the operator wrote.

kstatus itself is a Go library: `e2e/test_gitops.py` asks it about the same states.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lupa
import pytest

from tests.support.status_corpus import STATES, document

ROOT = Path(__file__).resolve().parents[4]
HEALTH = ROOT / "docs" / "argocd" / "health.lua"


def argo_health(stored: Any) -> tuple[str, str]:
    """(status, message) as Argo CD would show them: the script sees `obj` and returns a table."""
    lua = lupa.LuaRuntime(unpack_returned_tuples=True)
    lua.globals().obj = lua.table_from(stored, recursive=True)
    found = lua.execute(HEALTH.read_text(encoding="utf-8"))
    return str(found["status"]), str(found["message"])


@pytest.mark.parametrize("name", STATES)
async def test_argo_cd_reads_every_state_right(name: str) -> None:
    state = STATES[name]
    stored = await document(state)
    ready: dict[str, str] = next((c for c in stored["status"].get("conditions", []) if c["type"] == "Ready"), {})
    assert ready.get("reason", "") == state.reason, "the state is the one that is meant"
    status, message = argo_health(stored)
    assert status == state.argo
    if status in ("Degraded", "Suspended", "Healthy"):
        assert message == f"{ready['reason']}: {ready['message']}"
    assert message


def test_argo_cd_reads_an_object_without_any_status() -> None:
    assert argo_health({"metadata": {"generation": 1}})[0] == "Progressing"
    assert argo_health({"metadata": {"generation": 1}, "status": {"observedGeneration": 1}})[0] == "Progressing"


@pytest.mark.parametrize("name", STATES)
async def test_one_of_the_two_ways_is_told_and_never_both(name: str) -> None:
    """kstatus: Reconciling and Stalled exclude each other; without either, Ready alone decides."""
    stored = await document(STATES[name])
    kinds = [condition["type"] for condition in stored["status"].get("conditions", [])]
    assert len(kinds) == len(set(kinds))
    assert not {"Reconciling", "Stalled"} <= set(kinds)


def test_the_page_has_a_row_for_every_verdict() -> None:
    page = (ROOT / "docs" / "gitops.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    for state in STATES.values():
        assert any(f"`{state.kstatus}`" in row and f"`{state.argo}`" in row for row in rows), state
