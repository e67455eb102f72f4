"""Files that the format's own library reads, written tensor by tensor; the same tensors give the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from millstream_runtime.quantize.output.safetensors_file import tensors_of, write_file

TENSORS = {
    "b": torch.randn(3, 5),
    "a": torch.arange(7, dtype=torch.uint8),
    "scalar": torch.tensor(2.5),
    "bf16": torch.randn(4, 3).bfloat16(),
    "fp8": torch.randn(2, 3).to(torch.float8_e4m3fn),
    "words": torch.tensor([[-1, 2**31 - 1]], dtype=torch.int32),
    "wide": torch.tensor([1 << 40]),
    "strided": torch.randn(4, 6).t(),
    "empty": torch.empty(0, 4),
}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    left, right = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(left, right)


def test_the_library_reads_what_was_written(tmp_path: Path) -> None:
    write_file(tmp_path / "a.safetensors", TENSORS)
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == TENSORS.keys()
    assert all(same(found[name], TENSORS[name]) for name in TENSORS)


def test_the_order_of_the_tensors_changes_no_byte(tmp_path: Path) -> None:
    write_file(tmp_path / "a.safetensors", TENSORS)
    write_file(tmp_path / "b.safetensors", dict(reversed(TENSORS.items())))
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_tensors_of_a_file_are_copied_and_loaded(tmp_path: Path) -> None:
    stored = {name: one.contiguous() for name, one in TENSORS.items()}
    save_file(stored, tmp_path / "theirs.safetensors")
    theirs = tensors_of(tmp_path / "theirs.safetensors")
    assert all(same(theirs[name].load(), stored[name]) for name in stored)
    write_file(tmp_path / "copy.safetensors", theirs)
    found = load_file(tmp_path / "copy.safetensors")
    assert all(same(found[name], stored[name]) for name in stored)


def test_a_file_that_was_cut_is_not_copied_in_part(tmp_path: Path) -> None:
    save_file({"a": torch.randn(1000)}, tmp_path / "theirs.safetensors")
    theirs = tensors_of(tmp_path / "theirs.safetensors")
    with (tmp_path / "theirs.safetensors").open("r+b") as file:
        file.truncate(2000)
    with pytest.raises(OSError, match="ends early"):
        write_file(tmp_path / "copy.safetensors", theirs)
