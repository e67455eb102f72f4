"""Read the part of the Dockerfile language that needs no container to build: no RUN, no ADD, no stages.

    FROM base                 the layers below ours
    COPY source/ /target/     one layer each, in order: what changes least comes first
    ENV, LABEL, USER, ...     the image's configuration

Anything else is refused rather than ignored, so the file means here what it means to `docker build`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from hack.images.errors import ImageError

_VARIABLE = re.compile(r"\$\{(\w+)\}|\$(\w+)")


@dataclass(frozen=True, slots=True)
class Copy:
    """One COPY: a folder of the build context and where its content lands."""

    source: str  # relative to the context, without the trailing slash
    target: str  # absolute, without the trailing slash


@dataclass(slots=True)
class Dockerfile:
    """The instructions of one Dockerfile."""

    base: str = ""
    arguments: dict[str, str] = field(default_factory=dict)
    copies: list[Copy] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    user: str = ""
    working_dir: str = "/"
    entrypoint: list[str] = field(default_factory=list)
    ports: list[str] = field(default_factory=list)
    stop_signal: str = ""


def parse(text: str, arguments: Mapping[str, str], *, name: str) -> Dockerfile:
    """Parse the text of a Dockerfile; `arguments` are what `--build-arg` would give.

    Raises:
        ImageError: an instruction outside the subset, or one that is malformed; names the file and the line.
    """
    dockerfile = Dockerfile()
    for number, line in _logical_lines(text):
        instruction, _, rest = line.partition(" ")
        try:
            _apply(dockerfile, instruction.upper(), rest.strip(), arguments)
        except ValueError as error:
            raise ImageError(f"{name} line {number}: {error}.") from None
    if not dockerfile.base:
        raise ImageError(f"{name} has no FROM: an image needs a base.")
    if not dockerfile.entrypoint:
        raise ImageError(f"{name} has no ENTRYPOINT: the image would start nothing.")
    return dockerfile


def _apply(dockerfile: Dockerfile, instruction: str, rest: str, given: Mapping[str, str]) -> None:
    match instruction:
        case "ARG":
            key, has_default, default = rest.partition("=")
            if key in given or has_default:
                dockerfile.arguments[key] = given.get(key, default.strip('"'))
        case "FROM":
            if dockerfile.base:
                raise ValueError("a second FROM: an image here has one stage")
            dockerfile.base = _expand(rest, dockerfile.arguments)
        case "COPY":
            dockerfile.copies.append(_copy(_expand(rest, dockerfile.arguments)))
        case "ENV" | "LABEL":
            pairs = dockerfile.env if instruction == "ENV" else dockerfile.labels
            pairs.update((key, _expand(value, dockerfile.arguments)) for key, value in _pairs(rest))
        case _:
            _configure(dockerfile, instruction, rest)


def _configure(dockerfile: Dockerfile, instruction: str, rest: str) -> None:
    match instruction:
        case "USER":
            dockerfile.user = rest
        case "WORKDIR":
            dockerfile.working_dir = rest
        case "EXPOSE":
            dockerfile.ports += [port if "/" in port else f"{port}/tcp" for port in rest.split()]
        case "STOPSIGNAL":
            dockerfile.stop_signal = rest
        case "ENTRYPOINT":
            dockerfile.entrypoint = _command(rest)
        case _:
            raise ValueError(f"{instruction} is outside the subset that builds without a container")


def _expand(value: str, arguments: Mapping[str, str]) -> str:
    def variable(match: re.Match[str]) -> str:
        key = match[1] or match[2]
        if key not in arguments:
            raise ValueError(f"${key} has no value: declare it with ARG, or pass it")
        return arguments[key]

    return _VARIABLE.sub(variable, value)


def _copy(rest: str) -> Copy:
    words = shlex.split(rest)
    if len(words) != 2 or not words[0].endswith("/") or not words[1].endswith("/") or words[1][0] != "/":
        raise ValueError("COPY takes one folder and one absolute target, both ending in '/'")
    return Copy(words[0].rstrip("/"), words[1].rstrip("/"))


def _pairs(rest: str) -> Iterator[tuple[str, str]]:
    for word in shlex.split(rest):
        key, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"'{word}' is not KEY=value")
        yield key, value


def _command(rest: str) -> list[str]:
    try:
        command = json.loads(rest)
    except json.JSONDecodeError:
        command = None
    if not isinstance(command, list) or not command or not all(isinstance(word, str) for word in command):
        raise ValueError("ENTRYPOINT must be a JSON list of strings: the image may have no shell")
    return command


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Number and text of each instruction, comments dropped and continued lines joined."""
    start, parts = 0, list[str]()
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        start = start if parts else number
        parts.append(line.removesuffix("\\").strip())
        if not line.endswith("\\"):
            yield start, " ".join(parts)
            parts = []
    if parts:
        yield start, " ".join(parts)
