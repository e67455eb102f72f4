"""Print the shape of a model as one line of JSON.

Reads config.json, the generation and tokenizer configs and the headers of the *.safetensors files, never the weights.
The line has at most 4 KiB; docs/model-sources.md describes it. In a pod it is also the termination message, where the
operator reads it. `--config` replaces the model's own config.json, or is used alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from millstream.arguments import CommandLineParser
from millstream.source_arguments import add_source_arguments, source_from
from millstream.termination import choose_termination_log, unwind_on_sigterm, write_termination_message
from millstream_runtime.errors import InvalidConfigError
from millstream_runtime.sources.inspection.inspect import inspect_config, inspect_folder, inspect_source, read_config
from millstream_runtime.sources.inspection.shape import to_json


def run(argv: Sequence[str]) -> int:
    """Print the shape; 0.

    Raises:
        RuntimeFailure: bad flags, or DownloadUnauthorized, DownloadFailed, CheckpointInvalid.
    """
    given = command_parser().parse_args(list(argv))
    if given.termination_message_path is not None:
        choose_termination_log(given.termination_message_path)
    unwind_on_sigterm()
    line = to_json(_shape(given))
    print(line, flush=True)
    write_termination_message(line)
    return 0


def _shape(given: argparse.Namespace) -> dict[str, Any]:
    config = read_config(given.config) if given.config is not None else None
    if given.path is not None:
        return inspect_folder(given.path, config)
    if given.hugging_face is not None or given.image is not None:
        return inspect_source(source_from(given), config)
    if config is None:
        raise InvalidConfigError("Give a model: --hugging-face, --image, --path, or --config alone.")
    return inspect_config(config)


def command_parser() -> CommandLineParser:
    """Return the flags of the command."""
    parser = CommandLineParser(
        prog="millstream inspect",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kind = add_source_arguments(parser, required=False)
    kind.add_argument("--path", type=Path, metavar="FOLDER", help="a model folder, such as a mounted volume")
    parser.add_argument("--config", type=Path, metavar="FILE", help="a config.json instead of the model's own")
    parser.add_argument(
        "--termination-message-path", type=Path, metavar="FILE", help="default: /dev/termination-log where it exists"
    )
    return parser
