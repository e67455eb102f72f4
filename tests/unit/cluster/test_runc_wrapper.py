"""The runc wrapper takes out exactly what the kernel would refuse, in the files that runc will read."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hack.cluster import runc_wrapper
from hack.cluster.runc_wrapper import file_to_rewrite, missing_capabilities, rewrite, without

ALL_41 = "CapBnd:\t000001ffffffffff\n"
WITHOUT_SYS_RESOURCE = "Name:\tpython3\nCapBnd:\t000001fffeffffff\nCapAmb:\t0000000000000000\n"


def test_a_full_bounding_set_misses_nothing() -> None:
    assert missing_capabilities(ALL_41, last_capability=40) == []


def test_the_missing_bit_is_named() -> None:
    assert missing_capabilities(WITHOUT_SYS_RESOURCE, last_capability=40) == ["CAP_SYS_RESOURCE"]


def test_capabilities_that_an_older_kernel_does_not_know_are_not_missing() -> None:
    assert missing_capabilities("CapBnd:\t0000003fffffffff\n", last_capability=37) == []


def test_a_status_without_the_line_claims_nothing() -> None:
    assert missing_capabilities("Name:\tx\n", last_capability=40) == []


def test_every_set_loses_the_name_and_keeps_the_rest() -> None:
    process = {
        "capabilities": {"bounding": ["CAP_KILL", "CAP_SYS_RESOURCE"], "ambient": None, "effective": ["CAP_KILL"]}
    }
    assert without(process, ["CAP_SYS_RESOURCE"])
    assert process["capabilities"] == {"bounding": ["CAP_KILL"], "ambient": None, "effective": ["CAP_KILL"]}


def test_a_process_without_capabilities_is_left_alone() -> None:
    assert not without({"args": ["sh"]}, ["CAP_SYS_RESOURCE"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--root", "/r", "create", "--bundle", "/b", "--pid-file", "/p", "id"], (Path("/b/config.json"), True)),
        (["run", "--bundle=/b", "id"], (Path("/b/config.json"), True)),
        (["create", "id"], (Path("/cwd/config.json"), True)),
        (["exec", "--process", "/run/p1", "--detach", "id"], (Path("/run/p1"), False)),
        (["exec", "id", "sh"], None),
        (["delete", "--force", "id"], None),
        (["state", "id"], None),
    ],
)
def test_the_file_that_runc_will_read(arguments: list[str], expected: tuple[Path, bool] | None) -> None:
    assert file_to_rewrite(arguments, Path("/cwd")) == expected


def test_rewriting_keeps_everything_else_and_the_mode(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    document = {"root": {"path": "rootfs"}, "process": {"args": ["sh"], "capabilities": {"bounding": ["CAP_BPF"]}}}
    config.write_text(json.dumps(document))
    config.chmod(0o640)
    rewrite(config, True, ["CAP_BPF"])
    document["process"] = {"args": ["sh"], "capabilities": {"bounding": []}}
    assert json.loads(config.read_text()) == document
    assert stat.S_IMODE(config.stat().st_mode) == 0o640


def test_as_a_program_it_becomes_the_real_runc_with_the_same_arguments(tmp_path: Path) -> None:
    """The file stands alone (isolated, no site packages), as the shim starts it."""
    fake = tmp_path / "runc"
    fake.write_text('#!/bin/sh\necho "$@"\n')
    fake.chmod(0o755)
    source = Path(runc_wrapper.__file__).read_text()
    script = tmp_path / "wrapper.py"
    script.write_text(source.replace("REAL_RUNC_PATHS = (", f"REAL_RUNC_PATHS = ({str(fake)!r}, "))
    ran = subprocess.run([sys.executable, "-IS", script, "state", "a b"], capture_output=True, text=True, check=True)
    assert ran.stdout == "state a b\n"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_what_is_missing_here_agrees_with_the_kernel() -> None:
    names = runc_wrapper.missing_here()
    assert all(name.removeprefix("CAP_") in runc_wrapper.CAPABILITIES for name in names)
