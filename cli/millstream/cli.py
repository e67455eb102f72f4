"""The command `millstream`: a thin dispatcher that imports a subcommand only when it is called.

`millstream --help` therefore answers in the time Python takes to start, and `validate` runs where torch is not
installed. A failure is one line on stderr, `millstream: <sentence>`, and an exit code: 1 for something that went
wrong, 2 for a command line that cannot work. In a pod the same sentence goes to the termination message, where the
operator reads it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from contextlib import suppress

from millstream import __version__
from millstream.arguments import did_you_mean
from millstream.output_streams import drop_output, output_failure, prepare_output_streams, reader_is_gone
from millstream.termination import write_termination_message
from millstream_runtime.errors import FailureReason, InvalidConfigError, RuntimeFailure

EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130

# command -> (module with `run(argv) -> int`, one line of help)
COMMANDS = {
    "plan": ("millstream.commands.plan", "show what the operator would choose for LLMDeployment files, and why"),
    "serve": ("millstream.commands.serve", "serve a model folder or an LLMDeployment file behind the OpenAI API"),
    "fetch": ("millstream.commands.fetch", "download a model from a hub or an image registry, resumable and verified"),
    "inspect": ("millstream.commands.inspect", "print the shape of a model as one line of JSON; reads no weights"),
    "validate": ("millstream.commands.validate", "check LLMDeployment files; exit code 1 if a file is invalid"),
    "quantize": ("millstream.commands.quantize", "make a quantized checkpoint, calibrated on data of your own"),
    "quality": (
        "millstream.commands.quality",
        "compare a changed model with its base on held-out documents; exit code 3: worse",
    ),
    "tune-draft": (
        "millstream.commands.tune_draft",
        "tune a draft model on its target's answers to your prompts; exit code 3: not better",
    ),
    "route": ("millstream.commands.route", "explain which replica the gateway's picker would choose for a prompt"),
    "bench": ("millstream.commands.bench", "load an OpenAI endpoint or an engine and measure latency and throughput"),
    "completion": ("millstream.commands.completion", "print the completion script of bash, zsh or fish"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit code."""
    prepare_output_streams()
    code = 0
    try:
        try:
            code = _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not reader_is_gone():
            raise  # of a connection, not of the output
        drop_output()  # `millstream … | head` has what it wanted
    except OSError as error:
        if (failure := output_failure(error)) is None:
            raise
        drop_output()
        return report(failure)
    return code


def _run(arguments: list[str]) -> int:
    try:
        return _dispatch(arguments)
    except RuntimeFailure as failure:
        return report(failure)
    except OSError as error:  # what no command has words for, such as a name that is too long
        if error.filename is None:
            raise
        return report(RuntimeFailure(FailureReason.INVALID_CONFIG, f"{error.filename}: {error.strerror}."))
    except KeyboardInterrupt:
        print("millstream: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def report(failure: RuntimeFailure) -> int:
    """Report the failure in the termination message and on stderr, which may be unwritable; return the exit code."""
    with suppress(OSError):
        write_termination_message(failure.termination_message())
        print(f"millstream: {failure.message}", file=sys.stderr, flush=True)
    return EXIT_USAGE if isinstance(failure, InvalidConfigError) else EXIT_FAILURE


def _dispatch(arguments: list[str]) -> int:
    if len(arguments) > 1 and arguments[0] == "help":
        arguments = [arguments[1], "--help"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if arguments else EXIT_USAGE
    if arguments[0] in ("-V", "--version"):
        print(f"millstream {__version__}")
        return 0
    command, rest = arguments[0], arguments[1:]
    if command not in COMMANDS:
        meant = did_you_mean(command, COMMANDS) or "."
        raise InvalidConfigError(f"Unknown command {command!r}{meant} The commands are: {', '.join(COMMANDS)}.")
    run = importlib.import_module(COMMANDS[command][0]).run
    return int(run(rest))


def _help() -> str:
    lines = ["usage: millstream COMMAND [arguments]", ""]
    lines += [f"  {name:<11} {text}" for name, (_, text) in COMMANDS.items()]
    lines += ["", "  --version  print the version", "", "Run `millstream help COMMAND` for the flags of a command."]
    return "\n".join(lines)
