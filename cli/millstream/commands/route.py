"""Explain which replica of a deployment the gateway's picker would choose for a prompt, and why.

The decision is the picker's own code. Without --replicas all of the file's replicas are assumed to be idle and to hold
nothing, so the hash alone decides.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from millstream.arguments import CommandLineParser
from millstream.manifest import manifest_reader
from millstream_runtime.errors import FailureReason, InvalidConfigError, RuntimeFailure

if TYPE_CHECKING:
    from millstream_gateway.state_file import PickerState

MOST_FILE_BYTES = 64 << 20
EXIT_NO_REPLICA = 3
# Of `millstream_gateway.pick.Policy`; the runtime image has no gateway package, and completes the flag nevertheless.
POLICIES = ("PredictedTTFT", "MostFreeKV", "LeastRequests", "RoundRobin")


def run(argv: Sequence[str]) -> int:
    """Print the table of costs. 0; 3 if no replica serves.

    Raises:
        RuntimeFailure: bad flags, a file that cannot be used, or an installation without the operator package.
    """
    given = command_parser().parse_args(list(argv))
    if given.command is None:
        raise InvalidConfigError("Say what to do: millstream route explain FILE --prompt TEXT.")
    if not given.prompt:
        raise InvalidConfigError("--prompt is empty; give the text of a user message.")
    return _explain(given)


def _explain(given: argparse.Namespace) -> int:
    deployment = manifest_reader()(given.file)
    from millstream_gateway.explanation import explain
    from millstream_gateway.pick import Policy, pick
    from millstream_gateway.routed_request import routed_request
    from millstream_gateway.state_file import user_message

    model, policy = deployment.served_name, Policy(given.policy)
    state = _state(given.replicas, model, deployment.spec.replicas)
    request = routed_request("explain", model, user_message(given.prompt))
    picked = pick(request, state.replicas, state.beliefs, state.now_seconds, policy)
    print(explain(request, picked, state.beliefs, policy))
    return 0 if picked.ranked else EXIT_NO_REPLICA


def _state(path: Path | None, model: str, num_replicas: int) -> PickerState:
    from millstream_gateway.state_file import StateError, idle_state, read_state

    if path is None:
        return idle_state(num_replicas)
    try:
        if path.stat().st_size > MOST_FILE_BYTES:
            raise RuntimeFailure(FailureReason.INVALID_CONFIG, f"{path}: larger than {MOST_FILE_BYTES >> 20} MiB.")
        return read_state(path.read_bytes(), model)
    except OSError as error:
        raise RuntimeFailure(FailureReason.INVALID_CONFIG, f"{path}: cannot be read: {error.strerror}.") from None
    except StateError as error:
        raise RuntimeFailure(FailureReason.INVALID_CONFIG, f"{path}: {error}.") from None


def command_parser() -> CommandLineParser:
    """Return the flags of the command."""
    parser = CommandLineParser(prog="millstream route", allow_abbrev=False, description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="explain")
    command = commands.add_parser("explain", allow_abbrev=False, help="which replica, and what each would cost")
    flag = command.add_argument
    flag("file", type=Path, metavar="FILE", help="YAML file with one LLMDeployment")
    flag("--prompt", required=True, metavar="TEXT", help="a user message")
    flag("--replicas", type=Path, metavar="FILE", help="JSON: what each replica reports and is believed to hold")
    flag("--policy", choices=POLICIES, default=POLICIES[0], help=f"how to pick (default: {POLICIES[0]})")
    return parser
