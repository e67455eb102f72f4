"""Every model family computes what transformers computes: the same logits, each field counts, damage is refused.

Greedy answers are the same token for token, however they are computed: see tests/unit/engine/test_every_family.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.models.registry import ARCHITECTURES, load_model, load_model_config
from tests.support.family_cases import CASES, YARN, Models, rope
from tests.support.tiny_families import model_logits, prompts_of, reference_logits, with_fields

REFUSED = {name: CASES[name] for name in CASES if name.split("-")[0] != "llama" or name == "llama-biases"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Any:
    """Tiny products gain nothing from a second thread, and lose a lot to one that has to wait for a core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers_in_float64_and_every_field_counts(name: str, models: Models, tmp_path: Path) -> None:
    """Tolerances are float32's: transformers keeps norms, routers and angles in it whatever the model's type."""
    [prompt] = prompts_of([41])
    expected = reference_logits(models.reference(name), prompt)
    torch.testing.assert_close(
        model_logits(models.folder(name), prompt, chunk_tokens=23), expected, rtol=1e-4, atol=1e-4
    )
    for field_name, other in CASES[name].counts.items():
        folder = with_fields(models.folder(name), tmp_path / field_name, **{field_name: other})
        if field_name in ("attention_bias", "mlp_bias") and not other:
            with pytest.raises(RuntimeFailure, match=r"_proj\.bias is read by no layer"):
                model_logits(folder, prompt, chunk_tokens=41)
            continue
        difference = (model_logits(folder, prompt, chunk_tokens=41) - expected).abs().max()
        assert difference > 1e-2, f"{field_name} = {other} computes the same"


@pytest.mark.parametrize(
    ("name", "scaling"),
    [
        ("qwen3", {"type": "yarn"} | YARN),
        ("llama-rope-linear", {"rope_type": "yarn"} | YARN),
        ("gemma3", {"rope_type": "linear", "factor": 2.0}),
    ],
)
def test_rope_scaling_that_is_added_to_a_newer_folder_counts_as_in_transformers(
    name: str, scaling: dict[str, Any], models: Models, tmp_path: Path
) -> None:
    """As READMEs say for long contexts, though the folder has `rope_parameters`."""
    folder = with_fields(models.folder(name), tmp_path / "extended", rope_scaling=scaling)
    [prompt] = prompts_of([41])
    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    expected = reference_logits(reference, prompt)
    torch.testing.assert_close(model_logits(folder, prompt, chunk_tokens=23), expected, rtol=1e-4, atol=1e-4)
    assert (expected - reference_logits(models.reference(name), prompt)).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("gemma3", {"attn_logit_softcapping": 3.0}),
        ("gemma3", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 8.0}}),
        ("llama", {"sliding_window": 7}),
        ("llama", {"hidden_act": "swish"}),
    ],
)
def test_a_field_that_transformers_ignores_changes_nothing(
    name: str, fields: dict[str, Any], models: Models, tmp_path: Path
) -> None:
    folder = with_fields(models.folder(name), tmp_path / "changed", **fields)
    [prompt] = prompts_of([41])
    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    expected = reference_logits(reference, prompt)
    torch.testing.assert_close(model_logits(folder, prompt, chunk_tokens=23), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.deep
@pytest.mark.parametrize("name", CASES)
def test_bfloat16_is_as_exact_as_in_transformers(name: str, models: Models) -> None:
    """Both against float64: rounded in the same places or fewer, the error is of the same size."""
    [prompt] = prompts_of([41])
    exact = reference_logits(models.reference(name), prompt)

    def error(logits: torch.Tensor) -> float:
        return float((logits.double() - exact).square().mean().sqrt())

    ours = model_logits(models.folder(name), prompt, chunk_tokens=23, dtype=torch.bfloat16)
    theirs = reference_logits(models.reference(name), prompt, torch.bfloat16)
    assert error(ours) <= 2 * error(theirs)


@pytest.mark.matrix("damage")
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("damage", ["missing", "shape", "dtype", "nan"])
def test_damaged_tensors_are_refused_by_name(name: str, damage: str, models: Models, tmp_path: Path) -> None:
    source, tensor_name = models.folder(name), CASES[name].tensor
    tensors = {key: value for path in source.glob("*.safetensors") for key, value in load_file(path).items()}
    tensor = tensors.pop(tensor_name)
    if damage == "shape":
        tensors[tensor_name] = tensor[:-1].clone()
    elif damage == "dtype":
        tensors[tensor_name] = tensor.to(torch.int8)
    elif damage == "nan":
        tensors[tensor_name] = tensor.fill_(float("nan"))
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeFailure) as caught:
        load_model(load_model_config(tmp_path), tmp_path, torch.float32, torch.device("cpu"))
    assert caught.value.reason is FailureReason.CHECKPOINT_INVALID
    assert tensor_name in caught.value.message
    assert "\n" not in caught.value.message


def test_an_unsupported_architecture_is_refused_with_the_list_of_the_supported(models: Models, tmp_path: Path) -> None:
    folder = with_fields(models.folder("llama"), tmp_path / "falcon", architectures=["FalconForCausalLM"])
    with pytest.raises(RuntimeFailure) as caught:
        load_model_config(folder)
    assert caught.value.reason is FailureReason.UNSUPPORTED_BY_RUNTIME
    assert "'FalconForCausalLM'" in caught.value.message
    assert all(architecture in caught.value.message for architecture in ARCHITECTURES)
    assert "\n" not in caught.value.message


def test_every_architecture_of_the_registry_has_a_case(models: Models) -> None:
    assert {load_model_config(models.folder(name)).architecture for name in CASES} == set(ARCHITECTURES)


@pytest.mark.parametrize(
    ("name", "fields", "says"),
    [
        ("gemma2", {"layer_types": ["sliding_attention"]}, "layer_types"),
        ("gemma2", {"hidden_activation": "silu"}, "hidden_activation 'silu'"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping is -1.0"),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
        ("phi4-longrope", {"rope_parameters": rope("longrope", short_factor=[1.0])}, "short_factor is [1.0]"),
        ("phi3", {"rope_parameters": rope("llama3")}, "rope_type 'llama3'"),
        (
            "phi4-partial-rotary",
            {"rope_parameters": rope("default", partial_rotary_factor=0.26)},
            "partial_rotary_factor",
        ),
        ("llama", {"rope_parameters": rope("default", partial_rotary_factor=0.5)}, "partial_rotary_factor 0.5"),
        ("llama", {"rope_parameters": rope("yarn", factor="4")}, "rope_parameters.factor is '4'"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ("mixtral", {"num_experts_per_tok": 6}, "num_experts_per_tok is 6"),
        ("qwen3-moe", {"mlp_only_layers": "1"}, "mlp_only_layers is '1'"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        ("deepseek-v3", {"n_group": 3}, "n_group is 3"),
        ("deepseek-v3", {"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
    ],
)
def test_impossible_fields_are_refused_by_name(
    name: str, fields: dict[str, Any], says: str, models: Models, tmp_path: Path
) -> None:
    folder = with_fields(models.folder(name), tmp_path / "model", **fields)
    with pytest.raises(RuntimeFailure) as caught:
        load_model_config(folder)
    assert says in caught.value.message
    assert "\n" not in caught.value.message
