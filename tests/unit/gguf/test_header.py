"""The beginning of a GGUF file is untrusted: what does not fit is refused with the field's or the tensor's name."""

from __future__ import annotations

import io
import random
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.gguf.block_types import BLOCK_TYPES
from millstream_runtime.gguf.gguf_model import gguf_files_of, read_gguf_folder
from millstream_runtime.gguf.header import GgufHeader, parse_gguf, read_gguf_file

FIELDS: dict[str, Any] = {"general.architecture": "llama", "llama.block_count": 2, "llama.rope.freq_base": 0.5}


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def field(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str = "a.weight", sizes: tuple[int, ...] = (32, 2), kind: int = 0, offset: int = 0) -> bytes:
    return (
        text(name)
        + struct.pack("<I", len(sizes))
        + b"".join(struct.pack("<Q", one) for one in sizes)
        + struct.pack("<IQ", kind, offset)
    )


def whole(
    fields: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    *,
    version: int = 3,
    num_fields: int | None = None,
    num_tensors: int | None = None,
    data_bytes: int = 256,
) -> bytes:
    fields, tensors = fields or [], [tensor()] if tensors is None else tensors
    counts = (len(tensors) if num_tensors is None else num_tensors, len(fields) if num_fields is None else num_fields)
    start = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(fields) + b"".join(tensors)
    return start + b"\0" * (-len(start) % 32) + b"\0" * data_bytes


def parsed(data: bytes) -> GgufHeader:
    return parse_gguf(io.BytesIO(data).read, len(data), "m.gguf")


def refusal(data: bytes) -> str:
    with pytest.raises(RuntimeFailure) as refused:
        parsed(data)
    assert refused.value.reason in (FailureReason.CHECKPOINT_INVALID, FailureReason.UNSUPPORTED_BY_RUNTIME)
    assert refused.value.message.startswith("m.gguf")
    return refused.value.message


def test_what_llama_cpp_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a.number", 7)
    writer.add_int64("a.large", -(1 << 40))
    writer.add_float32("a.decimal", 0.5)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "é \u2581")
    writer.add_array("a.texts", ["x", "", "yz"])
    writer.add_array("a.numbers", [1, 2, 3])
    first, second = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(64, dtype=np.float32).reshape(2, 32)
    writer.add_tensor("first.weight", first)
    writer.add_tensor(
        "second.weight",
        gguf.quants.quantize(second, gguf.GGMLQuantizationType.Q8_0),
        raw_dtype=gguf.GGMLQuantizationType.Q8_0,
    )
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    header = read_gguf_file(path)
    wanted = {"a.number": 7, "a.large": -(1 << 40), "a.decimal": 0.5, "a.flag": True, "a.text": "é \u2581"}
    wanted |= {"a.texts": ["x", "", "yz"], "a.numbers": [1, 2, 3], "general.architecture": "llama"}
    assert header.metadata == wanted
    assert {one.name: (one.shape, one.type.name) for one in header.tensors.values()} == {
        "first.weight": ((2, 3), "F32"),
        "second.weight": ((2, 32), "Q8_0"),
    }
    for theirs in gguf.GGUFReader(path).tensors:
        ours = header.tensors[theirs.name]
        assert (ours.offset_bytes, ours.num_bytes, ours.num_elements) == (
            theirs.data_offset,
            theirs.n_bytes,
            theirs.n_elements,
        )


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "ends after 0 bytes"),
        (b"GGU", "ends after 3 bytes"),
        (b"PK\x03\x04" + b"\0" * 99, "is no GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git-lfs pointer"),
        (whole(version=1), "GGUF version 1"),
        (whole(version=3 << 24), "little-endian"),
        (whole(num_tensors=1 << 60), "1152921504606846976 tensors; at most 65536"),
        (whole(num_fields=1 << 63), "fields; at most 4096"),
        (whole(num_fields=5), "m.gguf"),
        (whole([field("", 4, b"\1\0\0\0")]), "the name of a field"),
        (whole([text(b"x" * 300)]), "a text of 300 bytes in the name of a field"),
        (whole([field("a.b", 8, struct.pack("<Q", 1 << 62))]), "a text of 4611686018427387904 bytes in field a.b"),
        (whole([field("a.b", 9, struct.pack("<IQ", 4, 1 << 61))]), "2305843009213693952 items in field a.b"),
        (whole([field("a.b", 9, struct.pack("<IQ", 9, 1))]), "a value of type 9 in field a.b"),
        (whole([field("a.b", 13, b"")]), "a value of type 13 in field a.b"),
        (whole([field("a.b", 4, b"\1\0\0\0")] * 2), "has the field a.b twice"),
        (whole([field("general.alignment", 4, struct.pack("<I", 0))]), "general.alignment 0"),
        (whole([field("general.alignment", 4, struct.pack("<I", 48))]), "general.alignment 48"),
        (whole([field("general.alignment", 8, text("32"))]), "general.alignment '32'"),
        (whole(tensors=[tensor(sizes=())]), "tensor a.weight of 0 dimensions"),
        (whole(tensors=[tensor(sizes=(32,) * 5)]), "of 5 dimensions"),
        (whole(tensors=[tensor(sizes=(32, 0))]), "a.weight of shape [0, 32]"),
        (whole(tensors=[tensor(sizes=(1 << 30, 1 << 30))]), "of shape [1073741824, 1073741824]"),
        (whole(tensors=[tensor(sizes=(1 << 63, 2))]), "of shape"),
        (whole(tensors=[tensor(sizes=(33, 2), kind=8)]), "rows of 33, no multiple of the 32 of Q8_0"),
        (whole(tensors=[tensor(kind=16)]), "a.weight is IQ2_XXS, which is not supported"),
        (whole(tensors=[tensor(kind=39)]), "a.weight is MXFP4, which is not supported"),
        (whole(tensors=[tensor(kind=40)]), "a.weight is NVFP4, which is not supported"),
        (whole(tensors=[tensor(kind=4_000_000_000)]), "is of type 4000000000"),
        (whole(tensors=[tensor(offset=8)]), "at offset 8, no multiple of 32"),
        (whole(tensors=[tensor(offset=(1 << 64) - 32)]), "is cut: tensor a.weight ends at byte"),
        (whole(data_bytes=255), "is cut: tensor a.weight ends at byte"),
        (whole(tensors=[tensor(), tensor()]), "has tensor a.weight twice"),
        (whole(tensors=[tensor(name="a\nb")]), "the name of a tensor"),
    ],
)
def test_a_damaged_file_is_refused_in_one_sentence(data: bytes, words: str) -> None:
    message = refusal(data)
    assert words in message
    assert len(message) < 400


