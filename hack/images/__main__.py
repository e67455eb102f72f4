"""`python -m hack.images`: build and push what changed. `python -m hack.images stage IMAGE DIR`: a build context."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hack.images.build import IMAGES, build, context_of, read_dockerfile
from hack.images.errors import ImageError
from hack.images.layer import copy_entries
from hack.images.registry import Registry

CHECKOUT = Path(__file__).resolve().parents[2]
RESULT = CHECKOUT / ".tools" / "images.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 when the registry holds every image, 1 with one sentence on stderr when not."""
    options = _parser().parse_args(argv)
    try:
        if options.command == "stage":
            _stage(options.image, options.directory)
        else:
            _build(options.registry, options.base)
    except ImageError as error:
        print(f"images: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"images: {error.filename or 'a file'}: {error.strerror or error}.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("images: interrupted; run it again; what was pushed is kept.", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hack.images", description=__doc__)
    parser.add_argument(
        "--registry", default="", help="host:port to push to (default: what `python3 -m hack.cluster registry` names)"
    )
    parser.add_argument(
        "--base",
        default=os.environ.get("MILLSTREAM_BASE_IMAGE", ""),
        help="image with Python below ours; fetched with docker when it is not in the registry "
        "(default: MILLSTREAM_BASE_IMAGE, else what `python3 -m hack.cluster base-image` names)",
    )
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("build", help="build and push the images whose inputs changed (default)")
    stage = commands.add_parser("stage", help="write an image's build context, for `docker build`")
    stage.add_argument("image", choices=IMAGES)
    stage.add_argument("directory", type=Path, help="a folder that does not exist yet")
    return parser


def _build(address: str, base: str) -> None:
    started = time.monotonic()
    if not address:
        address = _run([sys.executable, "-m", "hack.cluster", "registry"], "find the local cluster's registry").strip()
    registry = Registry(address)
    base = _base_in(address, base)
    references = {}
    for image in IMAGES:
        began = time.monotonic()
        built = build(image, checkout=CHECKOUT, registry=registry, base=base, say=_Timed(image))
        references[image] = built.reference
        state = f"{time.monotonic() - began:.1f} s" if built.fresh else "unchanged"
        print(f"images: {image:8} {built.reference}  ({state})", flush=True)
    RESULT.parent.mkdir(exist_ok=True)
    temporary = RESULT.with_suffix(".json.new")
    temporary.write_text(json.dumps(references, indent=2) + "\n")
    temporary.replace(RESULT)
    print(f"images: done in {time.monotonic() - started:.1f} s", flush=True)


class _Timed:
    """Says a layer's line with the seconds since the one before."""

    def __init__(self, image: str) -> None:
        self._image = image
        self._last = time.monotonic()

    def __call__(self, line: str) -> None:
        now = time.monotonic()
        print(f"images: {self._image:8} {line} ({now - self._last:.1f} s)", flush=True)
        self._last = now


def _base_in(address: str, base: str) -> str:
    """A reference to the base image inside the registry; Docker carries it there when it comes from elsewhere."""
    if not base:
        base = _run([sys.executable, "-m", "hack.cluster", "base-image"], "name the local cluster's base image").strip()
    if base.startswith(f"{address}/"):
        return base
    name, _, version = base.rpartition("/")[2].replace("@sha256", "").partition(":")
    local = f"{address}/base-{name}:{version or 'latest'}"
    for command in (["docker", "pull", base], ["docker", "tag", base, local], ["docker", "push", local]):
        _run(command, f"bring the base image {base} to {address}")
    return local


def _run(command: list[str], purpose: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=CHECKOUT)
    except FileNotFoundError:
        raise ImageError(f"Cannot {purpose}: {command[0]} is not installed.") from None
    if done.returncode:
        raise ImageError(f"Cannot {purpose}: {(done.stderr or done.stdout).strip()[-400:]}")
    return done.stdout


def _stage(image: str, directory: Path) -> None:
    if directory.exists():
        raise ImageError(f"{directory} exists: name a folder that does not, so that nothing of yours is mixed in.")
    dockerfile = read_dockerfile(image, CHECKOUT, base="scratch")
    scratch = directory.with_name(f"{directory.name}.work")
    context = context_of(image, dockerfile, CHECKOUT)
    for copy in {copy.source: copy for copy in dockerfile.copies}.values():  # a folder may be copied to two places
        tree = context[copy.source]
        copy_entries(tree.stage(scratch / copy.source, copy.target), directory / copy.source)
    subprocess.run(["rm", "-rf", str(scratch)], check=True)
    print(f"images: {directory} is the context of hack/images/{image}/Dockerfile")


if __name__ == "__main__":
    sys.exit(main())
