"""A GGUF file as a model's source: inspected by its header alone, fetched whole and alone, checked when it has come."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from millstream_operator.api.load import parse
from millstream_operator.catalog.gpu_names import parse_island
from millstream_operator.catalog.inspected_model import read_answer, read_inspected
from millstream_operator.inventory.node_kinds import inventory_of
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.plan import Infeasible, Plan, PlanDefaults
from millstream_operator.planning.planner import decide
from millstream_operator.planning.sizing.weights import rank_weights, weight_format
from millstream_runtime.config import RuntimeConfig, WeightFormat
from millstream_runtime.engine.execution.shard_config import resolve_shard_config
from millstream_runtime.errors import FailureReason, InvalidConfigError, RuntimeFailure
from millstream_runtime.models.registry import load_model, load_model_config
from millstream_runtime.sources.client import RetryPolicy
from millstream_runtime.sources.fetch import FetchOptions, fetch
from millstream_runtime.sources.hugging_face import HuggingFace
from millstream_runtime.sources.image_source import ImageSource
from millstream_runtime.sources.inspection.inspect import inspect_folder, inspect_source
from millstream_runtime.sources.inspection.shape import to_json
from tests.support.family_cases import dense
from tests.support.gguf_files import q4_k_m, write_gguf
from tests.support.llmdeployments import manifest
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


@pytest.fixture(scope="module", params=["F16", "BF16", "F32"])
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one GGUF file of plain numbers."""
    folder = tmp_path_factory.mktemp("plain")
    write_family(folder / "model", **dense("llama", **SIZES))
    write_gguf(folder / "model", folder / "packed" / f"tiny-{request.param}.gguf", lambda module: request.param)
    return folder / "packed"


@pytest.fixture
def both(content: bytes, tmp_path: Path) -> Path:
    """A folder with *.safetensors and a GGUF file."""
    write_family(tmp_path / "both", **dense("llama", **SIZES))
    (tmp_path / "both" / NAME).write_bytes(content)
    return tmp_path / "both"


def planned(folder: Path, method: str | None, gpus: str | None = None) -> Plan | Infeasible:
    shape = read_inspected(read_answer(to_json(inspect_folder(folder)))).shape
    facts = Facts(shape=shape)
    if gpus is not None:
        facts = replace(facts, inventory=inventory_of([parse_island(facts.catalog, gpus)]))
    spec: dict[str, Any] = {"accelerator": {"type": "CPU" if gpus is None else "GPU"}}
    spec |= {"quantization": {"method": method}} if method is not None else {}
    return decide(parse(manifest(**spec)), PlanDefaults("image:1"), facts)


def boot(folder: Path, method: WeightFormat | None) -> None:
    resolve_shard_config(RuntimeConfig(model=str(folder), served_model_name="m", quantization=method))


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


@pytest.mark.parametrize("gpus", [None, "A100-40GB:1"])
def test_a_file_of_plain_numbers_is_served_as_what_it_holds(plain: Path, gpus: str | None) -> None:
    """`method: GGUF` was refused for it, as if it named a quantization."""
    asked, unnamed = planned(plain, "GGUF", gpus), planned(plain, None, gpus)
    assert isinstance(asked, Plan), asked.message
    assert isinstance(unnamed, Plan)
    assert (asked.quantization, asked.requires, asked.summary) == ("None", (), unnamed.summary)
    assert (asked.memory, asked.resources) == (unnamed.memory, unnamed.resources)
    bits = 32 if "F32" in next(plain.iterdir()).name else 16
    said = f"spec.quantization.method asks for GGUF, and the weights of the GGUF file are of {bits} bit."
    assert said in [one.reason for one in asked.reasons]


def test_the_bytes_of_a_file_of_plain_numbers_are_those_of_its_tensors(plain: Path) -> None:
    answer = inspect_folder(plain)
    shape = read_inspected(read_answer(to_json(answer))).shape
    assert (shape.is_gguf, shape.quantization) == (True, None)
    assert shape.parameters.total == answer["weights"]["elements"]
    stored, asked = rank_weights(shape, weight_format(shape, "None")), rank_weights(shape, weight_format(shape, "GGUF"))
    assert asked == stored
    width = shape.weight_bytes
    padding = (shape.padded_vocab_size - shape.vocab_size) * shape.hidden_size * 2
    norms = shape.parameters.norms * (4 - width)  # in float32 in the file, in the model's type in memory
    assert stored.total_bytes == answer["weights"]["tensor_bytes"] + padding * width - norms


def test_the_runtime_takes_a_file_of_plain_numbers_for_gguf_and_for_none(plain: Path) -> None:
    for accepted in (WeightFormat.GGUF, WeightFormat.NONE, None):
        boot(plain, accepted)
    with pytest.raises(InvalidConfigError, match="holds weights of 16 or 32 bits"):
        boot(plain, WeightFormat.AWQ)


