"""`millstream route explain`: the picker's decision, on a terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millstream.cli import main
from millstream.commands.route import POLICIES
from millstream_gateway.pick import Policy

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
REPLICAS = EXAMPLES / "replicas.json"
HELD = json.loads(REPLICAS.read_text())["replicas"][0]["holds"][0]


def explain(*flags: str) -> int:
    return main(["route", "explain", str(EXAMPLES / "demo.yaml"), *flags])


def test_a_held_prompt_goes_to_its_holder_and_another_one_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain("--prompt", f"{HELD} What does a chain cost?", "--replicas", str(REPLICAS)) == 0
    held = capsys.readouterr().out
    assert "Picked 10.0.0.11:8000" in held
    assert explain("--prompt", HELD[::-1], "--replicas", str(REPLICAS), "--policy", "MostFreeKV") == 0
    other = capsys.readouterr().out
    assert "Picked 10.0.0.12:8000: it has the most free KV cache" in other
    for printed in (held, other):
        assert printed.startswith("demo-chat: ")
        assert "10.0.0.13:8000" in printed
        assert "10.0.0.14:8000" not in printed  # it drains


def test_without_a_state_the_replicas_of_the_file_are_idle(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain("--prompt", "hi") == 0
    assert "has not reported: assumed to be idle" in capsys.readouterr().out


def test_where_no_replica_serves_the_exit_code_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = tmp_path / "state.json"
    state.write_text(json.dumps({"replicas": json.loads(REPLICAS.read_text())["replicas"][3:]}))
    assert explain("--prompt", "hi", "--replicas", str(state)) == 3
    assert "No replica serves" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (("--prompt", ""), 2, "--prompt is empty"),
        (("--prompt", "hi", "--policy", "Best"), 2, "invalid choice: 'Best'"),
        (("--prompt", "hi", "--replicas", "absent.json"), 1, "absent.json: cannot be read"),
        (("--prompt", "hi", "--replicas", str(EXAMPLES / "demo.yaml")), 1, "not JSON that can be read"),
    ],
)
def test_bad_flags_are_one_sentence(
    flags: tuple[str, ...], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain(*flags) == code
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_without_a_subcommand_the_sentence_says_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["route"]) == 2
    assert "millstream route explain FILE" in capsys.readouterr().err


def test_the_flag_takes_the_policies_of_the_picker() -> None:
    assert tuple(Policy) == POLICIES
