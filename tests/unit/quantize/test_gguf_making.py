"""`--method gguf` and `--method nf4`: read back by llama.cpp's and bitsandbytes' own packages."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import bitsandbytes.functional as bnb
import gguf
import numpy as np
import pytest
import torch
from bitsandbytes.functional import QuantState
from safetensors.torch import load_file

from benchmarks.gguf_llama import interleave_rotary_halves
from millstream_operator.catalog.inspected_model import read_answer, read_inspected
from millstream_operator.planning.sizing.cpu_memory import cpu_weights_bytes
from millstream_runtime.gguf.block_types import BLOCK_TYPES
from millstream_runtime.models.registry import expected_weights, load_model_config
from millstream_runtime.quantize.methods.gguf_rounding import to_blocks
from millstream_runtime.sources.inspection.inspect import inspect_folder
from millstream_runtime.sources.inspection.shape import to_json
from tests.support.family_cases import CASES
from tests.support.killed_quantization import killed
from tests.support.tiny_families import model_logits, prompts_of, write_family
from tests.unit.quantize.conftest import contents, quantize

SIZES = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 272}


@pytest.fixture(scope="module", params=["Q4_K", "Q8_0"])
def made(request: pytest.FixtureRequest, wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out: Path = tmp_path_factory.mktemp("made") / request.param
    assert quantize(wide, out, "--method=gguf", f"--gguf-type={request.param}", "--no-quality") == 0
    return out


@pytest.mark.deep
def test_llama_cpps_package_reads_the_weights(made: Path, wide: Path) -> None:
    reader = gguf.GGUFReader(made / f"model-{made.name}.gguf")
    stored = {one.name: one for one in reader.tensors}
    base = load_file(wide / "model.safetensors")
    config = json.loads((wide / "config.json").read_text())
    assert reader.fields["general.architecture"].contents() == "llama"
    assert reader.fields["llama.block_count"].contents() == 4
    for theirs, ours, heads in (
        ("blk.2.attn_q.weight", "model.layers.2.self_attn.q_proj.weight", config["num_attention_heads"]),
        ("blk.3.attn_k.weight", "model.layers.3.self_attn.k_proj.weight", config["num_key_value_heads"]),
        ("blk.1.ffn_down.weight", "model.layers.1.mlp.down_proj.weight", None),
    ):
        weight = base[ours].float().numpy()
        expected = weight if heads is None else interleave_rotary_halves(weight, heads)
        tensor = stored[theirs]
        found = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert tensor.tensor_type.name == made.name
        assert np.abs(found - expected).max() < (0.15 if made.name == "Q4_K" else 0.02) * np.abs(expected).max()
    norm = stored["blk.0.attn_norm.weight"]
    assert norm.tensor_type.name == "F32"
    assert np.array_equal(norm.data, base["model.layers.0.input_layernorm.weight"].float().numpy())


@pytest.mark.deep
def test_this_runtime_computes_about_what_the_base_computes(made: Path, wide: Path) -> None:
    (prompt,) = prompts_of([40])
    base, logits = (model_logits(folder, prompt, 40).log_softmax(-1) for folder in (wide, made))
    assert 0 < (base.exp() * (base - logits)).sum(-1).mean() < 0.2


@pytest.mark.deep
def test_bytes_are_as_planned(made: Path) -> None:
    shape = read_inspected(read_answer(to_json(inspect_folder(made)))).shape
    taken = expected_weights(load_model_config(made), torch.float32).num_bytes
    assert cpu_weights_bytes(shape) == pytest.approx(taken, rel=0.01)


@pytest.mark.deep
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral"])
def test_other_families_are_written(family: str, wide: Path, tmp_path: Path) -> None:
    write_family(tmp_path / "model", **CASES[family].config | SIZES)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(wide / name, tmp_path / "model" / name)
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps(config | {"sliding_window": None}))
    flags = ("--method=gguf", "--gguf-type=Q8_0", "--no-quality")
    assert quantize(tmp_path / "model", tmp_path / "out", *flags) == 0
    (prompt,) = prompts_of([20])
    base, logits = (model_logits(tmp_path / name, prompt, 20).log_softmax(-1) for name in ("model", "out"))
    assert (base.exp() * (base - logits)).sum(-1).mean() < 0.01


def test_a_family_that_is_not_written_is_refused(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_family(tmp_path / "model", **CASES["gemma2"].config)
    assert quantize(tmp_path / "model", tmp_path / "out", "--method=gguf", "--no-quality") == 2
    assert "model_type 'gemma2' is not written yet" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    "fields",
    [
        {"max_position_embeddings": None},
        {"rms_norm_eps": None, "num_key_value_heads": 2, "rope_theta": None},
        {"bos_token_id": -1, "eos_token_id": [258, -1, 2**40, 257]},
        {"rope_scaling": YARN},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 512},
    ],
    ids=["no context", "nulls", "token ids", "yarn", "yarn, its length outside"],
)
def test_the_file_says_what_config_json_leaves_out_or_says_elsewhere(
    fields: dict[str, object], wide: Path, tmp_path: Path
) -> None:
    shutil.copytree(wide, tmp_path / "model")
    path = tmp_path / "model/config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: one for name, one in config.items() if one is not None}))
    assert quantize(tmp_path / "model", tmp_path / "out", "--method=gguf", "--no-quality") == 0
    base, found = load_model_config(tmp_path / "model"), load_model_config(tmp_path / "out")
    assert found.rms_norm_eps == pytest.approx(base.rms_norm_eps)
    for name in ("max_position_embeddings", "num_kv_heads", "rope"):
        assert getattr(found, name) == getattr(base, name), name
    by_name = {256}  # <|endoftext|>, at which llama.cpp ends, too, whatever the metadata says
    assert found.eos_token_ids == {one for one in base.eos_token_ids if 0 <= one < 272} | by_name


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": {"a": [1]}}, "model_type {'a': [1]} is not written yet"),
        ({"rope_scaling": YARN | {"beta_fast": 16}}, "yarn's beta_fast 16 is not written yet; this version writes 32"),
        ({"rope_scaling": YARN | {"attention_factor": 2.0}}, "yarn's attention_factor 2 is not written yet"),
    ],
)
def test_what_the_file_could_not_say_is_refused(
    fields: dict[str, object], words: str, wide: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(wide, tmp_path / "model")
    path = tmp_path / "model/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    assert quantize(tmp_path / "model", tmp_path / "out", "--method=gguf", "--no-quality") == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("tokenizer.json", "{", "/tokenizer.json is not a tokenizer: "),
        (
            "tokenizer.json",
            '{"model": {"type": "BPE"}, "pre_tokenizer": {"type": "ByteLevel"}}',
            ": tokenizer.json or chat_template.jinja cannot be read",
        ),
    ],
)
def test_a_tokenizer_that_is_none_is_refused_before_a_layer_is_made(
    name: str, text: str, words: str, wide: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(wide, tmp_path / "model")
    (tmp_path / "model" / name).write_text(text)
    assert quantize(tmp_path / "model", tmp_path / "out", "--method=gguf", "--no-quality") == 1
    assert f"{tmp_path / 'model'}{words}" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.deep
def test_a_killed_run_goes_on_and_gives_the_same_file(wide: Path, tmp_path: Path) -> None:
    flags = ("--method=gguf", "--no-quality")
    (tmp_path / "whole").mkdir()
    quantize(wide, tmp_path / "whole/model", *flags)
    killed(2, "within", wide, tmp_path / "model", *flags)
    assert quantize(wide, tmp_path / "model", *flags) == 0
    assert contents(tmp_path / "model") == contents(tmp_path / "whole/model")


def test_q8_0_blocks_are_those_of_llama_cpps_package() -> None:
    weight = torch.randn(32, 512, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    expected = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(to_blocks(weight, BLOCK_TYPES["Q8_0"]).numpy(), expected)


def test_q4_k_loses_less_than_the_plain_range_of_a_group() -> None:
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)) ** 3
    weight[5, 256:] = 0
    weight[6] = 1.0
    blocks = to_blocks(weight, BLOCK_TYPES["Q4_K"]).numpy()
    found = torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q4_K))
    groups = weight.view(64, -1, 32)
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    step = (high - low).clamp(min=1e-9) / 15
    plain = (((groups - low) / step).round() * step + low).view(weight.shape)
    assert (found - weight).square().mean() < 0.95 * (plain - weight).square().mean()
    assert torch.equal(found[5, 256:], torch.zeros(256))
    assert torch.allclose(found[6], torch.ones(512), rtol=0.02)


@pytest.mark.deep
def test_bitsandbytes_reads_what_nf4_wrote(tiny: Path, tmp_path: Path) -> None:
    assert quantize(tiny, tmp_path / "out", "--method=nf4", "--no-quality") == 0
    stored: dict[str, torch.Tensor] = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        stored |= load_file(path)
    base = load_file(tiny / "model.safetensors")
    for module in ("model.layers.0.self_attn.q_proj", "model.layers.3.mlp.down_proj"):
        name = f"{module}.weight"
        parts = {key.removeprefix(f"{name}."): one for key, one in stored.items() if key.startswith(f"{name}.")}
        state = QuantState.from_dict(parts, device=torch.device("cpu"))
        found = bnb.dequantize_4bit(stored[name], state).float()
        packed, own = bnb.quantize_4bit(base[name].float().contiguous(), blocksize=64, quant_type="nf4")
        expected = bnb.dequantize_4bit(packed, own).float()
        assert found.shape == base[name].shape
        assert torch.equal(stored[f"{name}.absmax"], own.absmax)
        assert (found - expected).abs().max() <= 0.01 * base[name].abs().max()
        assert (stored[name] == packed).float().mean() > 0.999