def test_a_source_with_both_says_which_is_served_and_how_to_serve_the_other(
    both: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answer = inspect_folder(both)
    assert answer["weights"]["gguf_left_out"] == NAME
    assert "format" not in answer["weights"]
    plan = planned(both, None)
    assert isinstance(plan, Plan), plan.message
    (said,) = [one.reason for one in plan.reasons if one.field == "model.source"]
    assert said == (
        f"The source holds *.safetensors and a GGUF file: these are served, not {NAME}. To serve that file, put it "
        "into a folder or image of its own, or name it in a repository as org/name:Q4_K_M, by a word of its name."
    )
    with caplog.at_level(logging.WARNING, logger="millstream"):
        load_model(load_model_config(both), both, torch.float32, torch.device("cpu"))
    (record,) = [one for one in caplog.records if one.message == "gguf_left_out"]
    assert getattr(record, "fields", {})["file"] == NAME


@pytest.mark.parametrize("gpus", [None, "A100-40GB:1"])
def test_a_spec_that_asks_for_the_other_is_refused_with_the_fix(both: Path, gpus: str | None) -> None:
    found = planned(both, "GGUF", gpus)
    assert isinstance(found, Infeasible)
    assert found.constraint == "quantization"
    start = "spec.quantization.method is GGUF, but the source holds *.safetensors, too"
    assert found.message.startswith(f"{start}, and these are served, not {NAME}.")
    assert "org/name:Q4_K_M" in found.message
    with pytest.raises(InvalidConfigError, match=rf"read and not {NAME}: put that file into a folder or image of its"):
        boot(both, WeightFormat.GGUF)
    boot(both, WeightFormat.NONE)
    (both / NAME).unlink()
    alone = planned(both, None)
    assert isinstance(alone, Plan)
    assert "model.source" not in [one.field for one in alone.reasons]
    with pytest.raises(InvalidConfigError, match="holds weights of 16 or 32 bits"):
        boot(both, WeightFormat.GGUF)


def test_a_gguf_file_that_is_named_comes_before_safetensors(
    hub: LocalHub, cdn: LocalCDN, policy: RetryPolicy, options: FetchOptions, content: bytes, tmp_path: Path
) -> None:
    """`org/tiny:Q4_K_M` was served from the *.safetensors of the repository, without a word."""
    index = b'{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'
    hub.files |= {NAME: content, "model.safetensors.index.json": index, "sub/other.safetensors": b""}
    source = HuggingFace("org/tiny:Q4_K_M", endpoint=hub.url, policy=policy)
    shape = inspect_source(source)
    assert shape["quantization_config"]["quant_method"] == "gguf"
    assert "gguf_left_out" not in shape["weights"]
    fetch(source, tmp_path, lambda line: None, options)
    weights = {path.name for path in tmp_path.iterdir() if path.suffix in (".gguf", ".safetensors")}
    assert weights == {NAME}
    assert load_model_config(tmp_path).num_layers == 3


def test_files_in_subfolders_are_no_models(hub: LocalHub, cdn: LocalCDN, policy: RetryPolicy, content: bytes) -> None:
    hub.files = {NAME: content, "Q8_0/tiny-Q8_0.gguf": content, "onnx/model.safetensors": b""}
    require_shape(inspect_source(HuggingFace("org/tiny", endpoint=hub.url, policy=policy)), content)


PARTS = ("UD-Q4_K_XL/tiny-UD-Q4_K_XL-00001-of-00002.gguf", "UD-Q4_K_XL/tiny-UD-Q4_K_XL-00002-of-00002.gguf")


@pytest.mark.parametrize("variant", ["UD-Q4_K_M", "tiny-UD-Q4_K_M", "q4_k_m"])
def test_a_quantization_in_a_folder_is_fetched_by_its_word(
    hub: LocalHub,
    cdn: LocalCDN,
    policy: RetryPolicy,
    options: FetchOptions,
    content: bytes,
    tmp_path: Path,
    variant: str,
) -> None:
    """Large quantizations lie in folders of their repository: there were "0 GGUF files" in it."""
    hub.files = {
        "UD-Q4_K_M/tiny-UD-Q4_K_M.gguf": content,
        "UD-Q4_K_M/tiny-UD-Q4_K_M-mmproj.gguf": b"GGUF",
        ".cache/tiny-UD-Q4_K_M.gguf": b"",
        PARTS[0]: b"GGUF",
        "tiny-Q8_0.gguf": b"GGUF",
    }
    source = HuggingFace(f"org/tiny:{variant}", endpoint=hub.url, policy=policy)
    require_shape(inspect_source(source), content)
    for kept in (False, True):
        assert fetch(source, tmp_path, lambda line: None, options).kept is kept
    assert {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")} == {"tiny-UD-Q4_K_M.gguf"}
    assert load_model_config(tmp_path).num_layers == 3


def test_all_parts_in_a_folder_are_needed_and_a_word_of_two_folders_is_refused(
    hub: LocalHub, policy: RetryPolicy, content: bytes
) -> None:
    hub.files = {PARTS[0]: content, "Q4_K_XL/tiny-Q4_K_XL.gguf": content}
    source = HuggingFace("org/tiny:UD-Q4_K_XL", endpoint=hub.url, policy=policy)
    with pytest.raises(RuntimeFailure, match=r"lacks tiny-UD-Q4_K_XL-00002-of-00002\.gguf"):
        inspect_source(source)
    several = HuggingFace("org/tiny:Q4_K_XL", endpoint=hub.url, policy=policy)
    with pytest.raises(RuntimeFailure, match=r"has Q4_K_XL in 2 folders \(Q4_K_XL, UD-Q4_K_XL\)"):
        inspect_source(several)
    unknown = HuggingFace("org/tiny:Q5_K_M", endpoint=hub.url, policy=policy)
    with pytest.raises(RuntimeFailure, match=rf"among its 2 GGUF files \(Q4_K_XL/tiny-Q4_K_XL\.gguf, {PARTS[0]}"):
        inspect_source(unknown)


def test_a_repository_of_folders_of_which_none_is_named_says_how_to_name_one(
    hub: LocalHub, policy: RetryPolicy
) -> None:
    hub.files = dict.fromkeys((*PARTS, "Q8_0/tiny-Q8_0.gguf", "config.json"), b"{}")
    with pytest.raises(RuntimeFailure, match=r"its GGUF files in folders \(Q8_0, UD-Q4_K_XL\); name one .*VARIANT"):
        inspect_source(HuggingFace("org/tiny", endpoint=hub.url, policy=policy))


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