def test_a_file_cut_anywhere_is_refused() -> None:
    data = whole([field("a.text", 8, text("hello")), field("a.list", 9, struct.pack("<IQ", 4, 3) + b"\0" * 12)])
    parsed(data)
    for end in range(len(data)):
        refusal(data[:end])


def test_changed_bytes_end_in_a_refusal_or_a_header_within_the_file() -> None:
    data = whole([field("a.text", 8, text("hello")), field("a.list", 9, struct.pack("<IQ", 4, 3) + b"\0" * 12)])
    rng = random.Random(4)
    for _ in range(3000):
        changed = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(200)] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        try:
            header = parsed(bytes(changed))
        except RuntimeFailure:
            continue
        assert all(one.offset_bytes + one.num_bytes <= len(data) for one in header.tensors.values())


def test_more_than_the_limit_before_the_tensors_is_not_read() -> None:
    fields = [field(f"a.n{number}", 8, text(b"x" * (1 << 20))) for number in range(70)]
    assert "more than 67108864 bytes before its tensors" in refusal(whole(fields))


def test_lists_have_a_limit_together() -> None:
    one = struct.pack("<IQ", 0, 3 << 20) + b"\0" * (3 << 20)
    assert "in field a.second; at most" in refusal(whole([field("a.first", 9, one), field("a.second", 9, one)]))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["model.gguf"], ["model.gguf"]),
        (["model.gguf", "mmproj-f16.gguf", "README.md"], ["model.gguf"]),
        (["model.gguf", "model.safetensors"], []),
        (["m-00002-of-00002.gguf", "m-00001-of-00002.gguf"], ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]),
        (["config.json"], []),
        (["m-Q4_K_M.gguf", "m-F16-mmproj.gguf"], ["m-Q4_K_M.gguf"]),
        (["m-Q4_K_M.gguf", "m.mmproj.gguf", "m-imatrix.gguf", "imatrix.gguf"], ["m-Q4_K_M.gguf"]),
        (["m-Q4_K_M-imatrix.gguf"], ["m-Q4_K_M-imatrix.gguf"]),  # quantized with a matrix, and the model
    ],
)
def test_the_files_of_a_model(names: list[str], expected: list[str]) -> None:
    assert gguf_files_of(names, "here") == expected


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["m-Q4_K_M.gguf", "m-Q8_0.gguf"], "here holds 2 GGUF models (m-Q4_K_M.gguf, m-Q8_0.gguf)"),
        (["m-00001-of-00003.gguf", "m-00003-of-00003.gguf"], "lacks m-00002-of-00003.gguf"),
        (["m-00001-of-00002.gguf", "m.gguf"], "2 GGUF models"),
        (["m-00001-of-99999.gguf"], "lacks m-00002-of-99999.gguf"),
        (["m-00001-of-00000.gguf"], "here"),
    ],
)
def test_several_models_and_missing_parts_are_refused(names: list[str], words: str) -> None:
    with pytest.raises(RuntimeFailure, match=r"GGUF|part of") as refused:
        gguf_files_of(names, "here")
    assert words in refused.value.message


def test_a_folder_without_a_file_is_none_of_gguf(tmp_path: Path) -> None:
    assert read_gguf_folder(tmp_path) is None


def test_every_known_type_has_a_number_of_its_own() -> None:
    assert {one.number: one.name for one in BLOCK_TYPES.values()} == {
        number.value: number.name for number in gguf.GGMLQuantizationType if number.name in BLOCK_TYPES
    }
