"""The flags that say where a model comes from, shared by `fetch` and `inspect`. Secrets come by file or environment."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from millstream_runtime.errors import InvalidConfigError
from millstream_runtime.sources.client import RetryPolicy
from millstream_runtime.sources.hugging_face import DEFAULT_ENDPOINT, HuggingFace
from millstream_runtime.sources.image_reference import parse_reference
from millstream_runtime.sources.image_source import ImageSource
from millstream_runtime.sources.source import Source

ENDPOINT_VARIABLE, TOKEN_VARIABLE = "HF_ENDPOINT", "HF_TOKEN"
# host:port of registries without TLS, separated by commas: --plain-http for pods, whose flags the operator writes.
PLAIN_HTTP_VARIABLE = "PLAIN_HTTP_REGISTRIES"
SECRET_LIMIT_BYTES = 4096


def add_source_arguments(parser: argparse.ArgumentParser, *, required: bool = True) -> argparse._MutuallyExclusiveGroup:
    """The flags; the returned group takes one more kind of source."""
    kind = parser.add_mutually_exclusive_group(required=required)
    about = f"repository on the hub, or on ${ENDPOINT_VARIABLE}; of several GGUF files ORG/NAME:Q4_K_M"
    kind.add_argument("--hugging-face", metavar="ORG/NAME", help=about)
    kind.add_argument("--image", metavar="REFERENCE", help="OCI image with the model in /models, or OCI artifact")
    flag = parser.add_argument
    flag("--revision", metavar="REVISION", help="branch, tag or commit of --hugging-face (default: main)")
    flag("--token-file", type=Path, metavar="FILE", help=f"file with the hub's token (else ${TOKEN_VARIABLE})")
    flag(
        "--docker-config",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="docker config.json with the login for --image; repeatable, the first with a login is used",
    )
    flag(
        "--plain-http",
        action="store_true",
        help=f"the registry of --image has no TLS (also for registries in ${PLAIN_HTTP_VARIABLE})",
    )
    flag("--retries", type=int, default=6, metavar="N", help="consecutive attempts without progress (default: 6)")
    flag(
        "--timeout-seconds",
        type=int,
        default=30,
        metavar="N",
        help="timeout without data from the server (default: 30)",
    )
    return kind


def source_from(given: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> Source:
    """The source that the flags name.

    Raises:
        InvalidConfigError: a flag that does not go with the source, or a value that cannot work.
    """
    if not 1 <= given.retries <= 100:
        raise InvalidConfigError(f"--retries is {given.retries}; it must be between 1 and 100.")
    if not 1 <= given.timeout_seconds <= 3600:
        raise InvalidConfigError(f"--timeout-seconds is {given.timeout_seconds}; it must be between 1 and 3600.")
    policy = RetryPolicy(attempts=given.retries, timeout_seconds=given.timeout_seconds, say=say)
    if given.hugging_face is not None:
        if given.docker_config or given.plain_http:
            raise InvalidConfigError("--docker-config and --plain-http go with --image, not with --hugging-face.")
        return HuggingFace(
            given.hugging_face,
            given.revision if given.revision is not None else "main",
            endpoint=environment.get(ENDPOINT_VARIABLE) or DEFAULT_ENDPOINT,
            token=read_token(given.token_file, environment),
            policy=policy,
        )
    if given.revision is not None or given.token_file is not None:
        raise InvalidConfigError(
            "--revision and --token-file go with --hugging-face; the version of --image is part of the reference."
        )
    reference = parse_reference(given.image)
    plain = {name.strip() for name in environment.get(PLAIN_HTTP_VARIABLE, "").split(",")}
    return ImageSource(
        reference,
        docker_configs=given.docker_config,
        plain_http=given.plain_http or reference.registry in plain,
        policy=policy,
    )


def say(line: str) -> None:
    """One line for a person, on stderr."""
    print(f"millstream: {line}", file=sys.stderr, flush=True)


def read_token(path: Path | None, environment: Mapping[str, str]) -> str | None:
    """The hub's token; None where none is given. It is never quoted.

    Raises:
        InvalidConfigError: the file cannot be read or holds no token.
    """
    if path is None:
        token, where = environment.get(TOKEN_VARIABLE, ""), f"${TOKEN_VARIABLE}"
        if not token:
            return None
    else:
        where = f"--token-file {path}"
        try:
            with path.open("rb") as file:
                token = file.read(SECRET_LIMIT_BYTES).decode(errors="replace")
        except OSError as error:
            raise InvalidConfigError(f"{where} cannot be read: {error.strerror}.") from None
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidConfigError(f"{where} does not hold a token: one word of ASCII.")
    return token
