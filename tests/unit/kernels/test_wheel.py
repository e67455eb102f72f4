"""A wheel brings the compiled kernels for a CPU: the same bytes from every checkout, which an installation can load."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from hack import wheel_hook
from millstream_kernels.cpu import code_folder

ROOT = Path(__file__).resolve().parents[3]
BUILT_FROM = ("cli", "hack", "kernels", "operator", "runtime", "LICENSE", "README.md", "pyproject.toml")
COMPILED = "millstream_kernels/cpu/compiled/"
RUNS_HERE = code_folder.unsupported_machine(platform.system(), platform.machine(), code_folder.cpu_flags()) is None
runs_here = pytest.mark.skipif(
    not (RUNS_HERE and wheel_hook.can_compile()), reason="the kernels are compiled for x86-64-v3 on Linux with glibc"
)
# What an installation does when its engine starts, without the checkout.
LOAD = """
from pathlib import Path
import millstream_kernels
from millstream_kernels.cpu import decode
assert Path(millstream_kernels.__file__).is_relative_to({installed!r})
decode.load()
"""


def pyproject() -> dict[str, dict[str, dict[str, list[str]]]]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def checkout(folder: Path) -> Path:
    """A copy of what a wheel is built from, in which nothing is compiled."""
    ignored = shutil.ignore_patterns("__pycache__", "compiled", "go")
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copyfile(ROOT / name, folder / name)
    return folder


def build(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "dist"]
    return subprocess.run(command, cwd=folder, env=os.environ | variables, capture_output=True, text=True, check=False)


@runs_here
@pytest.mark.deep
def test_a_wheel_of_another_checkout_brings_the_same_code_and_an_installation_loads_it(tmp_path: Path) -> None:
    """A minute: the kernels are compiled by a process of its own. numba reads the kind of CPU when it is imported."""
    folder = checkout(tmp_path / "other checkout")
    built = build(folder)
    assert built.returncode == 0, built.stderr
    assert "kB for x86-64-v3, compiled in" in built.stderr + built.stdout
    (wheel,) = (folder / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        code = {name.removeprefix(COMPILED): archive.read(name) for name in archive.namelist() if COMPILED in name}
        installed = tmp_path / "installed"
        archive.extractall(installed)  # what an installer does with a wheel of Python alone
    assert {*code} == {code_folder.INDEX, code_folder.OBJECT}
    for name, content in code.items():
        assert content == (code_folder.FOLDER / name).read_bytes(), "run `make venv`"
        assert str(tmp_path).encode() not in content, "a path of the machine that built it"
    environment = os.environ | {"PYTHONPATH": str(installed)}
    loaded = [sys.executable, "-c", LOAD.format(installed=str(installed))]
    ended = subprocess.run(loaded, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr

    first = wheel.read_bytes()
    again = build(folder)
    assert "compiled in" not in again.stderr + again.stdout, "the code was fresh"
    assert wheel.read_bytes() == first


@runs_here
def test_a_build_that_cannot_compile_ends_and_names_the_package(tmp_path: Path) -> None:
    """No wheel is built whose runtime would be slower without a word."""
    folder = checkout(tmp_path / "checkout")
    (tmp_path / "without" / "numba").mkdir(parents=True)
    (tmp_path / "without" / "numba" / "__init__.py").write_text("raise ImportError('numba is not installed')\n")
    built = build(folder, PYTHONPATH=str(tmp_path / "without"))
    assert built.returncode != 0
    assert "numba is not installed" in built.stderr
    (pin,) = [one for one in pyproject()["project"]["optional-dependencies"]["dev"] if one.startswith("numba==")]
    assert f"A build without isolation needs these packages: {pin.partition(';')[0].strip()}" in built.stderr
    assert not [*folder.glob("dist/*.whl")]


@pytest.mark.parametrize(
    ("machine", "names"),
    [
        (("Linux", "x86_64", "glibc"), ["numba"]),
        (("Linux", "x86_64", ""), []),  # musl: numba has no wheels, so asking for it would end every installation
        (("Linux", "aarch64", "glibc"), []),
        (("Darwin", "arm64", ""), []),
    ],
)
def test_an_installer_gets_numba_for_the_build_alone_where_it_can_compile(
    machine: tuple[str, str, str], names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What pip and uv ask the build backend for (PEP 517, get_requires_for_build_wheel)."""
    monkeypatch.setattr(platform, "system", lambda: machine[0])
    monkeypatch.setattr(platform, "machine", lambda: machine[1])
    monkeypatch.setattr(platform, "libc_ver", lambda: (machine[2], "2.36"))
    asked = WheelBuilder(str(ROOT)).config.dependencies
    assert [re.split("[=; ]", one)[0] for one in asked] == names
    extras = pyproject()["project"]["optional-dependencies"]
    assert not [one for name in ("operator", "runtime", "cluster") for one in extras[name] if "numba" in one]


def test_make_compiles_again_when_any_source_of_the_kernels_changes() -> None:
    (listed,) = re.findall(r"CPU_KERNEL_SOURCES := \$\(addprefix \S+,(.*?)\)", (ROOT / "Makefile").read_text(), re.S)
    assert {*listed.replace("\\", "").split()} == {*code_folder.SOURCES}
