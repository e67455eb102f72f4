"""The build context of each image: the folders that the COPY lines of its Dockerfile name.

    dependencies/<group>   third-party packages     see hack.images.dependencies
    models                 the demo models          runtime only
    kernels                compiled Triton kernels  runtime only; see hack.images.kernels
    interpreter            millstream.pth           where an isolated Python finds our packages
    app                    our own packages         last: it changes with every edit

The hash of a tree is cheap and needs none of its files; they are created only when the registry lacks the layer.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from hack.images import dependencies, kernels
from hack.images.errors import ImageError
from hack.images.layer import Entry, content_hash, copy_entries, entries_below

# The operator imports only these modules of the runtime, so an edit of the engine does not change its image.
CONTRACT_FILES = (
    "__init__.py",
    "allowed_origins.py",
    "config.py",
    "config_files.py",
    "context_limit.py",
    "config_json_fields.py",
    "draft_head_tensors.py",
    "draft_heads.py",
    "draft_tree.py",
    "errors.py",
    "kv_formats.py",
    "kv_layout.py",
    "layer_windows.py",
    "model_families.py",
    "roofline.py",
    "sources/__init__.py",
    "sources/allowed_hubs.py",
    "strict_json.py",
)
CONTRACT_PACKAGES = ("gguf", "job_memory", "quantization_config")


@dataclass(frozen=True, slots=True)
class Tree:
    """One folder of a build context."""

    input_hash: str
    stage: Callable[[Path, str], list[Entry]]  # (an empty folder, its path in the image) -> files


@dataclass(frozen=True, slots=True)
class Stage:
    """The inputs of all trees."""

    checkout: Path
    python_version: str
    base: str

    @property
    def uv(self) -> Path:
        """The uv that `make venv` installed."""
        return self.checkout / ".tools" / "bin" / "uv"


def trees(image: str, stage: Stage) -> dict[str, Tree]:
    """Map the folder names of the context to trees, for the image `operator` or `runtime`.

    Raises:
        ImageError: an input of the image is missing in the checkout.
    """
    lock = stage.checkout / "requirements" / f"{image}.txt"
    if not lock.is_file():
        raise ImageError(f"{lock} is missing: run `make lock`.")
    found = {
        f"dependencies/{name}": _dependencies(pins, stage)
        for name, pins in dependencies.group(lock.read_text()).items()
    }
    found["interpreter"] = _as_it_is(entries_below(stage.checkout / "hack" / "images" / "interpreter"))
    found["app"] = _app(_sources(image, stage.checkout), stage)
    if image == "runtime":
        found["models"] = _models(stage.checkout / "models")
        found["kernels"] = Tree(kernels.input_hash(stage.checkout, lock.read_text()), kernels.stage(stage.checkout))
    return found


def _dependencies(pins: str, stage: Stage) -> Tree:
    def make(folder: Path, target: str) -> list[Entry]:
        installed, chosen = folder / "installed", folder / "chosen"
        copy_entries(
            dependencies.install(pins, installed, uv=stage.uv, python_version=stage.python_version),
            chosen,
        )
        dependencies.compile_modules(chosen, target, python_version=stage.python_version, base=stage.base)
        return entries_below(chosen)

    return Tree(dependencies.input_hash(pins, stage.python_version), make)


def _sources(image: str, checkout: Path) -> list[Entry]:
    operator, runtime, kernels = checkout / "operator", checkout / "runtime", checkout / "kernels"
    cli = checkout / "cli"
    if image == "operator":
        contract = runtime / "millstream_runtime"
        found = [Entry(f"millstream_runtime/{name}", contract / name) for name in CONTRACT_FILES]
        for name in CONTRACT_PACKAGES:
            found += entries_below(contract / name, prefix=f"millstream_runtime/{name}/")
        packages = [operator / "millstream_operator"]
    else:
        found = []
        packages = [cli / "millstream", runtime / "millstream_runtime", kernels / "millstream_kernels"]
    for package in packages:
        found += entries_below(package, prefix=f"{package.name}/")
    return [entry for entry in found if "__pycache__" not in entry.name]


def _app(sources: Iterable[Entry], stage: Stage) -> Tree:
    sources = list(sources)

    def make(folder: Path, target: str) -> list[Entry]:
        for entry in sources:  # copies, not links: compiling writes next to them
            destination = folder / entry.name
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(entry.path, destination)
        dependencies.compile_modules(folder, target, python_version=stage.python_version, base=stage.base)
        return entries_below(folder)

    hash_input = f"{content_hash(sources)}\0{stage.python_version}"
    return Tree(hashlib.sha256(hash_input.encode()).hexdigest(), make)


def _models(folder: Path) -> Tree:
    if not any(folder.glob("*/config.json")):
        raise ImageError(
            f"{folder} holds no model folder with a config.json: the demo models are part of the checkout."
        )
    return _as_it_is(entries_below(folder))


def _as_it_is(entries: list[Entry]) -> Tree:
    def make(_folder: Path, _target: str) -> list[Entry]:
        return entries

    return Tree(content_hash(entries), make)
