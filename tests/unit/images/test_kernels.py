"""The image's layer of compiled kernels has every production variant, whole, and moves with the kernels alone."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from hack.images import kernels
from hack.images.build import context_of, read_dockerfile
from hack.images.errors import ImageError
from hack.images.layer import write_layer
from hack.kernels.prebuild import CAPABILITIES
from millstream_kernels.prebuilt.key import variant_key
from millstream_kernels.variants import VARIANTS

pytestmark = pytest.mark.deep

ROOT = Path(__file__).resolve().parents[3]
LOCK = (ROOT / "requirements" / "runtime.txt").read_text()


def test_the_layer_holds_every_variant_for_every_gpu_of_the_table(tmp_path: Path) -> None:
    dockerfile = read_dockerfile("runtime", ROOT, "base")
    (copy,) = [one for one in dockerfile.copies if one.source == "kernels"]
    layer = io.BytesIO()
    write_layer(context_of("runtime", dockerfile, ROOT)["kernels"].stage(tmp_path, copy.target), copy.target, layer)
    layer.seek(0)
    with tarfile.open(fileobj=layer) as tar:
        files = {one.name: content.read() for one in tar.getmembers() if (content := tar.extractfile(one)) is not None}
    entries = {entry["key"]: entry for entry in json.loads(files["opt/kernels/index.json"])["entries"]}
    assert {*entries} == {variant_key(variant, one) for variant in VARIANTS for one in variant.capabilities}
    assert {entry["capability"] for entry in entries.values()} == {*CAPABILITIES}
    for key, entry in entries.items():
        assert hashlib.sha256(files[f"opt/kernels/{key}.cubin"]).hexdigest() == entry["cubin_sha256"]
        assert hashlib.sha256(files[f"opt/kernels/{key}.json"]).hexdigest() == entry["metadata_sha256"]
    assert len(files) == 1 + 2 * len(entries), "nothing else"
    assert str(ROOT).encode() not in b"".join(files.values()), "a path of the machine that built it"


@pytest.mark.quick
def test_the_layer_moves_with_the_kernels_and_with_triton(tmp_path: Path) -> None:
    for folder in ("kernels/millstream_kernels", "hack/kernels"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "one.py").write_text("x = 1\n")
    before = kernels.input_hash(tmp_path, "triton==3.6.0 ; x\n    --hash=a\ntorch==1\n")
    assert kernels.input_hash(tmp_path, "triton==3.6.0 ; x\n    --hash=a\ntorch==2\n") == before
    assert kernels.input_hash(tmp_path, "triton==3.7.0 ; x\n    --hash=b\ntorch==1\n") != before
    for folder in ("kernels/millstream_kernels", "hack/kernels"):
        (tmp_path / folder / "table.json").write_text("{}")
    tuned = kernels.input_hash(tmp_path, "triton==3.6.0 ; x\n    --hash=a\ntorch==1\n")
    assert tuned != before, "a tuning table chooses what is compiled"
    (tmp_path / "hack/kernels/table.json").unlink()
    assert kernels.input_hash(tmp_path, "triton==3.6.0 ; x\n    --hash=a\ntorch==1\n") == tuned
    before = kernels.input_hash(tmp_path, "triton==3.6.0\n")
    (tmp_path / "kernels/millstream_kernels/one.py").write_text("x = 2\n")
    assert kernels.input_hash(tmp_path, "triton==3.6.0\n") != before


def test_a_kernel_that_cannot_be_compiled_fails_the_build_with_what_was_said(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"^The kernels could not be compiled: .*No module named 'hack"):
        kernels.stage(tmp_path)(tmp_path / "context", "/opt/kernels")


def test_without_triton_for_the_machine_the_layer_has_an_index_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    (index,) = kernels.stage(ROOT)(tmp_path, "/opt/kernels")
    assert json.loads(index.path.read_text())["entries"] == []


def test_the_images_code_finds_every_kernel_of_the_images_folder_without_a_compiler(tmp_path: Path) -> None:
    """The two layers as they lie in the image, in a process that has only them and no program in its PATH."""
    dockerfile = read_dockerfile("runtime", ROOT, "base")
    context = context_of("runtime", dockerfile, ROOT)
    for name in ("app", "kernels"):
        (tmp_path / name).mkdir()
        context[name].stage(tmp_path / name, f"/opt/{name}")
    environment = {"PATH": str(tmp_path), "PYTHONPATH": str(tmp_path / "app"), "HOME": str(tmp_path)}
    code = "import sys; from millstream_kernels.prebuilt import __main__ as check; "
    code += f"assert check.__file__.startswith({str(tmp_path)!r}); sys.exit(check.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, str(tmp_path / "kernels" / "kernels")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    count = sum(len(variant.capabilities) for variant in VARIANTS)
    assert (done.stdout, done.returncode) == (f"{count} compiled kernels, 0 wrong or missing\n", 0), done.stderr
    damaged = min((tmp_path / "kernels" / "kernels").glob("*.cubin"))
    damaged.write_bytes(b"x")
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == 1
    assert f"{damaged} is damaged" in done.stderr
