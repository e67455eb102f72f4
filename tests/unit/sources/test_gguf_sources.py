"""A GGUF file as a model's source: inspected by its header alone, fetched whole and alone, checked when it has come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millstream_operator.catalog.inspected_model import read_answer, read_inspected
from millstream_runtime.errors import FailureReason, InvalidConfigError, RuntimeFailure
from millstream_runtime.models.registry import load_model_config
from millstream_runtime.sources.client import RetryPolicy
from millstream_runtime.sources.fetch import FetchOptions, fetch
from millstream_runtime.sources.hugging_face import HuggingFace
from millstream_runtime.sources.image_source import ImageSource
from millstream_runtime.sources.inspect import inspect_folder, inspect_source
from millstream_runtime.sources.shape import to_json
from tests.support.family_cases import dense
from tests.support.gguf_files import q4_k_m, write_gguf
from tests.support.local_hub import LocalCDN, LocalHub
from tests.support.local_registry import LocalRegistry, tar_of
from tests.support.tiny_families import write_family

NAME = "tiny-Q4_K_M.gguf"
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 3, "head_dim": 64}


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file of more than a million weights: of fewer no sizes are compared."""
    folder = tmp_path_factory.mktemp("gguf")
    write_family(folder / "plain", **dense("llama", **SIZES))
    template: dict[str, Any] = {"tokenizer.chat_template": "{{ messages }}"}
    write_gguf(folder / "plain", folder / "packed" / NAME, q4_k_m, **template)
    return (folder / "packed" / NAME).read_bytes()


def require_shape(shape: dict[str, Any], content: bytes) -> None:
    assert shape["architectures"] == ["LlamaForCausalLM"]
    assert shape["config"]["num_hidden_layers"] == 3
    assert shape["config"]["vocab_size"] == 97
    down, value = 256 * 1024, 2 * 64 * 256
    linear = 3 * (3 * down + 2 * value + 2 * 4 * 64 * 256)
    elements = {"Q4_K": linear - down - value, "Q6_K": down + value}
    assert shape["quantization_config"] == {"quant_method": "gguf", "elements": elements}
    assert shape["weights"]["file_bytes"] == len(content)
    assert shape["weights"]["tied_lm_head"] is False
    assert shape["tokenizer"]["has_chat_template"] is True
    assert len(to_json(shape).encode()) <= 4096
    inspected = read_inspected(read_answer(to_json(shape)))
    assert inspected.shape.quantization is not None
    assert (inspected.shape.quantization.method, inspected.shape.quantization.bits) == ("GGUF", 5)


def test_a_repository(hub: LocalHub, cdn: LocalCDN, policy: RetryPolicy, content: bytes) -> None:
    hub.files = {NAME: content, "README.md": b"# tiny"}
    require_shape(inspect_source(HuggingFace("org/tiny", endpoint=hub.url, policy=policy)), content)


def test_an_artifact_an_image_and_a_folder(
    registry: LocalRegistry, policy: RetryPolicy, content: bytes, tmp_path: Path
) -> None:
    registry.artifact("1", {NAME: content})
    require_shape(inspect_source(ImageSource(f"{registry.host}/org/tiny:1", policy=policy)), content)
    registry.image("2", tar_of([(f"models/{NAME}", content), ("etc/config.txt", b"")]))
    require_shape(inspect_source(ImageSource(f"{registry.host}/org/tiny:2", policy=policy)), content)
    (tmp_path / NAME).write_bytes(content)
    require_shape(inspect_folder(tmp_path), content)


