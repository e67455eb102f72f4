"""What goes into an image: the Dockerfiles and the trees agree, and the tag moves with what it is made from."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hack.images.build import context_of, read_dockerfile, tag_of
from hack.images.errors import ImageError

pytestmark = pytest.mark.deep

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("hack/images", "hack/kernels", "requirements", "operator", "runtime", "kernels", "cli", "models")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The parts of this checkout that images are made from, with a small stand-in for the demo models' weights."""
    ignore = shutil.ignore_patterns("__pycache__", "*.safetensors")
    for folder in FOLDERS:
        if (ROOT / folder).is_dir():
            shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignore)
    (tmp_path / "models" / "demo-chat").mkdir(parents=True, exist_ok=True)
    (tmp_path / "models" / "demo-chat" / "config.json").write_text("{}")
    return tmp_path


def tag(image: str, checkout: Path, base_digest: str = "sha256:1") -> str:
    dockerfile = read_dockerfile(image, checkout, "base")
    return tag_of(dockerfile, context_of(image, dockerfile, checkout), base_digest)


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


def test_the_tag_is_the_same_for_the_same_inputs(checkout: Path) -> None:
    assert tag("runtime", checkout) == tag("runtime", checkout)


@pytest.mark.parametrize(
    ("path", "moves"),
    [
        ("runtime/millstream_runtime/engine/request.py", {"runtime"}),
        ("runtime/millstream_runtime/config.py", {"operator", "runtime"}),
        ("runtime/millstream_runtime/model_families.py", {"operator", "runtime"}),
        ("runtime/millstream_runtime/quantization_config/scheme.py", {"operator", "runtime"}),
        ("operator/millstream_operator/api/spec.py", {"operator"}),
        ("requirements/operator.txt", {"operator"}),
        ("models/demo-chat/config.json", {"runtime"}),
        ("kernels/millstream_kernels/attention/decode.py", {"runtime"}),
        ("hack/kernels/prebuild.py", {"runtime"}),
    ],
)
def test_an_edit_moves_the_tags_of_the_images_it_is_in(checkout: Path, path: str, moves: set[str]) -> None:
    before = {image: tag(image, checkout) for image in ("operator", "runtime")}
    append(checkout / path, "\nadded==1\n" if path.startswith("requirements") else "\n")
    assert {image for image in before if tag(image, checkout) != before[image]} == moves


def test_another_base_is_another_image(checkout: Path) -> None:
    assert tag("operator", checkout, "sha256:1") != tag("operator", checkout, "sha256:2")


def test_an_environment_variable_of_the_dockerfile_is_part_of_the_tag(checkout: Path) -> None:
    before = tag("operator", checkout)
    append(checkout / "hack" / "images" / "operator" / "Dockerfile", "ENV NEW=1\n")
    assert tag("operator", checkout) != before


def test_a_folder_that_is_copied_but_never_made_is_named(checkout: Path) -> None:
    append(checkout / "hack" / "images" / "operator" / "Dockerfile", "COPY nowhere/ /nowhere/\n")
    with pytest.raises(ImageError, match="disagree about nowhere"):
        tag("operator", checkout)


def test_without_models_there_is_no_runtime_image(checkout: Path) -> None:
    shutil.rmtree(checkout / "models")
    with pytest.raises(ImageError, match="holds no model folder"):
        tag("runtime", checkout)


def test_the_operator_starts_from_what_its_image_holds(checkout: Path, tmp_path: Path) -> None:
    """The image has only the contract files of the runtime package: importing the whole operator must need no other."""
    dockerfile = read_dockerfile("operator", checkout, "base")
    app = context_of("operator", dockerfile, checkout)["app"]
    folder = tmp_path / "app"
    folder.mkdir()
    app.stage(folder, "/app")
    modules = [
        path.relative_to(folder).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        for path in folder.rglob("*.py")
        if path.name != "__main__.py"
    ]
    code = f"import sys; sys.path.insert(0, {str(folder)!r}); import importlib\n" + "\n".join(
        f"module = importlib.import_module({module!r}); assert module.__file__.startswith({str(folder)!r})"
        for module in sorted(modules)
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
