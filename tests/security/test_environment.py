"""Variables that make a process load code: refused in the default image, and without effect on its interpreter.

The interpreter here has the layout of the image: the same flags, the same .pth file, our packages in a folder of its
own. Each attack first runs against an interpreter without them, so that it is known to work.
"""

from __future__ import annotations

import json
import os
import py_compile
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

import pytest
import yaml

from hack.images.build import read_dockerfile
from millstream_operator.api.load import ManifestError, loads_manifest
from tests.support.llmdeployments import manifest
from tests.support.stored_objects import refused_by_cel

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("cli/millstream", "runtime/millstream_runtime", "kernels/millstream_kernels")
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"

# What each makes a process load: a library, a program, or settings that name one.
OF_THE_LOADER = ("LD_PRELOAD", "LD_AUDIT", "LD_LIBRARY_PATH", "GCONV_PATH", "LOCPATH", "GLIBC_TUNABLES", "PATH", "HOME")
OF_LIBRARIES = (
    *("OPENSSL_CONF", "OPENSSL_MODULES", "OPENSSL_ENGINES", "OMP_TOOL_LIBRARIES", "KMP_SETTINGS"),
    *(
        "CUDA_INJECTION64_PATH",
        "NVIDIA_VISIBLE_DEVICES",
        "CUDA_VISIBLE_DEVICES",
        "CUDA_CACHE_PATH",
        "CUDA_MODULE_LOADING",
    ),
    *("NCCL_NET_PLUGIN", "NCCL_NET", "NCCL_TUNER_PLUGIN", "NCCL_PROFILER_PLUGIN", "NCCL_CONF_FILE", "NCCL_TOPO_FILE"),
    *("TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "PYTORCH_KERNEL_CACHE_PATH", "TORCH_LOGS", "TRITON_CACHE_DIR"),
    *("HF_MODULES_CACHE", "HF_HOME", "HF_TOKEN_PATH", "OTEL_PYTHON_CONFIGURATOR", "OTEL_PROPAGATORS"),
)
OF_PYTHON = (
    *("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PYTHONUSERBASE", "PYTHONPYCACHEPREFIX", "PYTHONWARNINGS"),
    *("PYTHONBREAKPOINT", "PYTHONINSPECT", "PYTHONPLATLIBDIR", "PYTHONEXECUTABLE", "PYTHONCASEOK"),
)
OF_OURS = ("MILLSTREAM_KERNELS_DIR", "MILLSTREAM_CPU_KERNELS_DIR", "MILLSTREAM_MODELS_DIR")
OWN_IMAGE: dict[str, Any] = {"runtime": {"image": "registry.example.com/runtime:1"}}

Environment = dict[str, str]


def with_variable(name: str, **spec: Any) -> dict[str, Any]:
    env = [{"name": name, "value": "/models/tokenizer.model"}]
    return manifest(podTemplate={"spec": {"containers": [{"name": "runtime", "env": env}]}}, **spec)


@pytest.mark.parametrize("name", [*OF_THE_LOADER, *OF_LIBRARIES, *OF_PYTHON])
def test_a_variable_that_loads_code_is_refused_in_the_default_image_alone(name: str) -> None:
    with pytest.raises(ManifestError, match=f"{name} of podTemplate.*default image"):
        loads_manifest(yaml.safe_dump(with_variable(name)))
    assert len(refused_by_cel(with_variable(name))) == 1
    loads_manifest(yaml.safe_dump(with_variable(name, **OWN_IMAGE)))
    assert refused_by_cel(with_variable(name, **OWN_IMAGE)) == []


@pytest.mark.parametrize("name", OF_OURS)
def test_a_variable_that_names_our_code_is_refused_in_every_image(name: str) -> None:
    for spec in ({}, OWN_IMAGE):
        with pytest.raises(ManifestError, match="names that start with MILLSTREAM_ are the operator's own"):
            loads_manifest(yaml.safe_dump(with_variable(name, **spec)))


@dataclass(frozen=True)
class Image:
    """An interpreter with the layout of the runtime's image. `app`: where our packages are."""

    python: Path
    app: Path
    entrypoint: tuple[str, ...]  # as the Dockerfile has it

    def run(self, arguments: list[str], environment: Environment, folder: Path) -> subprocess.CompletedProcess[str]:
        """Run it in `folder`, with nothing in its environment but `environment`."""
        command = [str(self.python), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=120, cwd=folder, env=environment
        )

    @property
    def flags(self) -> list[str]:
        return [*self.entrypoint[1 : self.entrypoint.index("-m")]]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    root = tmp_path_factory.mktemp("image")
    app, packages = root / "app", root / "usr" / "lib" / f"python{VERSION}" / "site-packages"
    for folder in (app, packages, root / "usr" / "bin"):
        folder.mkdir(parents=True)
    for package in PACKAGES:
        (app / Path(package).name).symlink_to(ROOT / package)
    base = Path(os.path.realpath(sys.executable))
    (root / "usr" / "pyvenv.cfg").write_text(f"home = {base.parent}\ninclude-system-site-packages = true\n")
    python = root / "usr" / "bin" / "python3"
    python.symlink_to(base)
    text = (ROOT / "hack" / "images" / "interpreter" / "millstream.pth").read_text()
    here = text.replace('"/app"', f'"{app}"').replace('"/opt/dependencies"', f'"{sysconfig.get_path("purelib")}"')
    assert here.count(str(app)) == 1
    (packages / "millstream.pth").write_text(here)
    return Image(python, app, tuple(read_dockerfile("runtime", ROOT, base="base").entrypoint))


def code_that_leaves(mark: Path) -> str:
    return f"open({str(mark)!r}, 'a').write('ran')\n"


def hostile_folder(folder: Path, mark: Path) -> None:
    """Modules under the names of those that every process imports, or that Python looks for when it starts."""
    for name in ("sitecustomize", "usercustomize", "json", "argparse", "millstream", "millstream_runtime"):
        (folder / f"{name}.py").write_text(code_that_leaves(mark))


def by_python_path(folder: Path, mark: Path, _image: Image) -> Environment:
    hostile_folder(folder, mark)
    return {"PYTHONPATH": str(folder)}


def by_the_working_folder(folder: Path, mark: Path, _image: Image) -> Environment:
    hostile_folder(folder, mark)  # where the process is started
    return {}


def by_the_users_packages(folder: Path, mark: Path, _image: Image) -> Environment:
    packages = folder / "lib" / f"python{VERSION}" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "attack.pth").write_text(f"import os; {code_that_leaves(mark)}")
    return {"PYTHONUSERBASE": str(folder)}


