"""Content addresses: the same inputs share a name, any change makes another."""

from __future__ import annotations

from pathlib import Path

from hack.cluster.content import address_of, files_under


def test_order_does_not_matter() -> None:
    assert address_of({"a": "1", "b": "2"}) == address_of({"b": "2", "a": "1"})


def test_moving_a_byte_between_name_and_value_is_another_input() -> None:
    assert address_of({"a": "bc"}) != address_of({"ab": "c"})


def test_text_and_its_bytes_are_the_same_input() -> None:
    assert address_of({"a": "é"}) == address_of({"a": "é".encode()})


def test_a_file_counts_by_path_content_and_executable_bit(tmp_path: Path) -> None:
    script = tmp_path / "bin" / "run"
    script.parent.mkdir()
    script.write_text("x")
    script.chmod(0o644)
    plain = address_of(files_under(tmp_path))
    script.touch()
    assert address_of(files_under(tmp_path)) == plain
    script.chmod(0o755)
    assert address_of(files_under(tmp_path)) != plain


def test_compiled_python_is_not_an_input(tmp_path: Path) -> None:
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.pyc").write_bytes(b"1")
    assert files_under(tmp_path) == {}
