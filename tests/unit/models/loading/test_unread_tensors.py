"""A tensor of the language model that no layer reads is refused by name; what changes no answer may be there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.models.model_parts import ModelParts
from millstream_runtime.models.registry import load_model, load_model_config
from tests.support.engines import WriteModel
from tests.unit.models.loading.test_checkpoint import edit_config

ATTENTION = "model.layers.1.self_attn"
NUMBERS = torch.ones(48)


@pytest.fixture
def folder(tmp_path: Path, write_model: WriteModel) -> Path:
    return shutil.copytree(write_model(), tmp_path / "model")


def add(folder: Path, *names: str, tensor: torch.Tensor = NUMBERS) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | {name: tensor.clone() for name in names}, path)


def load(folder: Path) -> None:
    config = load_model_config(folder)
    load_model(config, folder, torch.float32, torch.device("cpu"))


def check_parts(folder: Path) -> None:
    ModelParts(load_model_config(folder), folder, torch.float32, torch.device("cpu")).check()


@pytest.mark.parametrize("read", [load, check_parts])
@pytest.mark.parametrize(
    "name",
    [
        f"{ATTENTION}.q_proj.bias",
        f"{ATTENTION}.R4",
        f"{ATTENTION}.q_norm.weight",
        f"{ATTENTION}.q_proj.input_scale",  # of a module that is not quantized
        "model.layers.1.mlp.experts.0.up_proj.weight",
        "model.layers.1.mlp.down_proj.weight_scale",
        "model.norm.bias",
        "lm_head.bias",
        "R1",
    ],
)
def test_a_tensor_that_no_layer_reads_is_refused_with_its_file(
    name: str, read: Callable[[Path], None], folder: Path
) -> None:
    add(folder, name)
    with pytest.raises(RuntimeFailure) as caught:
        read(folder)
    assert caught.value.reason is FailureReason.CHECKPOINT_INVALID
    assert f"model.safetensors: tensor {name} is read by no layer of a LlamaForCausalLM" in caught.value.message
    assert "\n" not in caught.value.message


def test_the_first_of_several_is_named_and_the_others_are_counted(folder: Path) -> None:
    add(folder, "b", "a", "c")
    with pytest.raises(RuntimeFailure, match=r"tensor a is read by no layer .*, nor are 2 others, so"):
        load(folder)


def test_what_changes_no_answer_may_be_there(folder: Path) -> None:
    add(
        folder,
        f"{ATTENTION}.rotary_emb.inv_freq",
        "model.rotary_emb.inv_freq",
        f"{ATTENTION}.masked_bias",
        f"{ATTENTION}.k_scale",
        f"{ATTENTION}.k_proj.output_scale",
        "model.layers.2.self_attn.q_proj.weight",  # the model has two layers
        "mtp.layers.0.mlp.up_proj.weight",
        "medusa_head.0.0.linear.weight",
        "v_head.summary.weight",
        "multi_modal_projector.linear_1.weight",
    )
    add(folder, f"{ATTENTION}.q_proj.bias", tensor=torch.zeros(48))  # as old GPTQ tools wrote
    load(folder)
    check_parts(folder)


def test_a_head_that_is_the_embedding_may_be_stored(folder: Path) -> None:
    edit_config(folder, tie_word_embeddings=True)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path)
    load(folder)


def test_other_files_next_to_a_single_one_are_no_part_of_the_model(folder: Path) -> None:
    save_file({"layers.0.attention.wq.weight": NUMBERS}, folder / "consolidated.safetensors")
    load(folder)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    with pytest.raises(RuntimeFailure, match=r"consolidated\.safetensors: tensor layers\.0\.attention\.wq"):
        load(folder)