def by_compiled_modules(folder: Path, mark: Path, image: Image) -> Environment:
    """A module's bytecode that is never compared with its source (PEP 552)."""
    source = folder / "source.py"
    source.write_text(f"{code_that_leaves(mark)}\n__version__ = '0'\n")
    prefix, before = folder / "prefix", sys.pycache_prefix
    try:
        sys.pycache_prefix = str(prefix)
        compiled = cache_from_source(str(image.app / "millstream" / "__init__.py"))
    finally:
        sys.pycache_prefix = before
    Path(compiled).parent.mkdir(parents=True)
    py_compile.compile(str(source), compiled, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    return {"PYTHONPYCACHEPREFIX": str(prefix)}


ATTACKS: tuple[Callable[[Path, Path, Image], Environment], ...] = (
    by_python_path,
    by_the_working_folder,
    by_the_users_packages,
    by_compiled_modules,
)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_nothing_of_an_environment_runs_in_the_images_interpreter(
    image: Image, tmp_path: Path, attack: Callable[[Path, Path, Image], Environment]
) -> None:
    mark, folder = tmp_path / "mark", tmp_path / "hostile"
    folder.mkdir()
    environment = attack(folder, mark, image)
    without_flags = image.run(["-m", "millstream", "--version"], environment, folder)
    assert mark.exists(), f"no attack: an interpreter without the flags does not run it either: {without_flags.stderr}"
    mark.unlink()
    done = image.run([*image.entrypoint[1:], "--version"], environment, folder)
    assert done.stdout.startswith("millstream "), done.stderr
    assert not mark.exists()


PROBE = """
import json, os, ssl, sys
print(json.dumps({
    "suites": [one["name"] for one in ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).get_ciphers() if "TLS_" in one["name"]],
    "isolated": sys.flags.isolated,
    "writes_bytecode": not sys.dont_write_bytecode,
    "first": sys.path[0],
    "ours": sorted(name for name in os.environ if name.startswith("MILLSTREAM_")),
}))
"""


def test_openssl_reads_no_settings_of_an_environment(image: Image, tmp_path: Path) -> None:
    """Settings of OpenSSL may name a library to load. These are seen by the cipher suites that are left of TLS 1.3."""
    settings, suite = tmp_path / "tokenizer.model", "TLS_CHACHA20_POLY1305_SHA256"
    settings.write_text(f"openssl_conf = a\n[a]\nssl_conf = b\n[b]\nsystem_default = c\n[c]\nCiphersuites = {suite}\n")
    environment, python = {"OPENSSL_CONF": str(settings)}, Path(os.path.realpath(sys.executable))
    affected = subprocess.run([python, "-I", "-c", PROBE], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(affected.stdout)["suites"] == [suite], "no attack"
    done = image.run([*image.flags, "-c", PROBE], environment, tmp_path)
    assert len(json.loads(done.stdout)["suites"]) > 1, done.stderr


def test_no_other_folder_of_kernels_reaches_the_images_code(image: Image, tmp_path: Path) -> None:
    environment = dict.fromkeys(OF_OURS, str(tmp_path))
    done = image.run([*image.flags, "-c", PROBE], environment, tmp_path)
    assert json.loads(done.stdout)["ours"] == ["MILLSTREAM_MODELS_DIR"], done.stderr


def test_a_child_of_an_isolated_process_is_isolated_and_imports_the_same_code(image: Image, tmp_path: Path) -> None:
    """As the engine's process and the ranks are started: `runtime/millstream_runtime/processes/interpreter.py`."""
    (image.app / "probe.py").write_text(PROBE)
    mark = tmp_path / "mark"
    hostile_folder(tmp_path, mark)
    (tmp_path / "probe.py").write_text(code_that_leaves(mark))
    start = "import subprocess; from millstream_runtime.processes.interpreter import module_command; "
    start += "subprocess.run(module_command('probe'), check=True)"
    environment = {"PYTHONPATH": str(tmp_path)}
    done = image.run([*image.flags, "-c", start], environment, tmp_path)
    child = json.loads(done.stdout)
    assert (child["isolated"], child["writes_bytecode"], child["first"]) == (1, False, str(image.app)), done.stderr
    assert not mark.exists()


def test_every_process_of_ours_is_started_by_that_command() -> None:
    shipped = [path for folder in ("runtime", "operator", "cli", "kernels") for path in (ROOT / folder).rglob("*.py")]
    starts = {path.name for path in shipped if "sys.executable" in path.read_text(encoding="utf-8")}
    assert starts == {"interpreter.py"}
