"""Two writers are found in an audit log, also when the stray write is a single one in the other's turn."""

from __future__ import annotations

import json
from pathlib import Path

from tests.soak import audit
from tests.soak.audit import Write


def write(agent: str, at: float, resource: str = "services", took: float = 0.01, status: int = 200) -> Write:
    return Write(agent, "patch", resource, "team", "demo", status, at, at + took)


def lease(agent: str, at: float, status: int = 200) -> Write:
    return write(agent, at, "leases", status=status)


TURNS = [lease("one", 0), write("one", 1), lease("one", 2), write("one", 3), lease("two", 20), write("two", 21)]


def test_one_after_the_other_is_right() -> None:
    assert audit.writes_out_of_turn(TURNS) == []
    assert [term.agent for term in audit.terms(TURNS)] == ["one", "two"]


def test_a_write_that_comes_back_after_the_take_over_is_found() -> None:
    (violation,) = audit.writes_out_of_turn([*TURNS, write("one", 22), write("two", 23)])
    assert violation == "one wrote services team/demo in the turn of two"


def test_a_write_that_is_still_under_way_at_the_take_over_is_found() -> None:
    assert audit.writes_out_of_turn([*TURNS, write("one", 19, took=2)])


def test_a_write_before_the_lease_was_granted_is_found() -> None:
    assert audit.writes_out_of_turn([*TURNS, write("two", 20.001, took=0.5)])
    assert audit.writes_out_of_turn([write("one", -1), *TURNS])


def test_what_the_server_refused_was_not_written_and_gives_no_turn() -> None:
    assert audit.writes_out_of_turn([*TURNS, write("one", 22, status=409)]) == []
    assert audit.writes_out_of_turn([*TURNS, lease("one", 22, status=409), write("one", 23)])


def test_the_api_servers_lines_are_read(tmp_path: Path) -> None:
    event = {
        "verb": "patch",
        "userAgent": "millstream-operator (one)",
        "objectRef": {"resource": "llmdeployments", "subresource": "status", "namespace": "team", "name": "demo"},
        "responseStatus": {"code": 200},
        "requestReceivedTimestamp": "2026-01-01T00:00:00.250000Z",
        "stageTimestamp": "2026-01-01T00:00:01.000000Z",
    }
    (tmp_path / "audit.log").write_text(json.dumps(event) + "\n")
    (found,) = audit.read(tmp_path / "audit.log")
    assert (found.agent, found.resource, found.status) == ("millstream-operator (one)", "llmdeployments/status", 200)
    assert found.answered - found.received == 0.75
