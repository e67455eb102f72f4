"""Serve a model behind the OpenAI API, with the same runtime as in a pod.

    millstream serve models/demo-chat               a model folder
    millstream serve examples/demo.yaml --port 9000 an LLMDeployment; flags override the file
    millstream serve --config=boot.json --live-config=live.json       files, as the operator mounts them into a pod
    millstream serve --model=/models/demo-chat …    flags alone

Flags override files; --live-config is watched, and applied while the server runs.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import re
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millstream.arguments import CommandLineParser
from millstream.boot_progress import BootProgress
from millstream.manifest import config_from_manifest, model_root
from millstream.output_streams import can_redraw
from millstream_runtime.boot import BootLedger
from millstream_runtime.config import DType, RuntimeConfig
from millstream_runtime.config_files import read_boot
from millstream_runtime.config_flags import add_config_flags, from_namespace
from millstream_runtime.errors import FailureReason, InvalidConfigError, RuntimeFailure
from millstream_runtime.processes.unblocked_stderr import unblock_standard_error

if TYPE_CHECKING:
    from millstream_runtime.server.engine.client import EngineLauncher

LOCAL_HOST = "127.0.0.1"
RUNTIME_PACKAGES = ("torch", "fastapi", "uvicorn", "httptools", "tokenizers", "jinja2", "msgspec", "prometheus_client")
BUSY_THREADS = ("tokenizer",)
HINT = "give a folder with config.json and *.safetensors, or with a *.gguf file"
REPOSITORY_PATTERN = r"[\w-][\w.-]*/[\w.-]+(:[\w.-]+)?"
MANIFEST_SUFFIXES = (".yaml", ".yml", ".json")


def run(argv: Sequence[str]) -> int:
    """Serve until drained; 0 then.

    Raises:
        RuntimeFailure: bad flags, a bad file, a busy port, or a failure of the engine.
    """
    ledger = BootLedger()
    unblock_standard_error()
    given = parse_command_line(argv)
    config = config_of(given)
    require_model_folder(Path(config.model))
    require_runtime_packages()
    from millstream_runtime.server.engine.subprocess import EngineProcessLauncher
    from millstream_runtime.server.http.sockets import bind

    listener = bind(config.host, config.port)
    engines = EngineProcessLauncher(config)
    engines.prepare()  # torch is the longest import; overlap it with FastAPI's
    try:
        serve(config, listener, ledger, engines, given.live_config)
    finally:
        engines.discard()
    _exit_if_stuck()
    return 0


def serve(
    config: RuntimeConfig,
    listener: socket.socket,
    ledger: BootLedger,
    launch_engine: EngineLauncher,
    live_config: Path | None = None,
) -> None:
    """Answer on `listener` until drained.

    Raises:
        RuntimeFailure: as `run`.
    """
    from millstream_runtime.logs import configure_logging, set_log_level
    from millstream_runtime.server.model_server import ModelServer
    from millstream_runtime.server.operations.garbage_collector import freeze_gc

    on_terminal = sys.stderr.isatty()
    configure_logging(default_level="warning" if on_terminal else "info")
    if config.log_level is not None:
        set_log_level(config.log_level)
    ledger.subscribe(freeze_gc)
    is_interactive = on_terminal or config.host == LOCAL_HOST
    view = BootProgress(
        ledger,
        config,
        listener.getsockname()[1],
        sys.stderr,
        live=can_redraw(sys.stderr),
        shows_example=is_interactive,
    )
    try:
        asyncio.run(ModelServer(config, listener, ledger, launch_engine, live_config=live_config).run())
    finally:
        view.close()


def parse_command_line(argv: Sequence[str]) -> argparse.Namespace:
    """Raises InvalidConfigError: an unknown flag, or a value of another type."""
    return command_parser().parse_args(list(argv))


def command_parser() -> CommandLineParser:
    """Return the flags of the command."""
    parser = CommandLineParser(
        prog="millstream serve",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", nargs="?", metavar="MODEL_FOLDER|DEPLOYMENT.yaml", help="what to serve")
    parser.add_argument("--config", type=Path, metavar="FILE", help="the boot half of the configuration, as JSON")
    parser.add_argument(
        "--live-config", type=Path, metavar="FILE", help="the live half as JSON: watched while the server runs"
    )
    add_config_flags(parser)
    return parser


def config_of(given: argparse.Namespace) -> RuntimeConfig:
    """The configuration of a parsed command line: flags, or a target or a file with flags over it.

    Raises:
        RuntimeFailure: a flag, the file or the folder cannot be used; the message names it.
    """
    if given.config is not None:
        if given.target is not None or given.model is not None:
            raise InvalidConfigError(f"Give either --config={given.config} or a model, not both.")
        config = replace(RuntimeConfig.of(read_boot(given.config)), **_given_fields(given))
        return config if given.dtype is not None else replace(config, auto_dtype=DType.FLOAT32)
    if given.target is None:
        if given.model is None:
            raise InvalidConfigError("Nothing to serve: give a model folder, an LLMDeployment file or --model.")
        return from_namespace(given)
    if given.model is not None:
        raise InvalidConfigError(f"Give either {given.target} or --model={given.model}, not both.")
    if Path(given.target).suffix.lower() in MANIFEST_SUFFIXES:
        config = config_from_manifest(Path(given.target), LOCAL_HOST, given.api_keys_file)
        return replace(config, **_given_fields(given))
    given.model = str(find_model_folder(given.target))
    given.host = given.host or LOCAL_HOST
    return from_namespace(given)


def find_model_folder(target: str) -> Path:
    """The folder itself, or one of that name below the model root.

    Raises:
        RuntimeFailure: neither exists.
    """
    for folder in (Path(target), model_root() / target):
        if folder.is_dir():
            return folder
    if Path(target).is_file():
        raise InvalidConfigError(f"{target} is a file; give a model folder, or an LLMDeployment as .yaml or .json.")
    advice = "set MILLSTREAM_MODELS_DIR to look elsewhere"
    if re.fullmatch(REPOSITORY_PATTERN, target):
        advice = f"to download it, `millstream fetch --hugging-face {target} --into FOLDER`, then serve FOLDER"
    raise RuntimeFailure(
        FailureReason.CHECKPOINT_INVALID, f"There is no model folder {target} here or in {model_root()}; {advice}."
    )


def require_model_folder(folder: Path) -> None:
    """Raises RuntimeFailure: there is none; the message names the models next to it."""
    if folder.is_dir() and _holds_a_model(folder):
        return
    if folder.is_dir():
        raise RuntimeFailure(FailureReason.CHECKPOINT_INVALID, f"{folder}/config.json does not exist; {HINT}.")
    if folder.is_file():
        raise RuntimeFailure(FailureReason.CHECKPOINT_INVALID, f"{folder} is a file; {HINT}.")
    try:
        siblings = sorted(path.name for path in folder.parent.iterdir() if _holds_a_model(path))
    except OSError:
        siblings = []
    hint = f"{folder.parent} has: {', '.join(siblings)}" if siblings else HINT
    raise RuntimeFailure(FailureReason.CHECKPOINT_INVALID, f"The model folder {folder} does not exist; {hint}.")


def _holds_a_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() or any(folder.glob("*.gguf"))


def _given_fields(given: argparse.Namespace) -> dict[str, Any]:
    names = [field.name for field in fields(RuntimeConfig)]
    return {name: value for name in names if (value := getattr(given, name, None)) is not None}


def require_runtime_packages() -> None:
    """Raises InvalidConfigError: this is an installation for `validate` or for the operator."""
    missing = [name for name in RUNTIME_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise InvalidConfigError(
            f"Serving needs packages that are not installed ({', '.join(missing)}): run `make venv` in the checkout, "
            "or pip install '.[runtime]' there."
        )


def _exit_if_stuck() -> None:
    """Exit without the interpreter's shutdown if a tokenizer thread still runs: it could block or crash it."""
    if any(thread.name.startswith(BUSY_THREADS) for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
