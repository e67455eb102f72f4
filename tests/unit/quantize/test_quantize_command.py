"""`millstream quantize` as a person types it: the result loads and has the planned bytes; bad input is one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from millstream.termination import TERMINATION_LOG_VARIABLE
from millstream_operator.catalog.read_shape import read_shape
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.made_model import GGUF_FAMILIES, GGUF_TYPE, as_made, weights_file_bytes
from millstream_operator.planning.sizing.cpu_memory import cpu_weights_bytes
from millstream_operator.preparation.step_answers import read_step_answer
from millstream_operator.rendering.preparation_job import StepKind
from millstream_runtime.gguf.header import read_gguf_file
from millstream_runtime.models.registry import expected_weights, load_model_config
from millstream_runtime.quantize.output.gguf_metadata import ARCHITECTURE_OF
from millstream_runtime.quantize.settings import GGUF_TYPES, Method
from tests.support.family_cases import CASES
from tests.support.llmdeployments import deployment
from tests.support.thread_ranks import on_ranks
from tests.support.tiny_families import engine_answers, make_engine, model_logits, prompts_of, write_family
from tests.support.tiny_model import write_tiny_model
from tests.unit.quantize.conftest import contents, quantize

pytestmark = pytest.mark.deep

FORMATS = {
    "rtn": "awq",
    "awq": "awq",
    "gptq": "gptq",
    "int8": "compressed-tensors",
    "fp8": "compressed-tensors",
    "fp8-static": "compressed-tensors",
    "nf4": "bitsandbytes",
}
DEMO = Path(__file__).resolve().parents[3] / "models" / "demo-chat"
FEW = ("--max-sequences=32", "--sequence-tokens=128")


@pytest.fixture(scope="module", params=FORMATS)
def made(request: pytest.FixtureRequest, tiny: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out: Path = tmp_path_factory.mktemp("made") / request.param
    method, _, scheme = request.param.partition("-")
    flags = [f"--activation-scheme={scheme}"] if scheme else []
    code = quantize(tiny, out, f"--method={method}", f"--calibration={data}", *FEW, *flags)
    assert code == (0 if json.loads((out / "quality.json").read_text())["verdict"] == "passed" else 3)
    return out


def test_the_folder_is_a_model_in_a_published_format(made: Path, tiny: Path) -> None:
    config = json.loads((made / "config.json").read_text())
    assert config.pop("quantization_config")["quant_method"] == FORMATS[made.name]
    assert config == json.loads((tiny / "config.json").read_text())
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (made / name).read_bytes() == (tiny / name).read_bytes()
    assert sorted(path.name for path in made.iterdir() if path.name.startswith(".")) == []
    assert [path.name for path in made.parent.iterdir()] == [made.name]  # nothing of the work is left


@pytest.mark.quick
@pytest.mark.matrix
def test_it_computes_about_what_its_base_computes(made: Path, tiny: Path) -> None:
    (prompt,) = prompts_of([40])
    base, logits = (model_logits(folder, prompt, 40).log_softmax(-1) for folder in (tiny, made))
    assert 0 < (base.exp() * (base - logits)).sum(-1).mean() < 0.5


def test_two_ranks_compute_the_same(made: Path) -> None:
    (prompt,) = prompts_of([24])
    alone = model_logits(made, prompt, 24, torch.float64)
    together = on_ranks(2, lambda ranks: model_logits(made, prompt, 24, torch.float64, ranks))
    assert torch.allclose(together, alone, atol=1e-8)


def test_it_is_served(made: Path) -> None:
    (answer,) = engine_answers(make_engine(made), prompts_of([12]), 8)
    assert len(answer) == 8


def test_memory_and_file_are_as_planned(made: Path) -> None:
    planned = cpu_weights_bytes(read_shape(json.loads((made / "config.json").read_text())))
    assert expected_weights(load_model_config(made), torch.float32).num_bytes == pytest.approx(planned, rel=0.01)


def test_card_and_report_say_how_it_compares(made: Path) -> None:
    report = json.loads((made / "quality.json").read_text())
    card = (made / "README.md").read_text()
    assert report["data"]["documents"] >= 20
    assert f"**{report['verdict']}**" in card
    assert made.name in card
    assert f"{report['slices'][0]['figures']['mean_kl']['value']:.4g}" in card


@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("gemma2", "rtn"),
        ("gemma2", "awq"),
        ("phi3", "gptq"),
        ("mixtral", "awq"),
        ("deepseek-v3", "awq"),
        ("deepseek-v3", "gptq"),
        ("deepseek-v3", "int8"),
        ("qwen3-moe", "fp8"),
        ("qwen3-moe", "nf4"),
    ],
)
def test_every_kind_of_family_can_be_made(family: str, method: str, tiny: Path, data: Path, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64} | ({"moe_intermediate_size": 32} if "deep" in family else {})
    write_family(tmp_path / "model", **CASES[family].config | sizes | {"vocab_size": 272})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / name, tmp_path / "model" / name)
    flags = [f"--method={method}", f"--calibration={data}", *FEW, "--no-quality"]
    flags += [] if method in ("int8", "fp8", "nf4") else ["--group-size=32"]
    assert quantize(tmp_path / "model", tmp_path / "out", *flags) == 0
    (prompt,) = prompts_of([20])
    base, logits = (model_logits(tmp_path / name, prompt, 20).log_softmax(-1) for name in ("model", "out"))
    assert 0 < (base.exp() * (base - logits)).sum(-1).mean() < 1


def test_a_layer_that_groups_do_not_divide_stays_as_it_is_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_tiny_model(tmp_path / "model", intermediate_size=96)
    assert quantize(model, tmp_path / "out", "--method=rtn", "--no-quality", "--group-size=64") == 0
    assert "mlp.down_proj" in capsys.readouterr().err
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert "mlp.down_proj" in config["quantization_config"]["modules_to_not_convert"]
    assert "mlp.down_proj" in (tmp_path / "out/README.md").read_text()
    model_logits(tmp_path / "out", [1, 2, 3], 3)


@pytest.mark.quick
def test_the_group_size_is_chosen_to_fit_all_layers(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", intermediate_size=96)
    assert quantize(model, tmp_path / "out", "--method=rtn", "--no-quality") == 0
    assert json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["group_size"] == 32


@pytest.mark.quick
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--method=best"], "--method 'best' is unknown; this version makes: rtn"),
        (["--method=rtn", "--gguf-type=Q8_0"], "--gguf-type is for --method gguf; --method rtn has none"),
        (["--method=gguf", "--group-size=64"], "--group-size is for --method rtn, awq, gptq; --method gguf has none"),
        (["--method=rtn", "--group-size=100"], "--group-size is 100"),
        (["--method=int8"], "--method int8 needs --calibration"),
        (["--method=fp8", "--activation-scheme=static"], "--method fp8 needs --calibration"),
        (["--method=fp8", "--group-size=64"], "--group-size is for --method rtn, awq, gptq; --method fp8 has none"),
        (["--method=awq", "--act-order=group"], "--act-order is for --method gptq; --method awq has none"),
        (["--method=rtn", "--activation-scheme=static"], "--activation-scheme is for --method fp8"),
        (["--method=awq"], "--method awq needs --calibration"),
        (["--method=AWQ"], "--method awq needs --calibration"),
        (["--method=rtn", "--sequence-tokens=1"], "--sequence-tokens is 1"),
        (["--method=awq", "--calibration=x", "--max-sequences=4"], "--max-sequences 4 of 512 tokens are 2048 tokens"),
        (["--method=rtn", "--seed=-1"], "--seed is -1"),
        (["--method=rtn", "--calibration=/nowhere.jsonl"], "Cannot read --calibration /nowhere.jsonl"),
        (["--out=x"], "--method"),
    ],
)
def test_a_flag_that_cannot_work_is_one_sentence(
    tiny: Path, tmp_path: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quantize(tiny, tmp_path / "out", *flags) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.quick
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--method=gguf"], "inputs must be a multiple of 256; --gguf-type Q8_0: of 32."),
        (["--method=rtn", "--group-size=256"], "inputs must be a multiple of the group size 256 (--group-size), and o"),
    ],
)
def test_a_model_of_which_no_layer_fits_is_told_what_would(
    tiny: Path, tmp_path: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quantize(tiny, tmp_path / "out", "--no-quality", *flags) == 2
    assert f"No linear layer of {tiny} fits the format: {words}" in capsys.readouterr().err


@pytest.mark.quick
@pytest.mark.parametrize("below", ["", "quantized"])
def test_an_output_folder_in_the_model_is_refused(tiny: Path, below: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Otherwise --keep-made would take the 16-bit model for a quantized one."""
    before = sorted(tiny.rglob("*"))
    assert quantize(tiny, tiny / below, "--method=rtn", "--keep-made", "--no-quality") == 2
    assert "is in the folder" in capsys.readouterr().err
    assert sorted(tiny.rglob("*")) == before


