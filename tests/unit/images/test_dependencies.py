"""Locks are split without losing a pin, and an image that never compiles finds its modules compiled."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from hack.images.dependencies import compile_modules, group, input_hash

ROOT = Path(__file__).resolve().parents[3]
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def pins(text: str) -> set[str]:
    return {line.split(" ")[0] for line in text.splitlines() if "==" in line and line[0].isalnum()}


def test_every_pin_of_the_lock_is_in_exactly_one_group() -> None:
    lock = (ROOT / "requirements" / "runtime.txt").read_text()
    groups = group(lock)
    assert list(groups) == ["cuda", "torch", "python"]
    assert sum(len(pins(text)) for text in groups.values()) == len(pins(lock))
    assert {name.split("==")[0] for name in pins(groups["torch"])} == {"torch", "triton"}
    assert all(name.startswith(("nvidia-", "cuda-")) for name in pins(groups["cuda"]))
    assert lock.count("--hash=") == sum(text.count("--hash=") for text in groups.values())


def test_the_operator_carries_no_torch() -> None:
    assert list(group((ROOT / "requirements" / "operator.txt").read_text())) == ["python"]


def test_the_operator_carries_no_package_that_it_never_imports() -> None:
    """Kubernetes' generated client was two thirds of its image, and nothing of it was used.

    kopf imports that client where it finds it, for credentials that the operator does not ask it for.
    """
    without_client = "import sys; sys.modules['kubernetes'] = None"
    loaded = "{name.split('.')[0] for name, module in sys.modules.items() if module is not None}"
    listed = f"{without_client}; import millstream_operator.app; print(*{loaded})"
    done = subprocess.run([sys.executable, "-c", listed], capture_output=True, text=True, check=True)
    modules: dict[str, set[str]] = {}
    for module, distributions in metadata.packages_distributions().items():
        for distribution in distributions:
            modules.setdefault(re.sub(r"[-_.]+", "-", distribution).lower(), set()).add(module)
    pinned = {name.split("==")[0] for name in pins((ROOT / "requirements" / "operator.txt").read_text())}
    idle = {name for name in pinned if not modules.get(name, set()) & set(done.stdout.split())}
    assert idle <= {"click"}, "click is of kopf's own command line: 1 MB"


def test_a_changed_pin_changes_its_own_layer_only() -> None:
    lock = (ROOT / "requirements" / "runtime.txt").read_text()
    moved = lock.replace("uvicorn==", "uvicorn==9")
    before, after = group(lock), group(moved)
    changed = {name for name in before if input_hash(before[name], "3.11") != input_hash(after[name], "3.11")}
    assert changed == {"python"}


def test_the_hash_knows_the_interpreter() -> None:
    assert input_hash("a==1", "3.11") != input_hash("a==1", "3.12")
    assert platform.machine()  # part of the hash: a wheel for another machine is another layer


def test_modules_are_compiled_for_where_they_will_lie(tmp_path: Path) -> None:
    """The bytecode is used although the source has changed: in an image it cannot."""
    module = tmp_path / "image" / "thing.py"
    module.parent.mkdir()
    module.write_text("def fail():\n    raise RuntimeError('here')\n")
    compile_modules(module.parent, "/app", python_version=HERE, base="")
    module.write_text("raise SystemExit('compiled again')\n")
    code = "import thing; print(thing.fail.__name__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=module.parent, capture_output=True, text=True, check=True)
    assert done.stdout == "fail\n"