def test_it_is_fetched_alone_and_loads(
    hub: LocalHub, cdn: LocalCDN, policy: RetryPolicy, options: FetchOptions, content: bytes, tmp_path: Path
) -> None:
    hub.files = {NAME: content, "mmproj-F16.gguf": b"GGUF", "README.md": b"#", "params": b"{}"}
    fetch(HuggingFace("org/tiny", endpoint=hub.url, policy=policy), tmp_path, lambda line: None, options)
    assert {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")} == {NAME}
    assert load_model_config(tmp_path).num_layers == 3


@pytest.mark.parametrize("damage", ["cut", "no GGUF"])
def test_a_file_that_is_damaged_at_its_source_is_never_marked_complete(
    hub: LocalHub,
    cdn: LocalCDN,
    policy: RetryPolicy,
    options: FetchOptions,
    content: bytes,
    tmp_path: Path,
    damage: str,
) -> None:
    hub.files = {NAME: content[:-100] if damage == "cut" else b"PK" + content[2:]}
    with pytest.raises(RuntimeFailure, match=rf"{NAME} .*{damage}") as refused:
        fetch(HuggingFace("org/tiny", endpoint=hub.url, policy=policy), tmp_path, lambda line: None, options)
    assert refused.value.reason is FailureReason.CHECKPOINT_INVALID
    assert not (tmp_path / NAME).exists()


def test_several_models_in_a_repository_are_refused_before_a_download(
    hub: LocalHub, cdn: LocalCDN, policy: RetryPolicy, options: FetchOptions, content: bytes, tmp_path: Path
) -> None:
    hub.files = {NAME: content, "tiny-Q8_0.gguf": content}
    source = HuggingFace("org/tiny", endpoint=hub.url, policy=policy)
    for attempt in (lambda: inspect_source(source), lambda: fetch(source, tmp_path, lambda line: None, options)):
        with pytest.raises(RuntimeFailure, match=r"holds 2 GGUF models \(tiny-Q4_K_M\.gguf, tiny-Q8_0\.gguf\)"):
            attempt()
    assert cdn.sent("/blobs/") == 0


def test_safetensors_come_before_a_gguf_file(
    hub: LocalHub, cdn: LocalCDN, policy: RetryPolicy, options: FetchOptions, tmp_path: Path
) -> None:
    hub.files |= {NAME: b"GGUF"}
    fetch(HuggingFace("org/tiny", endpoint=hub.url, policy=policy), tmp_path, lambda line: None, options)
    assert not (tmp_path / NAME).exists()


@pytest.mark.parametrize("variant", ["Q4_K_M", "q4_k_m", "tiny-Q4_K_M"])
def test_one_of_several_models_is_named_by_a_word(
    hub: LocalHub,
    cdn: LocalCDN,
    policy: RetryPolicy,
    options: FetchOptions,
    content: bytes,
    tmp_path: Path,
    variant: str,
) -> None:
    hub.files = {NAME: content, "tiny-Q8_0.gguf": content, "tiny-IQ4_K_M.gguf": b"", "tiny-Q4_K_M_L.gguf": b""}
    source = HuggingFace(f"org/tiny:{variant}", endpoint=hub.url, policy=policy)
    shape = inspect_source(source)
    require_shape(shape, content)
    assert shape["source"] == {"kind": "huggingFace", "repository": f"org/tiny:{variant}"}
    for kept in (False, True):
        result = fetch(source, tmp_path, lambda line: None, options)
        assert result.kept is kept
    assert {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")} == {NAME}
    other = HuggingFace("org/tiny:Q8_0", endpoint=hub.url, policy=policy)
    with pytest.raises(InvalidConfigError):
        fetch(other, tmp_path, lambda line: None, options)


def test_a_word_that_no_file_has_is_refused_with_those_that_there_are(hub: LocalHub, policy: RetryPolicy) -> None:
    hub.files = {NAME: b"GGUF", "tiny-Q8_0.gguf": b"GGUF"}
    said = r"org/tiny:Q5_K_M at main has no Q5_K_M among its 2 GGUF files \(tiny-Q4_K_M\.gguf, tiny-Q8_0\.gguf\)"
    with pytest.raises(RuntimeFailure, match=said):
        inspect_source(HuggingFace("org/tiny:Q5_K_M", endpoint=hub.url, policy=policy))


@pytest.mark.parametrize("repository", ["org/tiny:", "org/tiny:a/b", "org/tiny:-x", "org/tiny:a:b", "org/tiny:.."])
def test_a_word_that_no_file_can_have_is_refused(repository: str) -> None:
    with pytest.raises(InvalidConfigError, match="it must be like org/name or org/name:Q4_K_M"):
        HuggingFace(repository)
