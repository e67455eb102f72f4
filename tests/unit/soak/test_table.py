"""The tables of docs/reliability.md are those of the committed results."""

from __future__ import annotations

from tests.soak import table


def test_the_page_says_what_was_found() -> None:
    text = table.PAGE.read_text()
    assert text == table.page(text, table.read()), "run `python -m tests.soak.table`"


def test_a_fault_that_was_not_survived_shows() -> None:
    row = {"runs": 9, "struck": 9, "converged": 8, "slowest_seconds": 3.2}
    found = {"kills": {"result": {"table": {"create: killed before": row}}}}
    assert "| **killed before** | 8 of 9, 3 s |" in table.tables(
        {
            "kills": found["kills"]
            | {"command": "c", "date": "d", "took_seconds": 60, "goals_missed": [], "hardware": HERE}
        }
    )


HERE = {"cpu": "x", "cores": 2, "load_average_at_the_end": [1.0, 1.0, 1.0]}
