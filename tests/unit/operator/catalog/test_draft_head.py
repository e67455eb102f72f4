"""An inspection's answer about a head is read with bounds; what is no head of the method is refused with the fix."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millstream_operator.catalog.config_fields import ConfigError, UnsupportedModelError
from millstream_operator.catalog.inspected_model import read_answer, read_inspected, read_inspected_head
from tests.support.fake_operator import answer_of
from tests.support.inspected_heads import head_answer, head_shape


def test_the_demo_head_has_the_weights_of_its_file_and_no_table() -> None:
    shape = head_shape()
    assert shape.draft_head is not None
    assert (shape.draft_head.kind, shape.hidden_size, shape.draft_head.vocab_size) == ("EAGLE-1", 256, 2048)
    assert shape.parameters.total == 475_648
    assert shape.kv_elements_per_token() == 2 * 2 * 64
    found = read_inspected_head(head_answer(revision="a" * 40), "EAGLE")
    assert (found.revision, found.checkpoint_bytes) == ("a" * 40, 952_280)


def test_a_head_of_each_kind_keeps_its_own_states() -> None:
    three, medusa = head_shape("EAGLE-3", draft_vocab_size=512), head_shape("Medusa")
    assert three.draft_head is not None
    assert medusa.draft_head is not None
    assert (three.draft_head.states, medusa.draft_head.states) == (3, 1)
    assert (three.draft_head.uses_target_head, medusa.draft_head.drafts_per_pass) == (False, 3)
    assert (three.draft_head.has_keys, medusa.draft_head.has_keys) == (True, False)
    aux = head_shape("EAGLE-3", eagle_aux_hidden_state_layer_ids=[1, 2, 4]).draft_head
    assert aux is not None
    assert aux.state_layers == (1, 2, 4)


@pytest.mark.parametrize(
    ("answer", "method", "said"),
    [
        (read_answer(answer_of()), "EAGLE", "speculation.method is EAGLE, but the weights are those of no EAGLE head"),
        (read_answer(answer_of()), "Medusa", "set speculation.method to DraftModel for a draft model"),
        (head_answer(), "Medusa", "are those of an EAGLE-1 head: name the folder of a head"),
        (head_answer("Medusa"), "EAGLE", "or set speculation.method to Medusa."),
        (head_answer(hidden_size=None), "EAGLE", "config.json: hidden_size is missing"),
        (head_answer(vocab_size=1 << 30), "EAGLE", "vocab_size is 1073741824; it must be a whole number from 1 to"),
        (head_answer(num_attention_heads=3), "EAGLE", "num_key_value_heads is 2; it must divide"),
        (head_answer(elements=-1), "EAGLE", "cannot be counted"),
        (head_answer(elements=1 << 60), "EAGLE", "cannot be counted"),
        (
            head_answer() | {"draft_head": head_answer()["draft_head"] | {"wrong": "tensor fc.weight is missing"}},
            "EAGLE",
            "tensor fc.weight is missing. Fetch them again, or name the folder of a head",
        ),
        (head_answer("EAGLE-3", draft_vocab_size=4096), "EAGLE", "draft_vocab_size is 4096; it must be at most"),
        (
            head_answer("EAGLE-3", eagle_aux_hidden_state_layer_ids=[1, 2]),
            "EAGLE",
            "eagle_aux_hidden_state_layer_ids must be a list of 3",
        ),
        (
            head_answer("EAGLE-3", eagle_aux_hidden_state_layer_ids=[1, -2, 3]),
            "EAGLE",
            "eagle_aux_hidden_state_layer_ids is -2",
        ),
        (head_answer("Medusa", medusa_num_heads=99), "Medusa", "medusa_num_heads is 99; it must be a whole number"),
    ],
)
def test_what_is_no_such_head_is_refused_with_the_field(answer: dict[str, Any], method: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_inspected_head(answer, method)
    assert said in str(refused.value)


def test_a_head_that_the_runtime_does_not_serve_is_unsupported() -> None:
    with pytest.raises(UnsupportedModelError, match="layernorms True is not supported"):
        read_inspected_head(head_answer(unsupported="layernorms True"), "EAGLE")


@pytest.mark.parametrize(("kind", "method"), [("EAGLE-1", "EAGLE"), ("EAGLE-3", "EAGLE"), ("Medusa", "Medusa")])
def test_a_head_in_the_place_of_a_model_is_named(kind: str, method: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_inspected(read_answer(json.dumps(head_answer(kind))))
    assert f"set speculation.method to {method} and name the head" in str(refused.value)
