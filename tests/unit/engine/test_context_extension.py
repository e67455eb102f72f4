"""Requests longer than `max_position_embeddings`, as far as rope scaling in config.json allows: the same tokens as
transformers, and the same limit in the runtime and in the planner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millstream_operator.catalog.read_shape import read_shape
from millstream_runtime.context_limit import LIMIT_TOKENS, extended_context_tokens
from millstream_runtime.errors import InvalidConfigError
from millstream_runtime.models.registry import load_model_config
from tests.support.engines import MakeEngine
from tests.support.family_cases import MLA, dense, rope
from tests.support.tiny_families import engine_answers, make_engine, prompts_of, reference_answers, write_family

pytestmark = pytest.mark.usefixtures("one_thread")
TRAINED, FACTOR, NEW_TOKENS = 32, 4.0, 16
YARN = {"factor": FACTOR, "original_max_position_embeddings": TRAINED}


def short(model_type: str, parameters: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return dense(model_type, max_position_embeddings=TRAINED, rope_parameters=parameters, **fields)


EXTENDED: dict[str, tuple[dict[str, Any], int]] = {
    "llama, yarn": (short("llama", rope("yarn", **YARN)), 128),
    "llama, yarn with an attention factor": (short("llama", rope("yarn", **YARN, attention_factor=1.7)), 128),
    "llama, yarn not truncated": (short("llama", rope("yarn", **YARN, truncate=False, beta_fast=8)), 128),
    "llama, linear": (short("llama", rope("linear", factor=3.0)), 96),
    "qwen2, yarn": (short("qwen2", rope("yarn", **YARN)), 128),
    "qwen3, yarn over less than it was given": (
        short("qwen3", rope("yarn", **YARN)) | {"max_position_embeddings": 40},
        128,
    ),
    "deepseek, yarn with two temperatures": (
        short("deepseek_v3", rope("yarn", **YARN, mscale=0.7, mscale_all_dim=0.9), **MLA),
        128,
    ),
}


@pytest.mark.parametrize("name", EXTENDED)
def test_answers_beyond_the_trained_length_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    fields, longest = EXTENDED[name]
    reference = write_family(tmp_path, seed=2, **fields)
    prompts = prompts_of([20, 45, longest - NEW_TOKENS])  # within, beyond and up to the end of the extension
    expected = reference_answers(reference, prompts, NEW_TOKENS)
    for settings in ({}, {"max_num_batched_tokens": 19}):
        engine = make_engine(tmp_path, max_model_len=longest, **settings)
        assert engine_answers(engine, prompts, NEW_TOKENS) == expected


@pytest.mark.parametrize("name", EXTENDED)
def test_planner_and_runtime_read_the_same_limit(name: str, tmp_path: Path) -> None:
    fields, longest = EXTENDED[name]
    write_family(tmp_path, **fields)
    config = json.loads((tmp_path / "config.json").read_text())
    assert load_model_config(tmp_path).longest_context_tokens == longest
    assert read_shape(config).longest_context_tokens == longest
    assert read_shape(config).max_position_embeddings == fields["max_position_embeddings"]


def test_nobody_gets_more_than_the_trained_length_without_asking(tmp_path: Path) -> None:
    write_family(tmp_path, **EXTENDED["llama, yarn"][0])
    assert make_engine(tmp_path).model_config.max_model_len == TRAINED


def test_a_length_beyond_the_extension_is_refused_with_the_fields_that_set_it(
    tmp_path: Path, make_engine: MakeEngine
) -> None:
    write_family(tmp_path, **EXTENDED["llama, yarn"][0])
    with pytest.raises(InvalidConfigError) as refused:
        make_engine(tmp_path, max_model_len=129)
    message = str(refused.value)
    assert "--max-model-len is 129" in message
    assert "max_position_embeddings (32)" in message
    assert "at most 128" in message
    assert "spec.engine.maxModelLen" in message
    assert "yarn" in message


def test_a_length_without_room_for_an_answer_is_refused(tmp_path: Path, make_engine: MakeEngine) -> None:
    write_family(tmp_path, **dense("llama"))
    with pytest.raises(InvalidConfigError, match="--max-model-len is 1; it must be at least 2"):
        make_engine(tmp_path, max_model_len=1)
    make_engine(tmp_path, max_model_len=2).warm_up()


@pytest.mark.parametrize(
    "parameters",
    [rope("default"), rope("dynamic", factor=4.0)],
    ids=["no scaling", "dynamic, whose angles change with every token"],
)
def test_models_without_a_fixed_extension_stay_at_their_length(
    parameters: dict[str, Any], tmp_path: Path, make_engine: MakeEngine
) -> None:
    write_family(tmp_path, **short("llama", parameters))
    with pytest.raises(InvalidConfigError, match=r"--max-model-len is 33; .*max_position_embeddings \(32\)"):
        make_engine(tmp_path, max_model_len=33)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}, 131072),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, 65536),
        ({"rope_scaling": {"type": "linear", "factor": 4}, "model_type": "llama"}, 131072),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "model_type": "gemma3_text"}, None),
        ({"rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 819}}, None),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 32, "original_max_position_embeddings": 8192}}, None),
        ({"rope_scaling": {"type": "yarn", "factor": 1e29, "original_max_position_embeddings": 4096}}, LIMIT_TOKENS),
        ({"rope_scaling": {"type": "yarn", "factor": "four"}}, None),
        ({"rope_scaling": {"type": "yarn", "factor": float("nan")}}, None),
        ({"rope_scaling": [4.0]}, None),
        ({"rope_parameters": rope("default"), "rope_scaling": {"type": "yarn", "factor": 4.0}}, 131072),
        ({"rope_parameters": rope("linear", factor=8.0), "rope_scaling": {}}, 262144),
        ({"rope_parameters": rope("linear", factor=8.0), "rope_scaling": {"type": "llama3", "factor": 8.0}}, None),
        ({}, None),
    ],
)
def test_the_extension_of_published_and_of_broken_files(config: dict[str, Any], expected: int | None) -> None:
    assert extended_context_tokens(config, 32768) == expected