@pytest.mark.quick
def test_an_output_folder_that_holds_something_is_refused(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").write_text("mine")
    assert quantize(tiny, tmp_path / "out", "--method=rtn") == 2
    assert "exists and is not an empty folder" in capsys.readouterr().err
    assert quantize(tiny, tmp_path / "no/where", "--method=rtn") == 2
    assert "does not exist" in capsys.readouterr().err


def test_a_model_that_cannot_be_quantized_is_refused(
    tiny: Path, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quantize(made, tmp_path / "out", "--method=rtn") == 2
    words = f"{made} is quantized already (quantization_config.quant_method: {FORMATS[made.name]})"
    assert words in capsys.readouterr().err
    assert quantize(tmp_path / "absent", tmp_path / "out", "--method=rtn") == 1
    assert "does not exist" in capsys.readouterr().err
    damaged = shutil.copytree(tiny, tmp_path / "damaged")
    with (damaged / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)
    assert quantize(damaged, tmp_path / "out", "--method=rtn") == 1
    assert "truncated or corrupt" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_its_own_held_out_documents_judge(tiny: Path, data: Path, tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.jsonl"
    lines = data.read_text().splitlines()[:25]
    held_out.write_text("".join(f"{json.dumps(json.loads(one) | {'slice': 'mine'})}\n" for one in lines))
    assert quantize(tiny, tmp_path / "out", "--method=rtn", f"--held-out={held_out}") in (0, 3)
    (found,) = json.loads((tmp_path / "out/quality.json").read_text())["slices"]
    assert (found["figures"]["slice"], found["figures"]["num_documents"]) == ("mine", 25)


@pytest.mark.matrix
@pytest.mark.parametrize("method", Method)
def test_the_operator_predicts_the_bytes_of_the_files(method: str, tmp_path: Path) -> None:
    out, data = tmp_path / "made", DEMO.parent / "held_out.jsonl"
    assert quantize(DEMO, out, f"--method={method}", f"--calibration={data}", *FEW, "--no-quality") == 0
    files = [path for path in out.iterdir() if path.suffix in (".safetensors", ".gguf")]
    headers = [read_gguf_file(path).num_bytes for path in files if path.suffix == ".gguf"]  # with the vocabulary
    found_bytes = sum(path.stat().st_size for path in files) - sum(headers)
    spec = deployment(
        model={"source": {"local": {"path": "demo-chat"}}, "cache": {"size": "1Gi"}},
        quantization={"method": method.upper(), "calibration": {"configMapRef": {"name": "c", "key": "k"}}},
    ).spec
    shape = as_made(spec, Facts(read_shape(json.loads((DEMO / "config.json").read_text())))).shape
    assert shape is not None
    assert found_bytes == pytest.approx(weights_file_bytes(shape), rel=0.01)


@pytest.mark.quick
def test_held_out_documents_that_cannot_judge_are_refused_before_a_layer_is_made(
    tiny: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "few.jsonl").write_text("".join(data.read_text().splitlines(keepends=True)[:3]))
    for name, words in (("absent", "Cannot read --held-out"), ("few", "Slice 'all' has 3 documents")):
        flags = ("--method=rtn", f"--held-out={tmp_path}/{name}.jsonl")
        assert quantize(tiny, tmp_path / "out", *flags) == 2
        assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["few.jsonl"]


@pytest.mark.quick
def test_the_operator_knows_what_gguf_files_are_made_of() -> None:
    assert tuple(ARCHITECTURE_OF) == GGUF_FAMILIES
    assert GGUF_TYPES[0] == GGUF_TYPE


@pytest.mark.parametrize("method", ["rtn", "awq", "gptq", "int8", "fp8"])
def test_in_a_pod_the_bytes_are_the_termination_message_and_what_the_operator_predicted(
    method: str, tiny: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, out = tmp_path / "termination-log", tmp_path / "made"
    log.touch()
    monkeypatch.setenv(TERMINATION_LOG_VARIABLE, str(log))
    flags = (f"--method={method}", f"--calibration={data}", *FEW, "--no-quality", "--keep-made")
    assert quantize(tiny, out, *flags) == 0
    first, before = log.read_text(), contents(out)
    answer = read_step_answer(StepKind.QUANTIZE, first)
    assert isinstance(answer, dict)
    spec = deployment(
        model={"source": {"local": {"path": "tiny"}}, "cache": {"size": "1Gi"}},
        quantization={"method": method.upper(), "calibration": {"configMapRef": {"name": "c", "key": "k"}}},
    ).spec
    shape = as_made(spec, Facts(read_shape(json.loads((tiny / "config.json").read_text())))).shape
    assert shape is not None
    # What a plan leaves out weighs more with 64 inputs than with 4096: the header.
    assert answer["weights_bytes"] == pytest.approx(weights_file_bytes(shape), rel=0.1)
    log.write_text("")
    assert quantize(tiny, out, *flags) == 0, "an attempt whose answer was lost is made up for"
    assert (log.read_text(), contents(out)) == (first, before)
