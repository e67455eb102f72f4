"""Download a model into a folder, and verify it.

    millstream fetch --hugging-face org/name --revision main --into /models/name
    millstream fetch --image registry.example/org/name:1 --into /models/name

After an interruption, run it again: it continues from what has arrived. A complete folder (one with
.millstream-complete.json) is checked and not changed. Progress goes to stderr; one JSON line goes to stdout and, in a
pod, to the termination message. HF_ENDPOINT selects another hub; HTTPS_PROXY, NO_PROXY and SSL_CERT_FILE are honoured.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from millstream.arguments import CommandLineParser
from millstream.source_arguments import add_source_arguments, say, source_from
from millstream.termination import choose_termination_log, unwind_on_sigterm, write_termination_message
from millstream_runtime.errors import InvalidConfigError
from millstream_runtime.sources.fetch import DEFAULT_PARALLEL, MAX_PARALLEL, FetchOptions, fetch, human_summary
from millstream_runtime.sources.progress import DownloadProgress
from millstream_runtime.sources.progress_server import PORT, serve_progress


def run(argv: Sequence[str]) -> int:
    """Fetch a model; 0 when the folder is complete.

    Raises:
        RuntimeFailure: bad flags, or DownloadUnauthorized, DownloadFailed, DiskFull, CheckpointInvalid.
    """
    given = command_parser().parse_args(list(argv))
    if given.termination_message_path is not None:
        choose_termination_log(given.termination_message_path)
    if not 1 <= given.parallel <= MAX_PARALLEL:
        raise InvalidConfigError(f"--parallel is {given.parallel}; it must be between 1 and {MAX_PARALLEL}.")
    unwind_on_sigterm()
    options = FetchOptions(parallel=given.parallel, verify=given.verify, started=_report_in_a_pod)
    result = fetch(source_from(given), given.into, say, options)
    say(human_summary(result))
    line = json.dumps(result.as_json())
    print(line, flush=True)
    write_termination_message(line)
    return 0


def _report_in_a_pod(progress: DownloadProgress) -> None:
    """Let the operator see the bytes, at the port at which the runtime will answer."""
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        serve_progress(progress, PORT)


def command_parser() -> CommandLineParser:
    """Return the flags of the command."""
    parser = CommandLineParser(
        prog="millstream fetch",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_source_arguments(parser)
    flag = parser.add_argument
    flag(
        "--into",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="target folder; created if missing, may be a mount point",
    )
    flag(
        "--parallel", type=int, default=DEFAULT_PARALLEL, metavar="N", help="number of parallel downloads (default: 4)"
    )
    flag("--verify", action="store_true", help="hash a complete folder again instead of comparing sizes")
    flag("--termination-message-path", type=Path, metavar="FILE", help="default: /dev/termination-log where it exists")
    return parser
