"""The command `millstream`: a thin dispatcher that imports a verb only when it is called.

`millstream --help` therefore answers in the time Python takes to start, and `validate` runs where torch is not
installed. A failure is one line on stderr, `millstream: <sentence>`, and an exit code: 1 for something that went
wrong, 2 for a command line that cannot work. In a pod the same sentence goes to the termination message, where the
operator reads it.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from millstream import __version__
from millstream.termination import write_termination_message
from millstream_runtime.errors import InvalidConfigError, RuntimeFailure

EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130

# verb -> (module with `run(argv) -> int`, one line of help)
VERBS = {
    "plan": ("millstream.verbs.plan", "what the operator would choose for LLMDeployment files, and why"),
    "serve": ("millstream.verbs.serve", "run a model behind the OpenAI API: a model folder or an LLMDeployment file"),
    "fetch": ("millstream.verbs.fetch", "a model from a hub or an image registry into a folder: resumed, verified"),
    "inspect": ("millstream.verbs.inspect", "the shape of a model, without its weights: one line of JSON"),
    "validate": ("millstream.verbs.validate", "check LLMDeployment files: one line a file, exit 1 if one is wrong"),
    "bench": ("millstream.verbs.bench", "load an OpenAI endpoint or an engine; latencies, throughput, goodput"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except RuntimeFailure as failure:
        return report(failure)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `millstream … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE


def report(failure: RuntimeFailure) -> int:
    """Tell the person (stderr) and the operator (termination message); return the exit code."""
    print(f"millstream: {failure.message}", file=sys.stderr, flush=True)
    write_termination_message(failure.termination_message())
    return EXIT_USAGE if isinstance(failure, InvalidConfigError) else EXIT_FAILURE


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if arguments else EXIT_USAGE
    if arguments[0] in ("-V", "--version"):
        print(f"millstream {__version__}")
        return 0
    verb, rest = arguments[0], arguments[1:]
    if verb not in VERBS:
        raise InvalidConfigError(f"There is no verb {verb!r}; the verbs are: {', '.join(VERBS)}.")
    run = importlib.import_module(VERBS[verb][0]).run
    return int(run(rest))


def _help() -> str:
    lines = ["usage: millstream VERB [arguments]", ""]
    lines += [f"  {verb:<10} {text}" for verb, (_, text) in VERBS.items()]
    lines += ["", "  --version  print the version", "  `millstream VERB --help` tells the rest."]
    return "\n".join(lines)
